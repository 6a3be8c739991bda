"""Returns scaled by their running mean and deviation, so that the critic learns numbers near 1.

# N tokens of any layout, flat or (B, R); mask (N) bool, tokens that count
"""

import math
from typing import Literal

import torch

from common.ranks import distributed

ValueNorm = Literal["exp", "ma"]


class ValueNormaliser:
    """Running mean and variance of all returns: an exponential average ("exp") or that of all ("ma").

    The critic's output is in normalised units; `denormalise` brings it back. "exp" is the debiased average of
    MAPPO's ValueNorm (arXiv:2103.01955) and of ReaL: an update keeps `beta` of what was. "ma" weighs every
    token alike and ignores `beta`. Without an update both directions change nothing. Variances below `eps`
    count as `eps`.
    """

    def __init__(self, kind: ValueNorm, beta: float = 0.99995, *, eps: float = 1e-5) -> None:
        if kind not in ("exp", "ma"):
            raise ValueError(f"--value_norm {kind} is unknown; use none, exp or ma")
        if not 0 <= beta < 1:
            raise ValueError(f"--value_norm_beta {beta} must be at least 0 and below 1")
        if not eps > 0:
            raise ValueError(f"the value normaliser's eps {eps} must be above 0")
        self.kind, self.beta, self.eps = kind, beta, eps
        self.weight = 0.0  # "exp": 1 - beta^updates, the debiasing term; "ma": tokens seen
        self.mean = 0.0
        self.variance = 0.0

    def update(self, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """Take in the returns (N) of all ranks that count, in real units; none of them changes nothing.

        Every rank must call this. Raises ValueError when one is not finite: it would spoil all later ones.
        """
        kept = returns[mask.bool()].double()
        own = (len(kept), float(kept.mean()), float(kept.var(correction=0))) if len(kept) else (0, 0.0, 0.0)
        count, mean, variance = 0, 0.0, 0.0
        for num, mean_there, variance_there in distributed.gather_objects(own):
            if num:
                count += num
                mean, variance = _merge(mean, variance, mean_there, variance_there, num / count)
        if not count:
            return
        if not math.isfinite(mean + variance):
            raise ValueError(f"returns of mean {mean} are not finite: --value_norm cannot take them in")
        kept_weight = self.weight * (self.beta if self.kind == "exp" else 1.0)
        new_weight = 1.0 - self.beta if self.kind == "exp" else float(count)
        self.weight = kept_weight + new_weight
        share = new_weight / self.weight
        self.mean, self.variance = _merge(self.mean, self.variance, mean, variance, share)

    @property
    def std(self) -> float:
        """The deviation that is divided by."""
        return max(self.variance, self.eps) ** 0.5 if self.weight else 1.0

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """Return (x - mean) / std: fp32, the shape of x, in the critic's units. Nothing is clipped."""
        return ((x.double() - self.mean) / self.std).float()

    def denormalise(self, x: torch.Tensor) -> torch.Tensor:
        """Return x * std + mean: fp32, the shape of x, in real units."""
        return (x.double() * self.std + self.mean).float()

    def state_dict(self) -> dict[str, float]:
        """Return what moves; kind, beta and eps are options of the run."""
        return {"weight": self.weight, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue with the numbers of `state_dict`."""
        self.weight, self.mean = float(state["weight"]), float(state["mean"])
        self.variance = float(state["variance"])


def _merge(
    mean: float, variance: float, new_mean: float, new_variance: float, share: float
) -> tuple[float, float]:
    """Return mean and variance of two sets as one, of which the new one has this share.

    The same as means of x and x^2, whose difference would lose its digits, or its sign, far from 0.
    """
    distance = new_mean - mean
    variance += share * (new_variance - variance) + share * (1 - share) * distance**2
    return mean + share * distance, variance
