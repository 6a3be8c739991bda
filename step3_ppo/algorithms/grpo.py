"""GRPO and Dr. GRPO: a response is as good as it is better than the others to its prompt. No critic."""

import dataclasses

import torch

from step3_ppo.algorithms import ALGORITHMS, fill_defaults, register_algorithm
from step3_ppo.algorithms.shared_steps import (
    counted,
    normalised,
    on_every_token,
    sequence_rewards,
    shaped_scores,
    token_rewards,
)
from step3_ppo.arguments import PPOArguments
from step3_ppo.experience import Experience
from step3_ppo.group_math import group_baselines

# As in TRL: what keeps the rounding of nearly equal scores from becoming an advantage.
STD_EPSILON = 1e-4


@register_algorithm(
    "grpo", needs_group=True, kl_in="loss", loss_aggregation="sequence", ignores=("gamma", "gae_lambda")
)
@torch.no_grad()
def add_grpo_advantages(experience: Experience, args: PPOArguments, kl_coef: float) -> Experience:
    """Return the experience with (score - group mean) / (group std + eps) on every token of a response.

    GRPO, DeepSeekMath, arXiv:2402.03300. With `--kl_in reward` the score has the KL of its tokens taken off.
    """
    return _relative_to_group(experience, fill_defaults(args, ALGORITHMS["grpo"]), kl_coef, by_std=True)


@register_algorithm(
    "dr_grpo", needs_group=True, kl_in="loss", loss_aggregation="constant", ignores=("gamma", "gae_lambda")
)
@torch.no_grad()
def add_dr_grpo_advantages(experience: Experience, args: PPOArguments, kl_coef: float) -> Experience:
    """Return the experience with score - group mean on every token of a response.

    Dr. GRPO, arXiv:2503.20783: the deviation favours prompts that are nearly solved or nearly hopeless, and
    the mean over a response's tokens favours long wrong answers; both are left out.
    """
    return _relative_to_group(experience, fill_defaults(args, ALGORITHMS["dr_grpo"]), kl_coef, by_std=False)


def _relative_to_group(
    experience: Experience, args: PPOArguments, kl_coef: float, *, by_std: bool
) -> Experience:
    scores = shaped_scores(experience, args)
    compared = sequence_rewards(experience, scores, args, kl_coef)  # (B,)
    group = group_baselines(compared, experience.group_ids)
    advantages = compared.double() - group.mean
    if by_std:
        advantages = advantages / (group.std + STD_EPSILON)
    return dataclasses.replace(
        experience,
        rewards=token_rewards(experience, scores, args, kl_coef),
        advantages=normalised(on_every_token(advantages, experience), experience, args),
        loss_mask=counted(experience, args),
    )
