"""Advantage estimators: functions that add advantages to a rollout batch. They do not use an engine.

An algorithm is called as `add_advantages(batch, args, kl_coef) -> batch`; `batch` has this rank's responses
(`step3_ppo/rollout_batch.py`) in whole groups, and the empty flags of `args` are filled in. Every rank calls
it: statistics of the step come from `step_mean` and `with_advantages`. It is registered by name, with its
requirements and defaults:

    @register_algorithm("mine", ignores=("gae_lambda",))
    def add_advantages(batch, args, kl_coef):
        ...
        return with_advantages(batch, args, rewards, advantages)

# b responses of this rank, R tokens of the longest
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.data.packed_batch import PackedBatch
from common.flags.plugins import FunctionsByName
from common.models.divergence import FORWARD_KL, REVERSE_KL
from common.models.tensor_ops import masked_sum, whiten
from common.ranks import distributed
from step3_ppo.arguments import PPOArguments
from step3_ppo.policy_losses import find_policy_loss
from step3_ppo.ppo_math import (
    GroupBaselines,
    discounted_returns,
    generalized_advantages,
    group_baselines,
    group_centre,
    group_whiten,
    kl_estimate,
    kl_penalised_rewards,
)
from step3_ppo.rewards.score_shaping import shape_scores
from step3_ppo.rollout_batch import sampled_mask, spread_over_tokens, tokens, with_tokens

AddAdvantages = Callable[[PackedBatch, PPOArguments, float], PackedBatch]

# As in TRL; keeps the rounding error of nearly equal scores from becoming an advantage.
STD_EPSILON = 1e-4
USUAL_ESTIMATORS = {"reward": "k1", "loss": "k3"}


@dataclass(frozen=True)
class Algorithm:
    """An advantage estimator, and its defaults for empty flags."""

    name: str
    add_advantages: AddAdvantages
    needs_critic: bool = False  # its batch has old_values, and it fills in returns
    needs_greedy: bool = False  # its batch has the greedy response's greedy_scores, _is_finished and _lengths
    needs_group: bool = False  # compares responses to one prompt: --num_samples_per_prompt above 1
    needs_teacher: bool = False  # --teacher_model_name_or_path replaces the reference; scores are optional
    kl_in: str = "reward"
    adv_norm: str = "none"
    loss_aggregation: str = "token"
    ignores: tuple[str, ...] = ()  # flags that it does not read


ALGORITHMS: FunctionsByName[Algorithm] = FunctionsByName("algorithm", Algorithm, ("batch", "args", "kl_coef"))
register_algorithm = ALGORITHMS.register
find_algorithm = ALGORITHMS.find


def fill_defaults(args: PPOArguments, algorithm: Algorithm) -> PPOArguments:
    """`args` with empty flags set to the defaults of the algorithm or the policy loss.

    Raises ValueError for an unknown policy loss.
    """
    reads_kl = "kl_in" not in algorithm.ignores
    kl_in = (reads_kl and args.kl_in) or algorithm.kl_in
    loss = find_policy_loss(args.policy_loss)[0]
    clip_range_high = args.clip_range_high
    if not args.clip_range:
        clip_range_high = clip_range_high or loss.clip_range_high
    return dataclasses.replace(
        args,
        kl_in=kl_in,
        kl_estimator=(reads_kl and args.kl_estimator) or USUAL_ESTIMATORS[kl_in],
        adv_norm=args.adv_norm or algorithm.adv_norm,
        clip_range=args.clip_range or loss.clip_range,
        clip_range_high=clip_range_high,
        loss_aggregation=args.loss_aggregation or loss.loss_aggregation or algorithm.loss_aggregation,
    )


def unused_flags(algorithm: Algorithm, given: set[str]) -> list[str]:
    """The given flags (names without dashes) that the algorithm does not read, sorted."""
    unused = set(algorithm.ignores)
    if not algorithm.needs_critic:
        unused |= {name for name in given if name.startswith(("critic_", "value_")) or name == "gae_lambda"}
        # The critic's flags also shard the reward models and, without --reward, name the reward model.
        unused -= {"critic_zero_stage"}
        if "reward" not in given:
            unused -= {"critic_model_name_or_path"}
    return sorted(unused & given)


def divergence_beta(args: PPOArguments) -> float | None:
    """`beta` of `common.models.divergence` for --distill_loss; None: sampled tokens only."""
    betas = {"reverse_kl": REVERSE_KL, "forward_kl": FORWARD_KL, "jsd": args.distill_beta}
    return betas.get(args.distill_loss)


# ---------------------------------------------------------------------------------------------------------
# Parts shared by several algorithms
# ---------------------------------------------------------------------------------------------------------


def shaped_scores(batch: PackedBatch, args: PPOArguments) -> torch.Tensor:
    """Scores (b,) fp32 after the shaping set by the flags. Every rank must call this."""
    numbers = (batch.numbers(key) for key in ("scores", "is_finished", "group_ids"))
    return _shape(args, *numbers, batch.lengths["response_ids"])


def scores_with_greedy(batch: PackedBatch, args: PPOArguments) -> tuple[torch.Tensor, torch.Tensor]:
    """`shaped_scores` and those of the greedy responses to the same prompts, (b,) fp32 each.

    They are whitened together. Every rank must call this.
    """
    keys = ("scores", "is_finished", "group_ids")
    columns = [batch.numbers(key) for key in keys] + [batch.lengths["response_ids"]]
    greedy = [batch.numbers(f"greedy_{key}") for key in ("scores", "is_finished")]
    greedy += [batch.numbers("group_ids"), batch.numbers("greedy_lengths")]
    shaped = _shape(args, *(torch.cat(pair) for pair in zip(columns, greedy, strict=True)))
    return shaped.split(len(batch))


def _shape(
    args: PPOArguments,
    scores: torch.Tensor,
    is_finished: torch.Tensor,
    group_ids: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    return shape_scores(scores, lengths, is_finished, group_ids, args, distributed.reduce_sum)


def step_mean(numbers: torch.Tensor) -> torch.Tensor:
    """Mean of numbers (N) over all ranks: fp64 scalar, NaN without any. Every rank must call this."""
    sums = torch.stack([numbers.double().sum(), torch.tensor(float(len(numbers)), dtype=torch.float64)])
    total, count = distributed.reduce_sum(sums)
    return total / count


def token_rewards(
    batch: PackedBatch, scores: torch.Tensor, args: PPOArguments, kl_coef: float
) -> torch.Tensor:
    """Rewards (b, R) fp32: the score (b,) at the last token, minus the KL of each sampled token if the
    penalty is in the reward.
    """
    kl = _kl_in_reward(batch, args)
    return kl_penalised_rewards(scores, kl, sampled_mask(batch), kl_coef=kl_coef)


def compare_in_groups(
    batch: PackedBatch, args: PPOArguments, kl_coef: float
) -> tuple[torch.Tensor, torch.Tensor, GroupBaselines]:
    """(`token_rewards`, their sums (b,) float64, group baselines of these sums).

    A response is one action: its sum is the score, minus the KL of all its tokens if the penalty is in the
    reward.
    """
    scores = shaped_scores(batch, args)
    kl = masked_sum(_kl_in_reward(batch, args), sampled_mask(batch), dim=1)
    compared = scores - kl_coef * kl
    group = group_baselines(compared, batch.numbers("group_ids"))
    return token_rewards(batch, scores, args, kl_coef), compared.double(), group


def _kl_in_reward(batch: PackedBatch, args: PPOArguments) -> torch.Tensor:
    """KL estimate (b, R) in the rewards; zeros if the penalty is in the loss."""
    old_logprobs = tokens(batch, "old_logprobs")
    if args.kl_in != "reward":
        return torch.zeros_like(old_logprobs)
    return kl_estimate(old_logprobs, tokens(batch, "ref_logprobs"), args.kl_estimator)


def with_advantages(
    batch: PackedBatch,
    args: PPOArguments,
    rewards: torch.Tensor,
    advantages: torch.Tensor,
    **more: torch.Tensor,
) -> PackedBatch:
    """The batch with rewards, advantages after `--adv_norm`, the loss mask, and `more`.

    All are (b, R); advantages are 0 for tokens that do not count. Statistics are over the counting tokens of
    the whole step or of each prompt's responses. Every rank must call this.
    """
    mask = tokens(batch, "loss_mask")
    if args.truncated == "mask":  # overlong filtering (DAPO, arXiv:2503.14476): its score still counts
        mask = mask & batch.numbers("is_finished")[:, None]
    if args.adv_norm == "batch":
        advantages = whiten(advantages, mask, reduce_sum=distributed.reduce_sum)
    elif args.adv_norm == "group_mean_batch_std":
        centred = group_centre(advantages, mask, batch.numbers("group_ids"))
        advantages = whiten(centred, mask, reduce_sum=distributed.reduce_sum)
    elif args.adv_norm == "group":
        advantages = group_whiten(advantages, mask, batch.numbers("group_ids"))
    else:
        advantages = torch.where(mask, advantages.float(), 0.0)
    return with_tokens(batch, rewards=rewards, advantages=advantages, loss_mask=mask, **more)


# ---------------------------------------------------------------------------------------------------------
# The algorithms
# ---------------------------------------------------------------------------------------------------------


@register_algorithm("ppo", needs_critic=True, adv_norm="batch")
@torch.no_grad()
def add_ppo_advantages(batch: PackedBatch, args: PPOArguments, kl_coef: float) -> PackedBatch:
    """The batch with KL-penalised rewards, generalised advantages and returns.

    PPO, arXiv:1707.06347; for language models arXiv:2203.02155. Values are in the units of the scores.
    """
    rewards = token_rewards(batch, shaped_scores(batch, args), args, kl_coef)
    # A finished response ends in a terminal state of value 0; a truncated one can use the critic's value.
    is_bootstrapped = ~batch.numbers("is_finished") & (args.truncated == "bootstrap")
    advantages, returns = generalized_advantages(
        rewards,
        tokens(batch, "old_values"),
        sampled_mask(batch),
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        bootstrap_values=torch.where(is_bootstrapped, batch.numbers("next_values"), 0.0),
    )
    return with_advantages(batch, args, rewards, advantages, returns=returns)


@register_algorithm(
    "grpo", needs_group=True, kl_in="loss", loss_aggregation="sequence", ignores=("gamma", "gae_lambda")
)
@torch.no_grad()
def add_grpo_advantages(batch: PackedBatch, args: PPOArguments, kl_coef: float) -> PackedBatch:
    """The batch with (score - group mean) / (group std + eps): DeepSeekMath, arXiv:2402.03300."""
    rewards, scores, group = compare_in_groups(batch, args, kl_coef)
    advantages = spread_over_tokens((scores - group.mean) / (group.std + STD_EPSILON), batch)
    return with_advantages(batch, args, rewards, advantages)


@register_algorithm(
    "dr_grpo", needs_group=True, kl_in="loss", loss_aggregation="constant", ignores=("gamma", "gae_lambda")
)
@torch.no_grad()
def add_dr_grpo_advantages(batch: PackedBatch, args: PPOArguments, kl_coef: float) -> PackedBatch:
    """The batch with score - group mean.

    Dr. GRPO, arXiv:2503.20783: dividing by the deviation favours prompts that are nearly solved or nearly
    hopeless, and the mean over a response's tokens favours long wrong responses; both are left out.
    """
    rewards, scores, group = compare_in_groups(batch, args, kl_coef)
    advantages = spread_over_tokens(scores - group.mean, batch)
    return with_advantages(batch, args, rewards, advantages)


@register_algorithm("rloo", needs_group=True, ignores=("gamma", "gae_lambda"))
@torch.no_grad()
def add_rloo_advantages(batch: PackedBatch, args: PPOArguments, kl_coef: float) -> PackedBatch:
    """The batch with score - mean of the group's other scores: Ahmadian et al. 2024, arXiv:2402.14740."""
    rewards, scores, group = compare_in_groups(batch, args, kl_coef)
    advantages = spread_over_tokens(scores - group.leave_one_out_mean, batch)
    return with_advantages(batch, args, rewards, advantages)


