"""Random responses of many lengths, and what may stand in their padding."""

import math

import torch

# What stands in the padding must not matter, not even where it is no number.
PADDING = [0.0, 1e6, math.nan, -math.inf]


def random_batch(num: int, *, lengths: list[int] | None = None, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Return `num` random (B, R) tensors and the mask of responses of these lengths, 0 and R among them."""
    lengths = [9, 1, 4, 0, 8] if lengths is None else lengths
    generator = torch.Generator().manual_seed(seed)
    tensors = torch.randn(num, len(lengths), 9, generator=generator)
    return *tensors, torch.arange(9) < torch.tensor(lengths)[:, None]


def fill(x: torch.Tensor, mask: torch.Tensor, padding: float) -> torch.Tensor:
    return torch.where(mask, x, padding)
