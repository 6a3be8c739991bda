"""PURE: returns scaled by their running mean and deviation, so that the critic learns numbers near 1.

# N tokens of any layout, flat or (B, R); mask (N) bool, tokens that count
"""

from typing import Literal

import torch

ValueNorm = Literal["exp", "ma"]


class ValueNormaliser:
    """Running mean and variance of all returns: an exponential average ("exp") or that of all ("ma").

    The critic's output is in normalised units; `denormalise` brings it back. "exp" is the debiased average of
    MAPPO's ValueNorm (arXiv:2103.01955) and of ReaL: an update keeps `beta` of what was. "ma" weighs every
    token alike and ignores `beta`. Without an update both directions change nothing. Variances below `eps`
    count as `eps`. Every rank must give the same returns; then no reduction is needed.
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
        """Take in the returns (N) that count, in real units; none of them changes nothing.

        Raises ValueError when one is not finite: it would spoil all later ones.
        """
        kept = returns[mask.bool()].double()
        if not len(kept):
            return
        mean, variance = float(kept.mean()), float(kept.var(correction=0))
        if not torch.isfinite(kept).all():
            raise ValueError(f"returns of mean {mean} are not finite: --value_norm cannot take them in")
        kept_weight = self.weight * (self.beta if self.kind == "exp" else 1.0)
        new_weight = 1.0 - self.beta if self.kind == "exp" else float(len(kept))
        # Two weighted sets become one: the same as running means of x and x^2, whose difference would lose
        # its digits, or its sign, for returns far from 0.
        total = kept_weight + new_weight
        share, distance = new_weight / total, mean - self.mean
        self.variance += share * (variance - self.variance) + share * (1 - share) * distance**2
        self.mean += share * distance
        self.weight = total

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
