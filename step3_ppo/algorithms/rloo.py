"""RLOO: REINFORCE whose baseline is the mean reward of the other responses to the prompt. No critic."""

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


@register_algorithm("rloo", needs_group=True, ignores=("gamma", "gae_lambda"))
@torch.no_grad()
def add_advantages(experience: Experience, args: PPOArguments, kl_coef: float) -> Experience:
    """Return the experience with reward - mean reward of the others on every token of a response.

    The reward of a response is its score less kl_coef times the KL summed over its tokens: a response is one
    action. Ahmadian et al. 2024, arXiv:2402.14740.
    """
    args = fill_defaults(args, ALGORITHMS["rloo"])
    scores = shaped_scores(experience, args)
    compared = sequence_rewards(experience, scores, args, kl_coef)  # (B,)
    group = group_baselines(compared, experience.group_ids)
    advantages = on_every_token(compared.double() - group.leave_one_out_mean, experience)
    return dataclasses.replace(
        experience,
        rewards=token_rewards(experience, scores, args, kl_coef),
        advantages=normalised(advantages, experience, args),
        loss_mask=counted(experience, args),
    )
