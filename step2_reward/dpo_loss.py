"""The loss of direct preference optimization. PURE: imports torch only.

# N pairs
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F


class DPOLoss(NamedTuple):
    """The loss of each pair, and what the policy thinks of its answers."""

    loss: torch.Tensor  # (N,) fp32
    chosen_rewards: torch.Tensor  # (N,) fp32, beta (log-probability - the reference's), without gradient
    rejected_rewards: torch.Tensor  # (N,) fp32


def dpo_loss(
    chosen_logprobs: torch.Tensor,
    rejected_logprobs: torch.Tensor,
    reference_chosen_logprobs: torch.Tensor,
    reference_rejected_logprobs: torch.Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> DPOLoss:
    """Return -(1 - e) log sigmoid(z) - e log sigmoid(-z) of each pair, z the difference of its rewards.

    The reward of an answer is beta (log-probability under the policy - that under the reference); all four
    (N,) fp32 are sums over an answer's tokens. Rafailov et al. 2023, arXiv:2305.18290 eq. 7; e, the share of
    pairs taken to be labelled the wrong way round, is the conservative form of its authors.

    Raises ValueError for sums that are not fp32: in bf16 a sum of -10.84 becomes -10.875, and a margin is a
    difference of such sums.
    """
    sums = (chosen_logprobs, rejected_logprobs, reference_chosen_logprobs, reference_rejected_logprobs)
    if any(logprobs.dtype != torch.float32 for logprobs in sums):
        raise ValueError(f"log-probabilities must be summed in fp32, not {[str(s.dtype) for s in sums]}")
    chosen_rewards = beta * (chosen_logprobs - reference_chosen_logprobs)
    rejected_rewards = beta * (rejected_logprobs - reference_rejected_logprobs)
    z = chosen_rewards - rejected_rewards
    loss = -(1 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)
    return DPOLoss(loss, chosen_rewards.detach(), rejected_rewards.detach())
