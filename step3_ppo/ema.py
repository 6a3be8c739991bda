"""An exponential moving average of the actor's trained weights, kept shard by shard: no communication."""

from contextlib import AbstractContextManager

import torch
from torch import nn

from common.ranks.zero3 import local_shard, swapped_shards


class ExponentialMovingAverage:
    """average <- decay average + (1 - decay) weights, in fp32, on the part of a weight this rank holds."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"--ema_decay {decay} must be at least 0 and less than 1; 0.992 is usual")
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
