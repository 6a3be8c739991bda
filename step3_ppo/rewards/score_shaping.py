"""PURE: from the reward model's scores to the scores that PPO maximises.

# B sequences
"""

from collections.abc import Callable

import torch

from common.models.tensor_ops import whiten


def length_shortfall(response_lengths: torch.Tensor, enough_tokens: int) -> torch.Tensor:
    """Return (B,) fp32 in [0, 1]: 1 for an empty response, falling to 0 at `enough_tokens`; 0 when that is 0.

    A per-token KL penalty makes short answers cheap, so PPO shrinks them unless something says otherwise;
    this says so openly, up to a length, and rewards nothing beyond it.
    """
    if enough_tokens <= 0:
        return torch.zeros(len(response_lengths), dtype=torch.float32, device=response_lengths.device)
    return (1.0 - response_lengths.float() / enough_tokens).clamp(min=0.0)


def overlong_share(
    response_lengths: torch.Tensor, is_finished: torch.Tensor, buffer_tokens: int, max_response_tokens: int
) -> torch.Tensor:
    """Return (B,) fp32 in [0, 1]: 0 up to `max_response_tokens - buffer_tokens`, rising to 1 at full length.

    DAPO, arXiv:2503.14476 eq. 13. Without a buffer the rise is a step behind the full length, as in that
    equation: 1 for responses that fill it and would have gone on, 0 for those that end on its last token.
    """
    over = response_lengths - (max_response_tokens - buffer_tokens)
    if buffer_tokens > 0:
        return (over.float() / buffer_tokens).clamp(0.0, 1.0)
    return ((over >= 0) & ~is_finished).float()


def shape_scores(
    scores: torch.Tensor,
    response_lengths: torch.Tensor,
    is_finished: torch.Tensor,
    *,
    reward_clip: float = 0.0,
    truncated: str = "score",
    truncated_penalty: float = -1.0,
    length_reward_coef: float = 0.0,
    length_reward_tokens: int = 0,
    overlong_penalty: float = 0.0,
    overlong_buffer_tokens: int = 0,
    max_response_tokens: int = 0,
    whiten_scores: bool = False,
    reduce_sum: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return scores (B,) fp32 after, in this order: whitening, clipping, `truncated_penalty` in place of the
    score of a cut response, the two length terms.

    Those come after clipping, else a response at the clip could be shortened, or drawn out, for nothing. Of
    the choices of `truncated` only "penalty" changes a score; under "mask" it still is what its group is
    compared with. scores, response_lengths, is_finished (B,). `reduce_sum` adds a float64 vector up over
    ranks that each have some of the scores; with it every rank must call this.
    """
    shaped = scores.float()
    if whiten_scores:
        shaped = whiten(shaped, torch.ones_like(shaped, dtype=torch.bool), reduce_sum=reduce_sum)
    if reward_clip:
        shaped = shaped.clamp(-reward_clip, reward_clip)
    if truncated == "penalty":
        shaped = torch.where(is_finished, shaped, truncated_penalty)
    shaped = shaped - length_reward_coef * length_shortfall(response_lengths, length_reward_tokens)
    if not overlong_penalty:
        return shaped
    assert max_response_tokens > 0, "an overlong penalty needs the length limit"
    share = overlong_share(response_lengths, is_finished, overlong_buffer_tokens, max_response_tokens)
    return shaped - overlong_penalty * share
