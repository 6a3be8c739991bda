"""Flags of step 3. Does not import torch."""

from dataclasses import dataclass

from common.flags.args import flag, same_flag
from common.flags.groups import (
    CheckpointArguments,
    DataArguments,
    DecodeArguments,
    PackingArguments,
    RunArguments,
    ScheduleArguments,
    SharingArguments,
    TokenizerArguments,
)
from common.flags.optimizer import OptimizerArguments
from common.flags.value_forms import Interval
from step3_ppo.loss_arguments import PPOMathArguments
from step3_ppo.role_arguments import RoleArguments


@dataclass
class PromptArguments:
    """Prompts, responses and pretraining text."""

    max_prompt_seq_len: int = flag(
        256,
        "maximum prompt tokens; longer prompts lose their beginning and are counted",
        low=4,
        is_usual=True,
    )
    max_answer_seq_len: int = flag(256, "maximum response tokens", low=1, is_usual=True)
    unsupervised_dataset_name: str = flag(
        "", "pretraining text for the unsupervised loss of the actor; empty: none"
    )
    unsupervised_dataset_config_name: str = flag(
        "", "configuration of that data set on the hub", only_with="unsupervised_dataset_name"
    )
    unsup_coef: float = flag(
        27.8, "weight of the unsupervised loss", low=0, only_with="unsupervised_dataset_name"
    )
    unsup_step: str = flag(
        "joint",
        "joint: add the unsupervised loss to the policy loss; own: a separate optimizer step after each "
        "update, as in DeepSpeed-Chat",
        choices=("joint", "own"),
        only_with="unsupervised_dataset_name",
    )
    temperature: float = flag(1.0, "sampling temperature, applied to all log-probabilities too", above=0)
    top_k: int = flag(0, "top-k sampling; 0: off", low=0)
    top_p: float = flag(1.0, "top-p (nucleus) sampling; 1: off", above=0, high=1)
    num_samples_per_prompt: int = flag(
        1, "responses per prompt (group size)", low=1, high=2**16, is_usual=True
    )


@dataclass
class RolloutArguments:
    """Batches of a PPO step."""

    per_device_generation_batch_size: int = flag(
        16, "prompts per rank and generation batch", may_change=True, low=1, is_usual=True
    )
    generation_batches: int = flag(1, "generation batches per PPO step", may_change=True, low=1)
    per_device_training_batch_size: int = flag(
        16, "samples per rank and micro-batch", may_change=True, low=1, is_usual=True
    )
    max_tokens_per_scoring_pass: int = flag(
        0,
        "token budget of a pass without gradients; 0: that of --max_tokens_per_micro_batch",
        may_change=True,
        low=0,
    )
    ppo_epochs: int = flag(1, "passes over the samples of a step, reshuffled each time", low=1)
    rollout_staleness: int = flag(
        0, "train on rollouts that are N steps old (asynchronous RL)", low=0, high=2**10
    )
    dynamic_sampling_rounds: int = flag(
        0, "DAPO: replace prompts whose responses all have the same score, in up to N rounds per step", low=0
    )


@dataclass
class ScoreArguments:
    """Rewards and score shaping."""

    reward: list[str] = flag(
        [],
        "rewards: [WEIGHT*]model:PATH, classifier:PATH[:LABEL], function:MODULE:NAME, http://..., "
        "judge:URL[:MODEL][#TEMPLATE_FILE], or a constant; the score is their weighted sum, and a reward of"
        " weight 0 is only logged; empty: the initial critic",
        is_usual=True,
    )
    environment: str = flag(
        "",
        "MODULE:CLASS of an environment that replies to the model turn by turn; its rewards are the score, "
        "or are added to those of --reward",
    )
    reward_timeout_seconds: float = flag(
        60.0,
        "timeout of a function or server per batch, of a judge per response",
        may_change=True,
        above=0,
        only_with="reward",
    )
    reward_processes: int = flag(
        0,
        "worker processes of a reward function; 0: run it in the training process",
        may_change=True,
        low=0,
        only_with="reward",
    )
    reward_batch_size: int = flag(
        64,
        "samples per call of a classifier, function or server; concurrent requests to a judge",
        may_change=True,
        low=1,
        only_with="reward",
    )
    reward_on_error: str = flag(
        "refuse",
        "what to do with a response that gets no score (error, timeout, NaN): refuse skips the step, "
        "default substitutes --reward_default_score, mask excludes the response from losses, means and "
        "baselines",
        choices=("refuse", "default", "mask"),
    )
    reward_default_score: float = flag(
        0.0, "score of a response that gets none", only_with="reward_on_error=default"
    )
    reward_clip: float = flag(5.0, "clip scores to [-N, N]; 0: off", low=0)
    whiten_scores: str = flag(
        "none",
        "whiten scores before clipping, over the step (batch) or over the responses to each prompt (group)",
        choices=("none", "batch", "group"),
    )
    length_reward_tokens: int = flag(
        0,
        "penalty for short responses: 1 for an empty response, falling linearly to 0 at N tokens; 0: off",
        low=0,
    )
    overlong_buffer_tokens: int = flag(
        0,
        "penalty for long responses (DAPO), rising linearly to 1 over the last N tokens of "
        "--max_answer_seq_len; 0: off",
        low=0,
    )
    truncated: str = flag(
        "score",
        "treatment of a response truncated at --max_answer_seq_len: scored as usual (score), "
        "bootstrapped from the critic too (bootstrap), or masked out of the loss (mask)",
        choices=("score", "bootstrap", "mask"),
    )
    truncated_score: float | None = flag(
        None, "score of a truncated response, in place of its own; empty: its own"
    )


