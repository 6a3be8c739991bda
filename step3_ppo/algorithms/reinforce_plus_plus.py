"""REINFORCE++: the reward to go of each token, normalised over the whole step. No critic, no group needed."""

import dataclasses

import torch

from step3_ppo.algorithms import ALGORITHMS, fill_defaults, register_algorithm
from step3_ppo.algorithms.shared_steps import counted, normalised, shaped_scores, token_rewards
from step3_ppo.arguments import PPOArguments
from step3_ppo.experience import Experience
from step3_ppo.group_math import group_baselines
from step3_ppo.ppo_math import discounted_returns


@register_algorithm("reinforce++", adv_norm="batch", ignores=("gae_lambda",))
@torch.no_grad()
def add_advantages(experience: Experience, args: PPOArguments, kl_coef: float) -> Experience:
    """Return the experience with the discounted rewards from each token on, normalised as `--adv_norm` says.

    REINFORCE++, arXiv:2501.03262.
    """
    args = fill_defaults(args, ALGORITHMS["reinforce++"])
    scores = shaped_scores(experience, args)
    return _rewards_to_go(experience, args, kl_coef, scores, scores)


@register_algorithm("reinforce++-baseline", needs_group=True, adv_norm="batch", ignores=("gae_lambda",))
@torch.no_grad()
def add_advantages_over_baseline(experience: Experience, args: PPOArguments, kl_coef: float) -> Experience:
    """Return the same after the group's mean was taken off each score.

    The normalisation stays that of the step, so a prompt whose scores hardly differ is not blown up.
    REINFORCE++ with baseline, arXiv:2501.03262.
    """
    args = fill_defaults(args, ALGORITHMS["reinforce++-baseline"])
    scores = shaped_scores(experience, args)
    centred = (scores.double() - group_baselines(scores, experience.group_ids).mean).float()
    return _rewards_to_go(experience, args, kl_coef, scores, centred)


def _rewards_to_go(
    experience: Experience,
    args: PPOArguments,
    kl_coef: float,
    scores: torch.Tensor,
    compared: torch.Tensor,
) -> Experience:
    """Return the experience with advantages from `compared` (B,); the rewards it shows have `scores` (B,)."""
    mask = experience.response_mask
    rewards = token_rewards(experience, compared, args, kl_coef)
    advantages = discounted_returns(rewards, mask, gamma=args.gamma)
    return dataclasses.replace(
        experience,
        rewards=token_rewards(experience, scores, args, kl_coef),
        advantages=normalised(advantages, experience, args),
        loss_mask=counted(experience, args),
    )
