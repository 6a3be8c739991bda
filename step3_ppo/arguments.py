"""The flags of step 3. No torch in here."""

from dataclasses import dataclass

from common.flags.args import (
    CheckpointArguments,
    DataArguments,
    DecodeArguments,
    PackingArguments,
    RunArguments,
    ScheduleArguments,
    SharingArguments,
    TokenizerArguments,
    flag,
)
from common.flags.optimizer import OptimizerArguments
from common.flags.value_forms import Interval, KLLimit
from step3_ppo.role_arguments import RoleArguments


@dataclass
class PromptArguments:
    """Prompts, answers and pretraining text."""

    max_prompt_seq_len: int = flag(
        256, "maximum prompt tokens; longer prompts keep their end, and are counted", low=4
    )
    max_answer_seq_len: int = flag(256, "maximum response tokens", low=1)
    unsupervised_dataset_name: str = flag("", "pretraining text mixed into the actor's loss; empty: none")
    unsupervised_dataset_config_name: str = flag(
        "", "its configuration on the hub", only_with="unsupervised_dataset_name"
    )
    unsup_coef: float = flag(
        27.8, "weight of the loss on that text", low=0, only_with="unsupervised_dataset_name"
    )
    unsup_step: str = flag(
        "joint",
        "that loss is added to the policy's in one optimizer step, or makes one of its own behind it, as "
        "DeepSpeed-Chat does",
        choices=("joint", "own"),
        only_with="unsupervised_dataset_name",
    )
    temperature: float = flag(1.0, "sampling temperature, also of all log-probabilities", above=0)
    top_k: int = flag(0, "top-k sampling; 0: off", low=0)
    top_p: float = flag(1.0, "top-p (nucleus) sampling; 1: off", above=0, high=1)
    num_samples_per_prompt: int = flag(1, "responses per prompt (the group size)", low=1, high=2**16)


@dataclass
class RolloutArguments:
    """Batches of a PPO step."""

    per_device_generation_batch_size: int = flag(
        16, "prompts per rank and generation batch", may_change=True, low=1
    )
    generation_batches: int = flag(1, "generation batches per PPO step", may_change=True, low=1)
    per_device_training_batch_size: int = flag(16, "samples per rank and micro-batch", may_change=True, low=1)
    ppo_epochs: int = flag(1, "passes over a step's samples, reshuffled each time", low=1)
    rollout_staleness: int = flag(
        0, "train on rollouts from N steps ago (asynchronous RL)", low=0, high=2**10
    )
    dynamic_sampling_rounds: int = flag(
        0, "DAPO: replace prompts whose responses all score alike, up to N times a step", low=0
    )
    num_warmup_steps: int = flag(
        100, "optimizer steps of linear warm-up", low=0, only_with="lr_scheduler_type!=constant"
    )


@dataclass
class ScoreArguments:
    """Where scores come from, and what becomes of them before the KL penalty."""

    reward: list[str] = flag(
        [],
        "rewards: [WEIGHT*]model:PATH, classifier:PATH[:LABEL], function:MODULE:NAME, http://... or "
        "judge:URL[:MODEL][#TEMPLATE_FILE], or a number, which is added; their weighted sum is the score, "
        "weight 0 is only logged; empty: the critic's initial model",
    )
    environment: str = flag(
        "",
        "MODULE:CLASS that answers the model turn by turn; its rewards are the score, or join --reward's",
    )
    reward_timeout_seconds: float = flag(
        60.0,
        "timeout of a function or server for one batch, of a judge for one answer",
        may_change=True,
        above=0,
        only_with="reward",
    )
    reward_processes: int = flag(
        0, "worker processes of a reward function; 0: none", may_change=True, low=0, only_with="reward"
    )
    reward_batch_size: int = flag(
        64,
        "samples per call of a classifier, function or server; questions to a judge at a time",
        may_change=True,
        low=1,
        only_with="reward",
    )
    reward_on_error: str = flag(
        "refuse",
        "when a response gets no score (error, timeout, NaN): refuse skips the step, default:VALUE scores"
        " it VALUE, mask leaves it out of losses, means and baselines",
    )
    reward_clip: float = flag(5.0, "clip scores to +- this; 0: off", low=0)
    whiten_scores: str = flag(
        "none",
        "whiten scores before clipping, over the step or over each prompt's responses",
        choices=("none", "batch", "group"),
        const="batch",
    )
    length_reward_tokens: int = flag(
        0, "penalty of short responses: 1 for an empty one, falling linearly to 0 at N tokens; 0: off", low=0
    )
    overlong_buffer_tokens: int = flag(
        0,
        "penalty of long responses (DAPO): rising linearly to 1 over the last N tokens of "
        "max_answer_seq_len; 0: off",
        low=0,
    )
    truncated: str = flag(
        "score",
        "a response cut at max_answer_seq_len: score it as it is, bootstrap from the critic too, mask it out "
        "of the loss, or a number that replaces its score; bootstrap:0: both, that and the critic",
    )