@register_algorithm("reinforce++", adv_norm="batch", ignores=("gae_lambda",))
@torch.no_grad()
def add_reinforce_advantages(batch: PackedBatch, args: PPOArguments, kl_coef: float) -> PackedBatch:
    """The batch with discounted rewards to go, normalised by `--adv_norm`.

    REINFORCE++, arXiv:2501.03262.
    """
    rewards = token_rewards(batch, shaped_scores(batch, args), args, kl_coef)
    advantages = discounted_returns(rewards, sampled_mask(batch), gamma=args.gamma)
    return with_advantages(batch, args, rewards, advantages)


@register_algorithm("reinforce++-baseline", needs_group=True, adv_norm="batch", ignores=("gae_lambda",))
@torch.no_grad()
def add_reinforce_baseline_advantages(batch: PackedBatch, args: PPOArguments, kl_coef: float) -> PackedBatch:
    """As `add_reinforce_advantages`, after subtracting the group mean from each score.

    The normalisation is over the step, so prompts whose scores hardly differ are not amplified. REINFORCE++
    with baseline, arXiv:2501.03262.
    """
    scores = shaped_scores(batch, args)
    group = group_baselines(scores, batch.numbers("group_ids"))
    compared = token_rewards(batch, (scores.double() - group.mean).float(), args, kl_coef)
    advantages = discounted_returns(compared, sampled_mask(batch), gamma=args.gamma)
    return with_advantages(batch, args, token_rewards(batch, scores, args, kl_coef), advantages)


