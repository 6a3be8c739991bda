"""PPO with a critic: KL-penalised rewards, generalised advantages, whitened over the whole step."""

import dataclasses

import torch

from step3_ppo.algorithms import ALGORITHMS, fill_defaults, register_algorithm
from step3_ppo.algorithms.shared_steps import counted, normalised, shaped_scores, token_rewards
from step3_ppo.arguments import PPOArguments
from step3_ppo.experience import Experience
from step3_ppo.ppo_math import generalized_advantages


@register_algorithm("ppo", needs_critic=True, adv_norm="batch")
@torch.no_grad()
def add_advantages(experience: Experience, args: PPOArguments, kl_coef: float) -> Experience:
    """Return the experience with rewards, advantages and returns (all (B, R) fp32), and its loss mask.

    PPO, arXiv:1707.06347; for language models arXiv:2203.02155. Values are in the units of the scores.
    """
    args = fill_defaults(args, ALGORITHMS["ppo"])
    rewards = token_rewards(experience, shaped_scores(experience, args), args, kl_coef)
    # A finished response ends in a terminal state of value 0; a cut one may go on, as far as the critic
    # knows.
    is_bootstrapped = ~experience.is_finished & (args.truncated == "bootstrap")
    advantages, returns = generalized_advantages(
        rewards,
        experience.old_values,
        experience.response_mask,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        bootstrap_values=torch.where(is_bootstrapped, experience.next_values, 0.0),
    )
    return dataclasses.replace(
        experience,
        rewards=rewards,
        advantages=normalised(advantages, experience, args),
        returns=returns,
        loss_mask=counted(experience, args),
    )
