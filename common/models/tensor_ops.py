"""Masked sums, whitening, correlation, confidence interval of a rate. PURE: imports torch only."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

Z_95 = 1.959963984540054  # standard normal quantile at 0.975


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum of `x` over `dim` where `mask` (same shape, True = counts), in fp32 or better."""
    return torch.where(mask.bool(), x if x.dtype == torch.float64 else x.float(), 0.0).sum(dim)


def whiten(
    x: torch.Tensor,
    mask: torch.Tensor,
    *,
    reduce_sum: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + 1e-8) where `mask`, elsewhere 0: fp32, the shape of x.

    mask (same shape) True = counts. `reduce_sum` sums a float64 vector over ranks; with it every rank must
    call this, even without a counting entry. The variance divides by the count. Constant
    entries give exactly 0.
    """
    reduce_sum = reduce_sum or (lambda total: total)
    mask = mask.bool()
    # float64 and two passes: E[x^2] - E[x]^2 can be negative for constant entries, and in fp32 the mean of
    # equal numbers may differ from them, which 1 / sqrt(1e-8) would amplify.
    kept = torch.where(mask, x.double(), 0.0)
    count, total = reduce_sum(torch.stack([mask.sum().double(), kept.sum()])).unbind()
    mean = total / count.clamp(min=1)
    centred = torch.where(mask, kept - mean, 0.0)
    (squares,) = reduce_sum(centred.square().sum().reshape(1)).unbind()
    return (centred * torch.rsqrt(squares / count.clamp(min=1) + 1e-8)).float()


@torch.no_grad()
def correlation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Pearson correlation of x and y (N,): fp32 scalar in [-1, 1], 0 if either is constant."""
    x = x.double() - x.double().mean()
    y = y.double() - y.double().mean()
    spread = (x.square().sum() * y.square().sum()).sqrt()
    return torch.where(spread > 0, (x * y).sum() / spread, 0.0).clamp(-1, 1).float()


class Rate(NamedTuple):
    """A share with its 95 % interval; None if nothing was counted."""

    value: float | None
    low: float
    high: float


def wilson_interval(wins: float, total: int) -> Rate:
    """wins / total with the interval of E. B. Wilson (1927), which stays within 0 and 1."""
    if not total:
        return Rate(None, 0.0, 1.0)
    share = wins / total
    z2 = Z_95**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z_95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return Rate(share, max(centre - half, 0.0), min(centre + half, 1.0))
