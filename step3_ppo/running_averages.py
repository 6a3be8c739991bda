"""Averages that last from step to step: of the returns, for the critic's units; of the actor's weights.

# N tokens of any layout, flat or (B, R); mask (N) bool, tokens that count
"""

from contextlib import AbstractContextManager

import torch
from torch import nn

from common.ranks import distributed
from common.ranks.zero3 import local_shard, swapped_shards

MIN_VARIANCE = 1e-5  # of returns: equal ones are not divided by 0


class ValueNormaliser:
    """Running mean and variance of all returns: an exponential average ("exp") or that of all ("ma").

    The critic's output is in normalised units; `denormalise` brings it back. "exp" is the debiased average of
    MAPPO's ValueNorm (arXiv:2103.01955) and of ReaL: an update keeps `beta` of what was. "ma" weighs every
    token alike and ignores `beta`. Without an update both directions change nothing.
    """

    def __init__(self, kind: str, beta: float = 0.99995) -> None:
        self.kind, self.beta = kind, beta
        self.weight = 0.0  # "exp": 1 - beta^updates, the debiasing term; "ma": tokens seen
        self.mean = 0.0
        self.variance = 0.0

    def update(self, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """Take in the returns (N) of all ranks that count, in real units; none of them changes nothing.

        Every rank must call this.
        """
        kept = returns[mask].double()
        own = (len(kept), float(kept.mean()), float(kept.var(correction=0))) if len(kept) else (0, 0.0, 0.0)
        count, mean, variance = 0, 0.0, 0.0
        for num, mean_there, variance_there in distributed.gather_objects(own):
            if num:
                count += num
                mean, variance = _merge(mean, variance, mean_there, variance_there, num / count)
        if not count:
            return
        kept_weight = self.weight * (self.beta if self.kind == "exp" else 1.0)
        new_weight = 1.0 - self.beta if self.kind == "exp" else float(count)
        self.weight = kept_weight + new_weight
        share = new_weight / self.weight
        self.mean, self.variance = _merge(self.mean, self.variance, mean, variance, share)

    @property
    def std(self) -> float:
        """The deviation that is divided by."""
        return max(self.variance, MIN_VARIANCE) ** 0.5 if self.weight else 1.0

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """Return (x - mean) / std: fp32, the shape of x, in the critic's units. Nothing is clipped."""
        return ((x.double() - self.mean) / self.std).float()

    def denormalise(self, x: torch.Tensor) -> torch.Tensor:
        """Return x * std + mean: fp32, the shape of x, in real units."""
        return (x.double() * self.std + self.mean).float()

    def state_dict(self) -> dict[str, float]:
        """Return what moves."""
        return {"weight": self.weight, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Resume with the numbers of `state_dict`."""
        self.weight, self.mean, self.variance = (state[name] for name in ("weight", "mean", "variance"))


def _merge(
    mean: float, variance: float, new_mean: float, new_variance: float, share: float
) -> tuple[float, float]:
    """Return mean and variance of two sets as one, of which the new one has this share.

    The same as means of x and x^2, whose difference would lose its digits, or its sign, far from 0.
    """
    distance = new_mean - mean
    variance += share * (new_variance - variance) + share * (1 - share) * distance**2
    return mean + share * distance, variance


class ExponentialMovingAverage:
    """average <- decay average + (1 - decay) weights, in fp32, on the part of a weight this rank holds."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.averages = {name: local_shard(p).detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights as they are now."""
        for name, parameter in self.parameters.items():
            self.averages[name].lerp_(local_shard(parameter).float(), 1 - self.decay)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Hold the averages in the weights' place inside the block. Every rank must call this."""
        return swapped_shards(self.parameters, self.averages)
