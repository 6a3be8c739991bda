"""PURE: from the reward model's scores to the scores that PPO maximises.

# B sequences
"""

import torch

from common.tensor_ops import whiten


def length_shortfall(response_lengths: torch.Tensor, enough_tokens: int) -> torch.Tensor:
    """Return (B,) fp32 in [0, 1]: 1 for an empty response, falling to 0 at `enough_tokens`; 0 when that is 0.

    A per-token KL penalty makes short answers cheap, so PPO shrinks them unless something says otherwise;
    this says so openly, up to a length, and rewards nothing beyond it.
    """
    if enough_tokens <= 0:
        return torch.zeros(len(response_lengths), dtype=torch.float32, device=response_lengths.device)
    return (1.0 - response_lengths.float() / enough_tokens).clamp(min=0.0)


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
    whiten_scores: bool = False,
) -> torch.Tensor:
    """Return scores (B,) fp32 after, in this order: whitening, clipping, the penalty for cut responses, the
    length term (after clipping, else a response at the clip could be shortened for nothing).
    """
    shaped = scores.float()
    if whiten_scores:
        shaped = whiten(shaped, torch.ones_like(shaped, dtype=torch.bool))
    if reward_clip:
        shaped = shaped.clamp(-reward_clip, reward_clip)
    if truncated == "penalty":
        shaped = torch.where(is_finished, shaped, truncated_penalty)
    return shaped - length_reward_coef * length_shortfall(response_lengths, length_reward_tokens)
