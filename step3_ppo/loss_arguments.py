"""Flags of step 3 for advantages and losses. Does not import torch."""

from dataclasses import dataclass

from common.flags.args import flag

# Default of --trusted_logprob_gap. In 16 bits sampler and trainer round apart by 0.01 to 0.04 nats per token,
# which costs nothing that eight seeds show (docs/results.md).
TRUSTED_GAP = {"fp32": 1e-3, "bf16": 0.05, "fp16": 0.05}


@dataclass
class PPOMathArguments:
    """Advantages and losses."""

    algorithm: str = flag(
        "ppo",
        "advantage estimator: ppo, grpo, dr_grpo, rloo, reinforce++, reinforce++-baseline, remax, distill, "
        "a name that --plugins registers, or MODULE:FUNCTION",
        is_usual=True,
    )
    distill_loss: str = flag(
        "reverse_kl",
        "divergence from the teacher, over the whole vocabulary; or sampled: reverse KL of the sampled "
        "tokens, used as their advantage",
        choices=("reverse_kl", "forward_kl", "jsd", "sampled"),
        only_with="teacher_model_name_or_path",
    )
    distill_weight: float = flag(
        1.0, "weight of the divergence from the teacher", above=0, only_with="teacher_model_name_or_path"
    )
    distill_beta: float = flag(
        0.5,
        "share of the teacher in the mixture of jsd; 0: forward_kl, 1: reverse_kl",
        low=0,
        high=1,
        only_with="distill_loss=jsd",
    )
    kl_coef: float = flag(0.1, "weight of the KL penalty to the reference", low=0, is_usual=True)
    kl_in: str = flag(
        "",
        "where to apply the KL penalty; empty: the algorithm's default",
        choices=("", "reward", "loss"),
    )
    kl_estimator: str = flag(
        "",
        "estimator of the KL penalty; empty: k1 in the reward, k3 in the loss",
        choices=("", "k1", "k2", "k3"),
    )
    kl_target: float = flag(
        0.0, "adapt --kl_coef towards this KL, in nats per response; 0: fixed coefficient", low=0
    )
    kl_horizon: int = flag(
        10_000,
        "number of responses over which --kl_target adapts the coefficient",
        low=1,
        only_with="kl_target",
    )
    gamma: float = flag(1.0, "discount factor", low=0, high=1)
    gae_lambda: float = flag(0.95, "lambda of GAE", low=0, high=1)
    adv_norm: str = flag(
        "",
        "normalise advantages: whiten over the step (batch) or over the responses to each prompt (group), "
        "or subtract the group mean and divide by the standard deviation of the step; empty: the "
        "algorithm's default",
        choices=("", "none", "batch", "group", "group_mean_batch_std"),
    )
    policy_loss: str = flag(
        "ppo",
        "policy loss: ppo, gspo, cispo, a name that --plugins registers, or MODULE:FUNCTION; options "
        "follow, as in ppo:dual_clip=3, which bounds the loss at negative advantages",
    )
    clip_range: float = flag(
        0.0,
        "clip the ratio to this range below and above 1; 0: the default of the policy loss, 0.2 for ppo",
        low=0,
    )
    clip_range_high: float = flag(
        0.0, "range above 1, if different (DAPO's clip-higher); 0: --clip_range", low=0
    )
    loss_aggregation: str = flag(
        "",
        "mean over tokens (token); mean over responses of their token means (sequence); sum over tokens "
        "divided by responses x --max_answer_seq_len (constant); empty: the default of the policy loss, "
        "else of the algorithm",
        choices=("", "token", "sequence", "constant"),
    )
    rollout_correction: str = flag(
        "none",
        "importance weights of prox / sampler, where prox is the policy before the updates of the step: "
        "truncated (tis) or zero outside the bounds (mis), per response (seq_tis, seq_mis), or responses "
        "rejected by their geometric mean (geo_rs); the policy loss then clips the ratio to prox",
        choices=("none", "tis", "mis", "seq_tis", "seq_mis", "geo_rs"),
    )
    correction_low: float = flag(
        0.0, "lower bound of --rollout_correction", low=0, only_with="correction_high"
    )
    correction_high: float = flag(
        0.0,
        "upper bound of --rollout_correction; 0: the usual bounds, 0 and 2, for geo_rs 0.999 and 1.001",
        low=0,
        only_with="rollout_correction!=none",
    )
    prox_logprobs: str = flag(
        "pass",
        "log-probabilities of prox for --rollout_correction: from a forward pass, or log-linear between "
        "those at rollout and those in the update, by the age of the token",
        choices=("pass", "loglinear"),
        only_with="rollout_correction!=none",
    )
    early_stop_kl: float = flag(
        0.0,
        "limit of the approximate KL per token of a minibatch, in nats, see --early_stop_action; 0: no limit",
        low=0,
    )
    early_stop_action: str = flag(
        "stop",
        "at a minibatch above --early_stop_kl: make its update and stop those of the step, or skip only its "
        "update",
        choices=("stop", "skip"),
        only_with="early_stop_kl",
    )
    early_stop_imp_ratio: float = flag(
        0.0, "stop the updates of a step after a minibatch whose mean ratio exceeds this; 0: never", low=0
    )
    value_clip_range: float = flag(
        0.2, "clip values to this range around the old values; 0: no clipping", low=0
    )
    value_loss: str = flag("mse", "value loss: squared error or Huber", choices=("mse", "huber"))
    value_norm: str = flag(
        "none",
        "normalise returns for the critic by running mean and standard deviation: exponential (exp) or over"
        " all returns so far (ma)",
        choices=("none", "exp", "ma"),
    )
    value_norm_beta: float = flag(
        0.99995,
        "decay of the running mean and standard deviation",
        low=0,
        below=1,
        only_with="value_norm=exp",
    )
    entropy_coef: float = flag(0.0, "weight of the entropy bonus")
    old_logprobs: str = flag(
        "auto",
        "log-probabilities at rollout: the sampler's (rollout; strict also skips an optimizer step where "
        "the trainer's differ too much), recomputed by a forward pass (recompute), or auto: recomputed "
        "until sampler and trainer have agreed for a step",
        choices=("auto", "rollout", "strict", "recompute"),
        only_with="replay_sampling_support=False",
    )
    trusted_logprob_gap: float | None = flag(
        None,
        "mean difference of the log-probabilities of sampler and trainer, in nats per token, up to which the "
        "sampler's are used; empty: 0.001 in fp32, 0.05 in bf16 and fp16",
        above=0,
        only_with="old_logprobs=auto old_logprobs=rollout old_logprobs=strict",
    )
    replay_sampling_support: bool = flag(
        False,
        "with --top_k or --top_p: renormalise probabilities over the tokens that could be sampled, in every"
        " pass",
        only_with="top_k top_p",
    )

    def exceeds_kl(self, approximate_kl: float) -> bool:
        """Whether the KL of a minibatch, in nats per token, is above --early_stop_kl."""
        return 0 < self.early_stop_kl < approximate_kl
