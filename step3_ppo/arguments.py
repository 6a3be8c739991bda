"""The flags of step 3. No torch in here."""

from dataclasses import dataclass

from common.flags.args import (
    CheckpointArguments,
    DataArguments,
    PackingArguments,
    RunArguments,
    ScheduleArguments,
    TokenizerArguments,
    flag,
)
from step3_ppo.role_arguments import RoleArguments


@dataclass
class PromptArguments:
    """Prompts, answers and pretraining text."""

    max_prompt_seq_len: int = flag(
        256, "prompt tokens at most; the tail of a longer prompt is kept, and counted", low=4
    )
    max_answer_seq_len: int = flag(256, "response tokens at most", low=1)
    unsupervised_dataset_name: str = flag("", "text data mixed into the actor's loss; empty: none")
    unsupervised_dataset_config_name: str = flag(
        "", "its configuration on the hub", only_with="unsupervised_dataset_name"
    )
    unsup_coef: float = flag(
        27.8,
        "weight of the language-modelling loss on that text",
        low=0,
        only_with="unsupervised_dataset_name",
    )
    temperature: float = flag(1.0, "sampling temperature; log-probabilities are taken at it too", above=0)
    top_k: int = flag(0, "sample from the k likeliest tokens only; 0: all", low=0)
    top_p: float = flag(1.0, "sample from the smallest set of tokens with this probability", above=0, high=1)
    num_samples_per_prompt: int = flag(1, "responses sampled for each prompt: a group", low=1, high=2**16)


@dataclass
class RolloutArguments:
    """Batches of a PPO step."""

    per_device_generation_batch_size: int = flag(
        16, "prompts per rank and generation batch", may_change=True, low=1
    )
    generation_batches: int = flag(1, "generation batches per PPO step", may_change=True, low=1)
    per_device_training_batch_size: int = flag(
        16, "samples per rank and micro-batch of the update", may_change=True, low=1
    )
    ppo_epochs: int = flag(1, "passes over the samples of a step, reshuffled each time", low=1)
    rollout_staleness: int = flag(0, "train on rollouts of so many PPO steps ago", low=0, high=2**10)
    dynamic_sampling_rounds: int = flag(
        0,
        "replace prompts whose responses all have one score by new prompts, up to so many times a step",
        low=0,
    )
    num_warmup_steps: int = flag(
        100, "optimizer steps of linear warm-up", low=0, only_with="lr_scheduler_type!=constant"
    )


@dataclass
class ScoreArguments:
    """Where scores come from, and what becomes of them before the KL penalty."""

    reward: list[str] = flag(
        [],
        "scores: [WEIGHT*]model:PATH, classifier:PATH[:LABEL], function:MODULE:NAME or http://...; several "
        "are added up, one of weight 0 is only logged; empty: the reward model",
    )
    reward_timeout_seconds: float = flag(
        60.0,
        "how long a function or a server may take for a batch",
        may_change=True,
        above=0,
        only_with="reward",
    )
    reward_processes: int = flag(
        0,
        "processes that a plain reward function runs in; 0: in this one",
        may_change=True,
        low=0,
        only_with="reward",
    )
    reward_batch_size: int = flag(
        64,
        "samples given to a classifier, a function or a server at a time",
        may_change=True,
        low=1,
        only_with="reward",
    )
    reward_on_error: str = flag(
        "refuse",
        "when a reward gives a response no score (an error, too late, NaN): refuse the step; default:VALUE, "
        "which is then its score; or mask: it counts in no loss, mean or baseline",
    )
    reward_clip: float = flag(5.0, "scores are clipped to +- this; 0: never", low=0)
    whiten_scores: bool = flag(False, "scale each step's scores to mean 0 and deviation 1 before clipping")
    length_reward_coef: float = flag(
        0.0,
        "taken off the score of an empty response, less for a longer one, up to length_reward_tokens",
        only_with="length_reward_tokens",
    )
    length_reward_tokens: int = flag(
        0, "response tokens from which nothing is taken off any more", low=0, only_with="length_reward_coef"
    )
    overlong_penalty: float = flag(
        0.0,
        "taken off the score of a response of full length, less inside the last overlong_buffer_tokens",
        low=0,
    )
    overlong_buffer_tokens: int = flag(
        0, "tokens before max_answer_seq_len in which that penalty grows", low=0, only_with="overlong_penalty"
    )
    truncated: str = flag(
        "score",
        "a response cut by max_answer_seq_len: is scored as it is, also gets the critic's value of what "
        "would follow, gets truncated_penalty in place of a score, or counts in no loss",
        choices=("score", "bootstrap", "penalty", "mask"),
    )
    truncated_penalty: float = flag(
        -1.0, "the score of a cut response under --truncated penalty", only_with="truncated=penalty"
    )


