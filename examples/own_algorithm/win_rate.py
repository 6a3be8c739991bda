"""Your own algorithm: the advantage of a response compares it with each other response to its prompt.

# b responses of this rank
"""

import torch

from common.data.packed_batch import PackedBatch
from step3_ppo.algorithms import (
    register_algorithm,
    shaped_scores,
    spread_over_tokens,
    token_rewards,
    with_advantages,
)
from step3_ppo.arguments import PPOArguments


@register_algorithm("win_rate", needs_group=True, kl_in="loss", ignores=("gamma", "gae_lambda"))
@torch.no_grad()
def add_advantages(batch: PackedBatch, args: PPOArguments, kl_coef: float) -> PackedBatch:
    """The batch with (won - lost) / others on every token of a response, from -1 to 1.

    Only the order of scores counts, so the scale of a reward cannot blow up an update.
    """
    scores = shaped_scores(batch, args)  # (b,)
    group_ids = batch.numbers("group_ids")
    is_rival = group_ids[:, None] == group_ids[None]  # (b, b), itself included; groups are whole on a rank
    won = torch.sign(scores[:, None] - scores[None]) * is_rival  # (b, b) 1 won, -1 lost, 0 a tie
    advantages = spread_over_tokens(won.sum(1) / (is_rival.sum(1) - 1).clamp(min=1), batch)
    return with_advantages(batch, args, token_rewards(batch, scores, args, kl_coef), advantages)
