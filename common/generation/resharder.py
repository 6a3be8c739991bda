"""Moves weights from training shards (ZeRO stage 3) to tensor-parallel slices, as reshard_plan.py says.

Each rank receives only what it lacks; weights that are whole on every rank are cut where they are.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.generation.reshard_plan import Route, TPLayout, WeightPlan, group_by_layers, plan_weight
from common.generation.tp_plans import Cut
from common.models.lora import TrainedWeight
from common.ranks import distributed
from common.ranks.zero3 import is_sharded


class TPGroups:
    """The process groups of a layout. Every rank must make this together.

    `tp_group` is None where every rank has the whole model, `gather_group` where no two have the same slice.
    """

    def __init__(self, layout: TPLayout) -> None:
        self.tp_group = dist.group.WORLD if layout.gather_size == 1 < layout.tp_size else None
        self.gather_group = dist.group.WORLD if layout.tp_size == 1 < layout.gather_size else None
        if 1 < layout.tp_size < layout.world_size:
            mesh = DeviceMesh(distributed.device().type, layout.ranks, mesh_dim_names=("slice", "replica"))
            self.tp_group, self.gather_group = mesh.get_group("slice"), mesh.get_group("replica")


# A parameter of the trainer and how it gets to its slices.
Source = tuple[nn.Parameter, WeightPlan]


class Resharder:
    """Moves the trainer's weights into tensor-parallel slices. Every rank must make and use it together.

    `weights` are the trainer's by name, sharded or whole, in the same order on all ranks; `cuts` names those
    that are cut; `gather_partition_size` layers are moved at a time. `received_bytes` are those of the last load, on this rank.
    """

    def __init__(
        self,
        weights: dict[str, TrainedWeight],
        cuts: dict[str, Cut],
        layout: TPLayout,
        groups: TPGroups,
        *,
        gather_partition_size: int,
    ) -> None:
        self.received_bytes = 0
        self._weights, self._layout, self._groups = weights, layout, groups
        self._sources: dict[str, list[Source]] = {}
        for name, weight in weights.items():
            of_tensor = [cuts.get(name), None, None]  # the factors of an adapter are never cut
            self._sources[name] = [
                (p, plan_weight(tuple(getattr(p, "ds_shape", p.shape)), cut, layout))
                for p, cut in zip(weight.tensors(), of_tensor, strict=False)
            ]
        self._name_groups = group_by_layers(list(weights), gather_partition_size)

    def load(self) -> Iterator[tuple[str, TrainedWeight]]:
        """Yield (name, this rank's slice of the weight, with its whole adapter) for every weight.

        A tensor that lies in the trainer's own memory is a view of it: read it, and fetch it anew after an
        update. All others are contiguous and the caller's own. Every rank must call and exhaust this.
        """
        self.received_bytes = 0
        for names in self._name_groups:
            tensors = iter(self._load_group([source for name in names for source in self._sources[name]]))
            for name in names:
                yield name, self._weights[name].replace_tensors([next(tensors) for _ in self._sources[name]])

    @torch.no_grad()
    def _load_group(self, sources: list[Source]) -> list[torch.Tensor]:
        """Return the slices of sources that are moved together, in their order."""
        slices: dict[int, torch.Tensor] = {}
        sent: dict[tuple[bool, torch.dtype], list[int]] = {}
        for index, (parameter, plan) in enumerate(sources):
            is_here = getattr(parameter, "ds_status", None) is ZeroParamStatus.AVAILABLE
            if is_here or not is_sharded(parameter):  # every rank has all of it at this moment
                whole, tp_rank = parameter.data, plan.layout.tp_rank
                slices[index] = whole if plan.cut is None else plan.cut.take(whole, tp_rank).contiguous()
            elif plan.is_view:
                slices[index] = _fetch_shard(parameter).view(plan.local_shape)
            else:
                sent.setdefault((plan.route is Route.BLOCKS, parameter.dtype), []).append(index)
        for (is_in_blocks, dtype), indices in sent.items():
            plans = [sources[index][1] for index in indices]
            shards = [_fetch_shard(sources[index][0]) for index in indices]
            move = self._exchange_blocks if is_in_blocks else self._gather_shards
            slices |= zip(indices, move(plans, shards), strict=True)
            self.received_bytes += sum(plan.count_received() for plan in plans) * dtype.itemsize
        return [slices[index] for index in range(len(sources))]

    def _gather_shards(self, plans: list[WeightPlan], shards: list[torch.Tensor]) -> list[torch.Tensor]:
        gathered, under_way = [], []
        for plan, shard in zip(plans, shards, strict=True):
            gathered.append(shard.new_empty(plan.num_gathered_shards * plan.shard_size))
            group = self._groups.gather_group if plan.route is Route.ROWS else dist.group.WORLD
            work = dist.all_gather_into_tensor(gathered[-1], shard, group=group, async_op=True)
            under_way.append(work)
        for work in under_way:
            work.wait()
        return [plan.slice_of(shards) for plan, shards in zip(plans, gathered, strict=True)]

    def _exchange_blocks(self, plans: list[WeightPlan], shards: list[torch.Tensor]) -> list[torch.Tensor]:
        slices = [shard.new_empty(plan.local_shape) for plan, shard in zip(plans, shards, strict=True)]
        outgoing: list[list[torch.Tensor]] = []  # by rank, weight after weight
        incoming: list[list[torch.Tensor]] = []
        for rank in range(self._layout.world_size):
            outgoing.append([b for p, x in zip(plans, shards, strict=True) for b in p.blocks_to(rank, x)])
            incoming.append([b for p, x in zip(plans, slices, strict=True) for b in p.blocks_from(rank, x)])
        own = self._layout.rank
        for block, target in zip(outgoing[own], incoming[own], strict=True):
            target.copy_(block)
        outgoing[own] = incoming[own] = []
        send, send_sizes = _flat_buffer(outgoing, shards[0])
        received, receive_sizes = _flat_buffer(incoming, shards[0])
        for part, block in _parts_of(send, outgoing):
            part.copy_(block)
        dist.all_to_all_single(received, send, receive_sizes, send_sizes)
        for part, target in _parts_of(received, incoming):
            target.copy_(part)
        return slices


def _flat_buffer(blocks: list[list[torch.Tensor]], like: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Return a flat tensor with room for the blocks of all ranks, and the elements of each rank's."""
    sizes = [sum(block.numel() for block in of_rank) for of_rank in blocks]
    return like.new_empty(sum(sizes)), sizes


def _parts_of(
    buffer: torch.Tensor, blocks: list[list[torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (its part of the flat buffer, block) for every block, rank by rank."""
    flat = [block for of_rank in blocks for block in of_rank]
    for part, block in zip(buffer.split([block.numel() for block in flat]), flat, strict=True):
        yield part.view(block.shape), block


def _fetch_shard(parameter: nn.Parameter) -> torch.Tensor:
    """Return the shard on the compute device: one that lives on the CPU is copied."""
    return parameter.ds_tensor.detach().to(distributed.device())
