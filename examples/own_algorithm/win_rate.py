"""An algorithm of your own: how many of the other responses to its prompt a response beats.

# B responses
"""

import dataclasses

import torch

from step3_ppo.algorithms import ALGORITHMS, fill_defaults, register_algorithm
from step3_ppo.algorithms.shared_steps import (
    counted,
    normalised,
    on_every_token,
    shaped_scores,
    token_rewards,
)
from step3_ppo.arguments import PPOArguments
from step3_ppo.experience import Experience


@register_algorithm("win_rate", needs_group=True, kl_in="loss", ignores=("gamma", "gae_lambda"))
@torch.no_grad()
def add_advantages(experience: Experience, args: PPOArguments, kl_coef: float) -> Experience:
    """Return the experience with (won - lost) / others on every token of a response, from -1 to 1.

    Only the order of scores counts, so no scale of a reward can blow an update up.
    """
    args = fill_defaults(args, ALGORITHMS["win_rate"])
    scores = shaped_scores(experience, args)  # (B,) as the flags of the score group leave them
    is_rival = experience.group_ids[:, None] == experience.group_ids[None]  # (B, B), itself included
    won = torch.sign(scores[:, None] - scores[None]) * is_rival  # (B, B) 1 won, -1 lost, 0 a tie
    advantages = won.sum(1) / (is_rival.sum(1) - 1).clamp(min=1)
    return dataclasses.replace(
        experience,
        rewards=token_rewards(experience, scores, args, kl_coef),
        advantages=normalised(on_every_token(advantages, experience), experience, args),
        loss_mask=counted(experience, args),
    )
