"""PURE: what compares the responses to one prompt: baselines, normalisation inside a group.

A group is told by its id alone: its rows may stand anywhere, and groups may have different sizes.

# B sequences, R response, G groups; scores (B,), group_ids (B,) int64, any numbers
"""

from typing import NamedTuple

import torch


class GroupBaselines(NamedTuple):
    """What each row's group says of it: (B,) float64, so that score - mean loses nothing."""

    mean: torch.Tensor
    std: torch.Tensor  # with Bessel's correction, 0 for a group of one
    leave_one_out_mean: torch.Tensor  # of the others; its own score in a group of one


@torch.no_grad()
def group_baselines(scores: torch.Tensor, group_ids: torch.Tensor) -> GroupBaselines:
    """Return mean, deviation and leave-one-out mean of each row's group, without gradient.

    The deviation divides by n - 1, as TRL, OpenRLHF and verl do for GRPO (arXiv:2402.03300 says only
    "std"). In a group of equal scores, or of one, score - mean and score - leave_one_out_mean are exactly 0.
    Leave-one-out: Ahmadian et al. 2024, arXiv:2402.14740.
    """
    rows, sizes = _group_rows(group_ids)
    size = sizes[rows]
    # In float64 the sum of equal fp32 scores is exact, and so is its n-th part: they leave only zeros. Two
    # passes, because E[x^2] - E[x]^2 goes negative for equal scores even then.
    scores = scores.float().double()
    sums = _sums(scores, rows, len(sizes))[rows]
    mean = sums / size
    squares = _sums((scores - mean).square(), rows, len(sizes))[rows]
    others = (size - 1).clamp(min=1)
    leave_one_out = torch.where(size > 1, (sums - scores) / others, scores)
    return GroupBaselines(mean, (squares / others).sqrt(), leave_one_out)


@torch.no_grad()
def constant_groups(
    scores: torch.Tensor, group_ids: torch.Tensor, is_scored: torch.Tensor | None = None
) -> torch.Tensor:
    """Return whether each row's group has one score at most: (B,) bool. A group of one has.

    Rows that are not `is_scored` (B,) bool are none of their group. Such a group teaches a group-relative
    algorithm nothing (dynamic sampling, DAPO, arXiv:2503.14476).
    """
    rows, sizes = _group_rows(group_ids)
    is_scored = torch.ones_like(group_ids, dtype=torch.bool) if is_scored is None else is_scored
    lowest, highest = (
        scores.new_full((len(sizes),), start).scatter_reduce_(
            0, rows, torch.where(is_scored, scores, start), which
        )
        for which, start in (("amin", torch.inf), ("amax", -torch.inf))
    )
    return (lowest >= highest)[rows]


@torch.no_grad()
def group_whiten(
    x: torch.Tensor, mask: torch.Tensor, group_ids: torch.Tensor, *, eps: float = 1e-8
) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) over the counting tokens of each group: (B, R) fp32, else 0.

    x (B, R), mask (B, R) bool, True = counts. The same as `whiten` called with the rows of one group after
    another; the variance divides by the count. AReaL's `group_adv_norm`. Constant entries give exactly 0.
    """
    mask = mask.bool()
    rows, sizes = _group_rows(group_ids)
    kept = torch.where(mask, x.float().double(), 0.0)
    counts = _sums(mask.sum(1).double(), rows, len(sizes)).clamp(min=1)  # (G,)
    means = _sums(kept.sum(1), rows, len(sizes)) / counts
    centred = torch.where(mask, kept - means[rows, None], 0.0)
    variances = _sums(centred.square().sum(1), rows, len(sizes)) / counts
    return (centred * torch.rsqrt(variances + eps)[rows, None]).float()


def _group_rows(group_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the index (B,) of each row's group, in 0 ... G - 1; the rows (G,) of each group)."""
    _, rows, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    return rows, sizes


def _sums(x: torch.Tensor, rows: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Return the sum (G,) of each group's entries of x (B,), float64."""
    return x.new_zeros(num_groups).index_add_(0, rows, x)