@dataclass
class PPOMathArguments:
    """Advantages and losses."""

    algorithm: str = flag(
        "ppo",
        "advantage estimator: ppo, grpo, dr_grpo, rloo, reinforce++, reinforce++-baseline, remax, distill, "
        "one that --plugins registers, or MODULE:FUNCTION",
    )
    distill_loss: str = flag(
        "reverse_kl",
        "divergence from the teacher: [WEIGHT*]reverse_kl, forward_kl or jsd:BETA over the whole vocabulary, "
        "or sampled: reverse_kl by the sampled token, as its advantage",
        only_with="teacher_model_name_or_path",
    )
    kl_coef: float = flag(0.1, "weight of the KL penalty to the reference", low=0)
    kl_in: str = flag(
        "",
        "add the KL penalty to the reward or to the loss, by an estimator: k1 in the reward and k3 in the "
        "loss where none is named; empty: the algorithm's default",
        choices=("", *(f"{at}{kind}" for at in ("reward", "loss") for kind in ("", ":k1", ":k2", ":k3"))),
    )
    kl_target: float = flag(0.0, "adapt --kl_coef towards this KL, in nats per response; 0: fixed", low=0)
    kl_horizon: int = flag(
        10_000, "responses over which --kl_target moves the coefficient", low=1, only_with="kl_target"
    )
    gamma: float = flag(1.0, "discount factor", low=0, high=1)
    gae_lambda: float = flag(0.95, "lambda of GAE", low=0, high=1)
    adv_norm: str = flag(
        "",
        "whiten advantages over the step (batch) or over each prompt's responses (group), or take off the "
        "mean of the group and divide by the step's deviation; empty: the algorithm's default",
        choices=("", "none", "batch", "group", "group_mean_batch_std"),
    )
    policy_loss: str = flag(
        "ppo",
        "policy loss: ppo, gspo, cispo, one that --plugins registers, or MODULE:FUNCTION; options stand "
        "behind it: ppo:dual_clip=3 bounds the loss of negative advantages",
    )
    clip_range: str = flag(
        "",
        "LOW[,HIGH]: the policy loss clips the ratio to 1 - LOW ... 1 + HIGH; empty: the loss's default, "
        "which is 0.2 for ppo",
    )
    loss_aggregation: str = flag(
        "",
        "policy loss: mean over tokens; mean over responses of their token means; or the sum over tokens "
        "divided by responses x max_answer_seq_len; empty: the policy loss's default, else the algorithm's",
        choices=("", "token", "sequence", "constant"),
    )
    rollout_correction: str = flag(
        "none",
        "clip around the policy before the step's updates, and weigh tokens by its probability over the "
        "sampler's: tis:2 (truncated at 2), mis:0.5,2 (masked outside), seq_tis and seq_mis (responses), "
        "geo_rs:0.999,1.001 (responses masked by their geometric mean)",
    )
    prox_logprobs: str = flag(
        "pass",
        "the policy before the step's updates, for --rollout_correction: by a pass of the actor, or without "
        "one, log-linear between the log-probabilities at rollout and those in the updates, by a token's age",
        choices=("pass", "loglinear"),
        only_with="rollout_correction!=none",
    )
    early_stop_kl: KLLimit = flag(
        KLLimit("0"),
        "stop a step's updates after a minibatch whose approximate KL per token exceeds this; KL:skip: leave "
        "out the update of each such minibatch instead; 0: never",
    )
    early_stop_imp_ratio: float = flag(
        0.0, "stop a step's updates after a minibatch whose mean ratio exceeds this; 0: never", low=0
    )
    value_clip_range: float = flag(0.2, "value clip range around the old value; 0: no clipping", low=0)
    value_loss: str = flag("mse", "value loss: squared error or Huber", choices=("mse", "huber"))
    value_norm: str = flag(
        "none",
        "normalise returns for the critic by a running mean and deviation: exponential (exp) or over all "
        "(ma)",
        choices=("none", "exp", "ma"),
    )
    value_norm_beta: float = flag(
        0.99995,
        "share of the running mean and deviation that an update keeps",
        low=0,
        below=1,
        only_with="value_norm=exp",
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    old_logprobs: str = flag(
        "auto",
        "log-probabilities at rollout: the sampler's (rollout; strict: refuse an optimizer step where the "
        "trainer's differ too far), recomputed by a forward pass, or auto: recomputed until sampler and "
        "trainer have agreed for a step",
        choices=("auto", "rollout", "strict", "recompute"),
        only_with="replay_sampling_support=False",
    )
    replay_sampling_support: bool = flag(
        False,
        "with top_k or top_p: compute probabilities over the sampling mask, in every pass",
        only_with="top_k top_p",
    )

    @property
    def kl_place(self) -> str:
        """Where the KL penalty goes: "reward" or "loss"."""
        return self.kl_in.partition(":")[0]

    @property
    def kl_estimator(self) -> str:
        """How it is estimated: "k1", "k2" or "k3"."""
        return self.kl_in.partition(":")[2]


@dataclass
class HybridArguments(DecodeArguments):
    """Generation inside training, EMA, test mode."""

    enable_hybrid_engine: bool = flag(
        False,
        "generate with our own decoder; else with transformers' generate on gathered weights",
        may_change=True,
    )
    inference_tp_size: int = flag(
        1, "tensor-parallel ranks of one copy of the actor during generation", may_change=True, low=1
    )
    inference_tp_groups: str = flag(
        "strided",
        "which ranks share a copy: every (ranks / inference_tp_size)th, so that the fewest bytes come from "
        "other machines at the switch, or neighbours, so that those of every token stay on a machine",
        choices=("strided", "contiguous"),
        may_change=True,
        only_with="inference_tp_size",
    )
    generation_slots: int = flag(
        0,
        "sequences generated at a time on a replica; 0: up to 128",
        may_change=True,
        low=0,
        only_with="enable_hybrid_engine",
    )
    tp_gather_partition_size: int = flag(8, "layers gathered at a time under ZeRO-3", may_change=True, low=1)
    unpin_actor_parameters: bool = flag(
        False,
        "ZeRO-3: gather layer by layer in every pass; slow, needs the least memory",
        may_change=True,
        only_with="actor_zero_stage=3",
    )
    release_inference_cache: bool = flag(
        False,
        "free KV cache, graphs and the slices that they read after generation",
        may_change=True,
        only_with="enable_hybrid_engine",
    )
    offload_states_for_generation: bool = flag(
        False,
        "move optimizer states from the GPU to the CPU while the actor generates: its own, and the critic's "
        "where --critic_zero_stage and --critic_offload let them move",
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
        "print a prompt and its answer every N steps; 0: never (samples.jsonl always has some)",
        may_change=True,
        low=0,
    )


@dataclass
class EvaluationArguments:
    """Held-out prompts, rollouts that are kept, the best model."""

    eval_data_path: list[str] = flag([], "evaluate on these prompts, used whole, not on held-out ones")
    eval_prompts: int = flag(256, "maximum held-out prompts per evaluation; 0: no evaluation", low=0)
    eval_interval: Interval = flag(
        Interval("0"),
        "evaluate every so many PPO steps, after each epoch, or after a time such as 30m, too; 0: only "
        "before and after",
        may_change=True,
    )
    save_rollouts: int = flag(
        0,
        "write all responses of every Nth step to rollouts.jsonl.gz; 0: none",
        may_change=True,
        low=0,
        only_with="output_dir",
    )
    keep_best: str = flag(
        "",
        "export to export_best/ when this metric of the evaluation is the highest so far: eval/score, ...",
        may_change=True,
        only_with="output_dir",
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

    eval_fraction: float = flag(
        0.0, "held-out share of the prompts of a data set that brings no evaluation part", low=0, below=1
    )
    save_interval: Interval = flag(
        Interval("20"),
        "save the whole state every so many PPO steps, after each epoch, or after a time such as 30m, and at "
        "the end; 0: only when stopped",
        may_change=True,
    )

    @property
    def samples_per_step(self) -> int:
        """The responses that a rank samples for one PPO step."""
        prompts = self.per_device_generation_batch_size * self.generation_batches
        return prompts * self.num_samples_per_prompt

    @property
    def samples_per_update(self) -> int:
        """The responses of a rank that an optimizer step learns from."""
        return self.per_device_training_batch_size * self.gradient_accumulation_steps

    @property
    def updates_per_step(self) -> int:
        """The minibatches of a PPO step, for each of which actor and critic make an optimizer step."""
        return self.ppo_epochs * (self.samples_per_step // self.samples_per_update)
