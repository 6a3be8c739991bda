"""Parameters under ZeRO stage 3, where each rank holds a flat shard, and each rank's share of whole
parameters. Also optimizer states: their location, and offloading them from the GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from torch import nn

from common.ranks import distributed
from common.ranks.deepspeed_internals import fragment_addresses

STATES = (OffloadStateTypeEnum.optim_states, OffloadStateTypeEnum.hp_params)


def is_sharded(parameter: nn.Parameter) -> bool:
    """Whether the parameter is managed by ZeRO stage 3."""
    return hasattr(parameter, "ds_id")


@contextmanager
def gather_whole(parameters: list[nn.Parameter], *, to_modify: bool = False) -> Iterator[None]:
    """Context in which the parameters are whole. Every rank must call this.

    With `to_modify`, rank 0's changes are sent to all shards at the end; every rank of a plain (unsharded)
    model must then make the same changes.
    """
    sharded = [p for p in parameters if is_sharded(p)]
    with deepspeed.zero.GatheredParameters(
        sharded, modifier_rank=0 if to_modify else None, enabled=bool(sharded)
    ):
        yield


def own_share(numel: int) -> slice:
    """The slice of a flat tensor (numel,) that this rank keeps; those of the last ranks are short."""
    size = -(-numel // distributed.world_size())
    first = min(distributed.rank() * size, numel)
    return slice(first, min(first + size, numel))


def local_shard(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part (n,): the shard under ZeRO 3, else its share. A view; no communication."""
    if is_sharded(parameter):
        return parameter.ds_tensor
    return parameter.data.view(-1)[own_share(parameter.numel())]


@contextmanager
def swapped_shards(parameters: dict[str, nn.Parameter], values: dict[str, torch.Tensor]) -> Iterator[None]:
    """Context in which `values`, by name and with the shapes of `local_shard`, replace the weights.

    Whole weights must be the same on all ranks. Every rank must call this. After an error in the block the
    weights are not restored: the other ranks may not have reached its end.
    """
    saved = {name: local_shard(parameter).detach().clone() for name, parameter in parameters.items()}
    _write_shards(parameters, values)
    yield
    _write_shards(parameters, saved)


@torch.no_grad()
def _write_shards(parameters: dict[str, nn.Parameter], values: dict[str, torch.Tensor]) -> None:
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            # A small parameter stays whole between uses (persistence); unless it is partitioned again, its
            # old whole copy would be read instead of the shard.
            parameter.partition(has_been_updated=False)
        elif distributed.world_size() > 1:
            _write_whole(parameter, values[name])
            continue
        local_shard(parameter).copy_(values[name])


def _write_whole(parameter: nn.Parameter, share: torch.Tensor) -> None:
    """Fill a whole parameter from the shares of all ranks."""
    size = -(-parameter.numel() // distributed.world_size())
    sent = parameter.new_zeros(size)
    sent[: len(share)] = share
    received = parameter.new_empty(size * distributed.world_size())
    dist.all_gather(list(received.split(size)), sent)
    parameter.data.view(-1).copy_(received[: parameter.numel()])


class OwnedRun(NamedTuple):
    """Location of a part of a trained parameter in a tensor that an optimizer updates on this rank."""

    parameter: nn.Parameter
    start: int  # offset in the flat parameter
    numel: int  # 0 if other ranks hold all of it
    owner: torch.Tensor  # key of the optimizer's state
    offset: int = 0  # offset in the flat owner


def find_owned_runs(engine: Any) -> Iterator[OwnedRun]:
    """Parts of each trained parameter that this rank's optimizer holds, in the same order on all ranks."""
    zero = engine.optimizer
    stage = engine.zero_optimization_stage() if engine.zero_optimization() else 0
    if stage == 0:
        for p in (p for group in zero.param_groups for p in group["params"]):
            yield OwnedRun(p, 0, p.numel(), p)
    elif stage == 3:
        for p in (p for group in zero.fp16_groups for p in group):
            index, offset, _ = zero.grad_position[zero.get_param_id(p)]
            share = own_share(p.ds_numel)
            owner = zero.fp32_partitioned_groups_flat[index]
            yield OwnedRun(p, share.start, share.stop - share.start, owner, offset)
    else:
        for flat, group in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
            for p in group:
                addresses = fragment_addresses(p)
                if addresses is None:
                    yield OwnedRun(p, 0, 0, flat)
                    continue
                source, target = addresses
                yield OwnedRun(p, source.start, source.numel, flat, target.start)


class OptimizerStates:
    """fp32 weights and moments of a ZeRO engine, which can be moved to pinned CPU memory.

    The tensor objects stay the same. States that --offload keeps on the CPU stay there.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        # DeepSpeed can move them itself, but under stage 3 only those of its own FusedAdam.
        self.is_ours = engine.zero_optimization_stage() == 3 and not engine.zero_use_cpu_optimizer()
        self.pinned: list[tuple[torch.Tensor, torch.Tensor]] = []  # (state, its CPU copy)

    def offload(self) -> None:
        """Move the states to the CPU. Raises DeepSpeed's error if parameters are offloaded."""
        if not self.is_ours:
            self.engine.offload_states(include=STATES)
            return
        zero = self.engine.optimizer
        moments = [t for state in zero.optimizer.state.values() for t in state.values() if t.dim()]
        states = [*zero.fp32_partitioned_groups_flat, *moments]
        if len(self.pinned) != len(states):  # on the first call, and once moments exist
            pin = distributed.has_gpu()
            self.pinned = [(t, torch.empty_like(t, device="cpu", pin_memory=pin)) for t in states]
        for state, cpu_copy in self.pinned:
            cpu_copy.copy_(state)
            state.data = cpu_copy

    def reload(self) -> None:
        """Move the states back to the GPU."""
        if not self.is_ours:
            self.engine.reload_states()
        for state, cpu_copy in self.pinned:
            state.data = cpu_copy.to(distributed.device(), non_blocking=True)