@dataclass
class HybridArguments(DecodeArguments):
    """Generation and EMA."""

    enable_hybrid_engine: bool = flag(
        False,
        "generate with the hybrid engine; false: with transformers' generate on gathered weights",
        may_change=True,
        is_usual=True,
    )
    inference_tp_size: int = flag(
        1, "tensor-parallel ranks per replica of the actor during generation", may_change=True, low=1
    )
    inference_tp_groups: str = flag(
        "strided",
        "ranks of a replica: strided takes every (ranks / --inference_tp_size)th rank, so that the switch "
        "to generation sends the fewest bytes between machines; contiguous takes neighbours, so that the "
        "traffic of each token stays within a machine",
        choices=("strided", "contiguous"),
        may_change=True,
        only_with="inference_tp_size",
    )
    generation_slots: int = flag(
        0,
        "sequences that a replica generates at a time; 0: up to 128",
        may_change=True,
        low=0,
        only_with="enable_hybrid_engine",
    )
    tp_gather_partition_size: int = flag(8, "layers gathered at a time under ZeRO-3", may_change=True, low=1)
    unpin_actor_parameters: bool = flag(
        False,
        "ZeRO-3: gather weights layer by layer in every pass; slow, but needs the least memory",
        may_change=True,
        only_with="actor_zero_stage=3",
    )
    release_inference_cache: bool = flag(
        False,
        "free the KV cache, CUDA graphs and tensor-parallel slices after generation",
        may_change=True,
        only_with="enable_hybrid_engine",
    )
    merge_adapters: str = flag(
        "auto",
        "merge LoRA adapters into a copy of the actor's weights for generation; auto: only where generation "
        "copies the weights anyway, under ZeRO-3 or with --inference_tp_size above 1",
        choices=("auto", "true", "false"),
        only_with="actor_lora_dim",
    )
    exact: bool = flag(
        False,
        "compute so that sampler and trainer are equal to the bit in any precision, with any number of slots "
        "and ranks; slower, for checking: any gap between them is a mistake",
        only_with="enable_hybrid_engine",
    )
    offload_states_for_generation: bool = flag(
        False,
        "move optimizer states to the CPU during generation: the actor's, and the critic's if "
        "--critic_zero_stage and --critic_offload allow it",
        may_change=True,
    )
    ema_decay: float = flag(
        0.0,
        "decay of the moving average of the actor's weights, exported to export_ema/; 0: no average",
        low=0,
        below=1,
    )
    print_answers_interval: int = flag(
        0,
        "print a sample every N steps; 0: never (samples.jsonl is always written)",
        may_change=True,
        low=0,
    )


@dataclass
class EvaluationArguments:
    """Evaluation, saved rollouts and the best model."""

    eval_data_path: list[str] = flag(
        [], "data sets of prompts to evaluate on, used whole, in place of held-out prompts"
    )
    eval_prompts: int = flag(256, "maximum held-out prompts per evaluation; 0: no evaluation", low=0)
    eval_interval: Interval = flag(
        Interval("0"),
        "evaluate every N PPO steps, every epoch, or at a time interval such as 30m; 0: only before and "
        "after training",
        may_change=True,
        is_usual=True,
    )
    save_rollouts: int = flag(
        0,
        "write all responses of every Nth step to rollouts.jsonl.gz; 0: never",
        may_change=True,
        low=0,
        only_with="output_dir",
    )
    keep_best: str = flag(
        "",
        "export to export_best/ at each new maximum of a metric such as eval/score",
        may_change=True,
        only_with="output_dir",
        is_usual=True,
    )


@dataclass
class PPOArguments(
    DataArguments,
    PromptArguments,
    TokenizerArguments,
    RoleArguments,
    RolloutArguments,
    ScheduleArguments,
    OptimizerArguments,
    PackingArguments,
    SharingArguments,
    ScoreArguments,
    PPOMathArguments,
    EvaluationArguments,
    HybridArguments,
    CheckpointArguments,
    RunArguments,
):
    """PPO."""

    eval_fraction: float = same_flag(DataArguments, "eval_fraction", 0.0)
    num_warmup_steps: int = same_flag(ScheduleArguments, "num_warmup_steps", 100)
    save_interval: Interval = same_flag(CheckpointArguments, "save_interval", Interval("20"))

    @property
    def batches_per_step(self) -> int:
        """Generated batches per PPO step: --generation_batches, or the multiple that an optimizer step takes,
        as in DeepSpeed-Chat. The weights do not change between them.
        """
        prompts = self.per_device_generation_batch_size * self.generation_batches
        times, rest = divmod(self.samples_per_update, prompts * self.num_samples_per_prompt)
        return self.generation_batches * (max(times, 1) if rest == 0 else 1)

    @property
    def samples_per_step(self) -> int:
        """Responses per rank and PPO step."""
        return self.per_device_generation_batch_size * self.batches_per_step * self.num_samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        """Responses per rank and optimizer step."""
        return self.per_device_training_batch_size * self.gradient_accumulation_steps

    @property
    def updates_per_step(self) -> int:
        """Minibatches per PPO step: one optimizer step each for the actor and the critic."""
        return self.ppo_epochs * (self.samples_per_step // self.samples_per_update)