@dataclass
class PPOMathArguments:
    """Advantages and losses."""

    algorithm: str = flag(
        "ppo",
        "how advantages are made: ppo, grpo, dr_grpo, rloo, reinforce++, reinforce++-baseline, one that "
        "--plugins registers, or MODULE:FUNCTION",
    )
    kl_coef: float = flag(0.1, "weight of the KL penalty to the reference", low=0)
    kl_in: str = flag(
        "", "where that penalty goes; empty: where the algorithm has it", choices=("", "reward", "loss")
    )
    kl_estimator: str = flag(
        "", "estimate of the KL; empty: k1 in the reward, k3 in the loss", choices=("", "k1", "k2", "k3")
    )
    kl_target: float = flag(0.0, "steer kl_coef towards this KL (nats a response); 0: it stays fixed", low=0)
    gamma: float = flag(1.0, "discount of later rewards", low=0, high=1)
    gae_lambda: float = flag(0.95, "lambda of generalised advantage estimation", low=0, high=1)
    adv_norm: str = flag(
        "",
        "scale advantages to mean 0 and deviation 1 over the step or over each prompt's responses; empty: as "
        "the algorithm does",
        choices=("", "none", "batch", "group"),
    )
    clip_range: float = flag(0.2, "the ratio's gradient ends outside 1 +- this", above=0)
    clip_range_high: float = flag(0.0, "another range above 1; 0: clip_range", low=0)
    c_clip: float = flag(
        0.0, "dual clip: a negative advantage costs at most this times itself; 0: no limit", low=0
    )
    loss_aggregation: str = flag(
        "",
        "a policy loss is the mean over tokens, the mean over responses of their means, or the sum over "
        "tokens by the number of responses times max_answer_seq_len; empty: as the algorithm does",
        choices=("", "token", "sequence", "constant"),
    )
    use_decoupled_loss: bool = flag(
        False, "clip around the policy before the updates, and weigh by what it was to the sampler"
    )
    behav_imp_weight_cap: float = flag(
        0.0,
        "tokens with a larger such weight count nothing; 0: no limit",
        low=0,
        only_with="use_decoupled_loss",
    )
    early_stop_kl: float = flag(
        0.0, "end a step's updates when a minibatch has moved by this KL a token; 0: never", low=0
    )
    value_clip_range: float = flag(
        0.2, "the critic moves at most this far from its old value; 0: no limit", low=0
    )
    value_loss: str = flag("mse", "squared error, or Huber's", choices=("mse", "huber"))
    value_norm: str = flag(
        "none",
        "let the critic learn returns scaled by their running mean and deviation: an exponential average or "
        "that of all",
        choices=("none", "exp", "ma"),
    )
    value_norm_beta: float = flag(
        0.99995,
        "how much of the exponential average a step keeps",
        low=0,
        below=1,
        only_with="value_norm=exp",
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    old_logprobs: str = flag(
        "auto",
        "log-probabilities at rollout: from the sampler, or from one more forward pass, or (auto) from the "
        "sampler as long as both agree",
        choices=("auto", "rollout", "recompute"),
        only_with="replay_sampling_support=False",
    )
    replay_sampling_support: bool = flag(
        False,
        "with top_k or top_p, take probabilities among the tokens that could be sampled, everywhere",
        only_with="top_k top_p",
    )


@dataclass
class HybridArguments:
    """Generation inside training, EMA, test mode."""

    enable_hybrid_engine: bool = flag(
        False,
        "generate by our own decoder; without it by transformers' generate on gathered weights",
        may_change=True,
    )
    inference_tp_size: int = flag(
        1, "ranks that share one copy of the actor while it generates", may_change=True, low=1
    )
    generation_slots: int = flag(
        0,
        "sequences that are generated at a time on a replica; 0: up to 128",
        may_change=True,
        low=0,
        only_with="enable_hybrid_engine",
    )
    tp_gather_partition_size: int = flag(
        8, "layers that are gathered at a time under ZeRO 3", may_change=True, low=1
    )
    unpin_actor_parameters: bool = flag(
        False,
        "under ZeRO 3 gather layer by layer in every pass: slow, takes the least memory",
        may_change=True,
        only_with="actor_zero_stage=3",
    )
    release_inference_cache: bool = flag(
        False,
        "free keys, values and buffers after generation",
        may_change=True,
        only_with="enable_hybrid_engine",
    )
    offload_states_for_generation: bool = flag(
        False, "move the actor's optimizer state from the GPU to the CPU while it generates", may_change=True
    )
    ema_decay: float = flag(
        0.0,
        "average the actor's weights into export_ema/: share of the average that an update keeps; 0: none",
        low=0,
        below=1,
    )
    print_answers_interval: int = flag(
        0,
        "print a prompt and its answer every so many steps (samples.jsonl always has some); 0: never",
        may_change=True,
        low=0,
    )
    export_critic: bool = flag(False, "export the critic too, to export_critic/", may_change=True)


@dataclass
class EvaluationArguments:
    """Held-out prompts, samples, exports on the way."""

    eval_data_path: list[str] = flag([], "prompts to evaluate on, used whole, in place of held-out ones")
    eval_prompts: int = flag(256, "held-out prompts that are answered, at most; 0: no evaluation", low=0)
    eval_interval: int = flag(
        0, "evaluate every so many PPO steps too; 0: only before and after", may_change=True, low=0
    )
    sample_interval: int = flag(
        0,
        "answer the first held-out prompts, else the data's first, after step 1 and every so many; 0: never",
        may_change=True,
        low=0,
    )
    save_rollouts: int = flag(
        0,
        "write all responses of every so-manieth step to rollouts.jsonl.gz; 0: none",
        may_change=True,
        low=0,
        only_with="output_dir",
    )
    export_interval: int = flag(
        0,
        "export the actor every so many steps too, to export-STEP/; 0: only at the end",
        may_change=True,
        low=0,
        only_with="output_dir",
    )
    keep_best: str = flag(
        "",
        "export to export_best/ whenever this number of an evaluation is the highest so far: eval/score, ...",
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
    PackingArguments,
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
    save_interval: int = flag(
        20,
        "save the whole state every so many PPO steps, and at the end; 0: only when stopped",
        may_change=True,
        low=0,
    )
    save_points: str = flag(
        "step",
        "where in a due step: after it, after its rollouts too, or after every minibatch too",
        choices=("step", "rollout", "minibatch"),
        may_change=True,
    )
