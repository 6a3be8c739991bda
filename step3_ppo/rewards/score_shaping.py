"""PURE: shaping of scores before the KL penalty.

# B sequences
"""

from collections.abc import Callable
from typing import Any

import torch

from common.models.tensor_ops import whiten
from step3_ppo.ppo_math import group_whiten


def length_shortfall(response_lengths: torch.Tensor, enough_tokens: int) -> torch.Tensor:
    """(B,) fp32 in [0, 1]: 1 for an empty response, falling to 0 at `enough_tokens`.

    A per-token KL penalty makes short responses cheap, so PPO shortens them. This penalty counteracts it up
    to a length, and rewards nothing beyond.
    """
    return (1.0 - response_lengths.float() / enough_tokens).clamp(min=0.0)


def overlong_share(
    response_lengths: torch.Tensor, buffer_tokens: int, max_response_tokens: int
) -> torch.Tensor:
    """(B,) fp32 in [0, 1]: 0 up to `max_response_tokens - buffer_tokens`, rising to 1 at the maximum length.

    DAPO, arXiv:2503.14476 eq. 13.
    """
    over = response_lengths - (max_response_tokens - buffer_tokens)
    return (over.float() / buffer_tokens).clamp(0.0, 1.0)


def shape_scores(
    scores: torch.Tensor,
    response_lengths: torch.Tensor,
    is_finished: torch.Tensor,
    group_ids: torch.Tensor,
    args: Any,
    reduce_sum: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Scores (B,) fp32 after, in this order: whitening, clipping, --truncated_score for truncated
    responses, and the two length terms; `args` are the flags of step 3.

    The length terms come after clipping, so that they also act on responses at the clip. scores,
    response_lengths, is_finished, group_ids (B,), groups whole. `reduce_sum` sums a float64 vector over ranks
    that each have some of the scores; with it every rank must call this.
    """
    shaped = scores.float()
    everything = torch.ones_like(shaped, dtype=torch.bool)
    if args.whiten_scores == "batch":
        shaped = whiten(shaped, everything, reduce_sum=reduce_sum)
    elif args.whiten_scores == "group":
        shaped = group_whiten(shaped[:, None], everything[:, None], group_ids)[:, 0]
    if args.reward_clip:
        shaped = shaped.clamp(-args.reward_clip, args.reward_clip)
    if args.truncated_score is not None:
        shaped = torch.where(is_finished, shaped, args.truncated_score)
    if args.length_reward_tokens:
        shaped = shaped - length_shortfall(response_lengths, args.length_reward_tokens)
    if args.overlong_buffer_tokens:
        buffer_tokens = args.overlong_buffer_tokens
        max_tokens = args.max_answer_seq_len
        shaped = shaped - overlong_share(response_lengths, buffer_tokens, max_tokens)
    return shaped