@register_algorithm("remax", needs_greedy=True, ignores=("gae_lambda",))
@torch.no_grad()
def add_remax_advantages(batch: PackedBatch, args: PPOArguments, kl_coef: float) -> PackedBatch:
    """The batch with discounted rewards to go, minus the score of the greedy response.

    ReMax, arXiv:2310.10505. The greedy response to the same prompt is in no loss.
    """
    scores, greedy_scores = scores_with_greedy(batch, args)
    compared = token_rewards(batch, scores - greedy_scores, args, kl_coef)
    advantages = discounted_returns(compared, sampled_mask(batch), gamma=args.gamma)
    return with_advantages(batch, args, token_rewards(batch, scores, args, kl_coef), advantages)


@register_algorithm(
    "distill",
    needs_teacher=True,
    ignores=("gamma", "gae_lambda", "kl_coef", "kl_in", "kl_estimator", "kl_target"),
)
@torch.no_grad()
def add_distill_advantages(batch: PackedBatch, args: PPOArguments, kl_coef: float) -> PackedBatch:
    """The batch with the advantages of RLOO if there are rewards, else 0.

    --distill_loss sampled adds weight x (log-probability under the teacher - under the actor) to each token's
    advantage. K. Lu 2025, "On-Policy Distillation". The teacher is the batch's reference.
    """
    scores = shaped_scores(batch, args) if "scores" in batch.data else torch.zeros(len(batch))
    group = group_baselines(scores, batch.numbers("group_ids"))
    advantages = spread_over_tokens(scores - group.leave_one_out_mean, batch)
    batch = with_advantages(batch, args, token_rewards(batch, scores, args, 0.0), advantages)
    if args.distill_loss != "sampled":
        return batch
    gain = args.distill_weight * (batch.data["ref_logprobs"] - batch.data["old_logprobs"])
    advantages = batch.data["advantages"] + torch.where(batch.data["loss_mask"], gain, 0.0)
    return batch.with_key("advantages", advantages, like="response_ids")
