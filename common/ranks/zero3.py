"""Whole parameters under ZeRO stage 3, where each rank holds a flat shard; a no-op for whole parameters."""

from collections.abc import Iterator
from contextlib import contextmanager

import deepspeed
import torch
from torch import nn


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether the parameter is managed by ZeRO stage 3."""
    return hasattr(parameter, "ds_id")


@contextmanager
def gather_whole(parameters: list[nn.Parameter], *, to_modify: bool = False) -> Iterator[None]:
    """Make the parameters whole inside the block. Every rank must call this.

    With `to_modify`, what rank 0 writes into them is sent to all shards on leaving; every rank of a plain
    (unsharded) model must then write the same.
    """
    sharded = [p for p in parameters if is_sharded(p)]
    with deepspeed.zero.GatheredParameters(
        sharded, modifier_rank=0 if to_modify else None, enabled=bool(sharded)
    ):
        yield


def local_shard(parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's part: the flat shard under ZeRO 3, else the whole tensor. No communication."""
    return parameter.ds_tensor if is_sharded(parameter) else parameter.data


@contextmanager
def swapped_shards(parameters: dict[str, nn.Parameter], values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Hold `values`, by name and of the shapes of `local_shard`, in the weights' place inside the block.

    No communication, but every rank must call this.
    """
    saved = {name: local_shard(parameter).detach().clone() for name, parameter in parameters.items()}
    try:
        _write_shards(parameters, values)
        yield
    finally:
        _write_shards(parameters, saved)


@torch.no_grad()
def _write_shards(parameters: dict[str, nn.Parameter], values: dict[str, torch.Tensor]) -> None:
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            # A small parameter stays whole between uses (persistence): without this its old whole copy would
            # be read instead of the shard.
            parameter.partition(has_been_updated=False)
        local_shard(parameter).copy_(values[name])
