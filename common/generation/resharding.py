"""Resharding of weights from ZeRO-3 shards to tensor-parallel slices: the plan and the communication.

# N ranks, t tensor-parallel size, M bytes of weights

Ranks [j*N/t, (j+1)*N/t) are the gather group of tp_rank j, and a tensor-parallel group has one rank of each.
A weight cut by rows therefore needs only the ranks of its gather group: their flat shards, concatenated,
*are* slice j. Of the bytes of a weight a rank receives, if it is cut

    by rows        (N-t)/(N t)     the other shards of its slice
    by columns     (N-1)/(N t)     its columns of the other ranks' rows
    not at all     (N-1)/N         (shards are padded to equal length: up to N-1 elements more)

Gathering everything would take (N-1)/N of M. Alternatively, a tensor-parallel group consists of adjacent
ranks, so that the sums for every token stay within a machine: a rank then receives up to 1/t of a cut weight,
because the shards of its slice are on other ranks. Plans are numbers and tensors of one rank only;
`Resharder` does the communication.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from common.generation.tp_plans import Cut
from common.models.lora import TrainedWeight
from common.ranks import distributed
from common.ranks.zero3 import is_sharded

MAX_SHOWN = 8  # replicas in a description


@dataclass(frozen=True)
class TPLayout:
    """Which ranks work together: arithmetic, no communication. `tp_size` divides `world_size`."""

    world_size: int
    tp_size: int
    rank: int = 0
    is_contiguous: bool = False  # adjacent ranks form a tensor-parallel group, not a gather group

    @property
    def gather_size(self) -> int:
        """Ranks of a gather group, N/t."""
        return self.world_size // self.tp_size

    @property
    def ranks(self) -> torch.Tensor:
        """Ranks (t, N/t) int64: row j is the gather group of slice j, a column a tensor-parallel group."""
        if self.is_contiguous:
            return torch.arange(self.world_size).view(self.gather_size, self.tp_size).T
        return torch.arange(self.world_size).view(self.tp_size, self.gather_size)

    def tp_rank_of(self, rank: int) -> int:
        """Index of the slice that a rank holds."""
        return rank % self.tp_size if self.is_contiguous else rank // self.gather_size

    @property
    def tp_rank(self) -> int:
        """The slice that this rank holds."""
        return self.tp_rank_of(self.rank)

    def describe(self) -> str:
        """The ranks that hold a replica together, in the order of their slices; a replica's number is its
        data-parallel coordinate.
        """
        replicas = self.ranks.T.tolist()
        word = "ranks" if self.tp_size > 1 else "rank"
        shown = [f"replica {i} of {word} {', '.join(map(str, ranks))}" for i, ranks in enumerate(replicas)]
        more = [f"{len(shown) - MAX_SHOWN} more"] if len(shown) > MAX_SHOWN else []
        return "; ".join(shown[:MAX_SHOWN] + more)


class Route(Enum):
    """How a sharded weight is turned into slices."""

    ROWS = "the shards of the gather group are gathered; concatenated, they are the slice"
    BLOCKS = "every rank sends every other rank the blocks of its shard that lie in the other's slice"
    WHOLE = "all shards are gathered; weights that are split (odd sizes) are split here"


class Block(NamedTuple):
    """A rectangle of a weight, (rows, columns), with its positions in a shard and in a slice as matrices."""

    in_shard: tuple[slice, slice]
    in_slice: tuple[slice, slice]


@dataclass(frozen=True)
class WeightPlan:
    """Route of one weight. `cut` is None if every rank holds all of it; `shard_size` counts elements, padding
    included; `width` is the row length of the matrix that the blocks are rectangles of.
    """

    shape: tuple[int, ...]
    cut: Cut | None
    layout: TPLayout
    route: Route
    shard_size: int
    width: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's slice."""
        if self.cut is None:
            return self.shape
        size = sum(stop - start for start, stop in self.cut.ranges[self.layout.tp_rank])
        return (*self.shape[: self.cut.dim], size, *self.shape[self.cut.dim + 1 :])

    @property
    def num_gathered_shards(self) -> int:
        """Number of shards gathered on this rank, including its own (not for BLOCKS)."""
        return self.layout.gather_size if self.route is Route.ROWS else self.layout.world_size

    @property
    def is_view(self) -> bool:
        """Whether this rank's shard, reshaped, is its slice: nothing is sent or copied."""
        return self.num_gathered_shards == 1 and (self.route is Route.ROWS or self.cut is None)

    def blocks(self, source: int, tp_rank: int) -> list[Block]:
        """Blocks of rank `source`'s shard that belong to slice `tp_rank`; sender and receiver agree."""
        rows_per_shard = self.shard_size // self.width
        first = source * rows_per_shard
        last = min(first + rows_per_shard, prod(self.shape) // self.width)
        scale = prod(self.shape[self.cut.dim + 1 :])
        blocks, offset = [], 0
        for start, stop in self.cut.ranges[tp_rank]:
            start = start * scale
            stop = stop * scale
            if self.cut.dim == 0:
                rows = slice(max(start, first), min(stop, last))
                columns = slice(0, 1)
                in_slice = slice(offset + rows.start - start, offset + rows.stop - start), columns
            else:
                rows, columns = slice(first, last), slice(start, stop)
                in_slice = rows, slice(offset, offset + stop - start)
            if rows.start < rows.stop and start < stop:
                blocks.append(Block((slice(rows.start - first, rows.stop - first), columns), in_slice))
            offset += stop - start
        return blocks

    def blocks_to(self, destination: int, shard: torch.Tensor) -> list[torch.Tensor]:
        """Views of this rank's shard that another rank needs."""
        matrix = shard.view(-1, self.width)
        blocks = self.blocks(self.layout.rank, self.layout.tp_rank_of(destination))
        return [matrix[block.in_shard] for block in blocks]

    def blocks_from(self, source: int, local: torch.Tensor) -> list[torch.Tensor]:
        """Views of this rank's slice for another rank's blocks, in the order of `blocks_to`."""
        matrix = local.flatten(1) if self.cut.dim else local.view(-1, 1)
        return [matrix[block.in_slice] for block in self.blocks(source, self.layout.tp_rank)]

    def slice_of(self, gathered: torch.Tensor) -> torch.Tensor:
        """This rank's slice, contiguous, from the concatenated shards."""
        if self.route is Route.ROWS:
            return gathered.view(self.local_shape)
        whole = gathered[: prod(self.shape)].view(self.shape)
        if self.cut is None:
            return whole
        return self.cut.take(whole, self.layout.tp_rank).clone(memory_format=torch.contiguous_format)

    def count_received(self) -> int:
        """Number of elements that this rank receives."""
        if self.route is not Route.BLOCKS:
            return (self.num_gathered_shards - 1) * self.shard_size
        own = self.blocks(self.layout.rank, self.layout.tp_rank)
        return prod(self.local_shape) - sum(prod(s.stop - s.start for s in b.in_slice) for b in own)


@lru_cache(maxsize=4096)
def plan_weight(shape: tuple[int, ...], cut: Cut | None, layout: TPLayout) -> WeightPlan:
    """The cheapest plan for a weight of `shape`."""
    if cut is not None:
        size = shape[cut.dim]
        cut = None if set(cut.ranges) == {((0, size),)} else cut
    numel = prod(shape)
    shard_size = -(-numel // layout.world_size)
    row_width = prod(shape[1:])
    route = Route.WHOLE
    if cut is not None and cut.dim == 0:
        step = size // layout.tp_size
        shares = tuple(((j * step, (j + 1) * step),) for j in range(layout.tp_size))
        is_even = numel == shard_size * layout.world_size and size % layout.tp_size == 0
        has_its_shards = layout.gather_size == 1 or not layout.is_contiguous
        route = Route.ROWS if has_its_shards and is_even and cut.ranges == shares else Route.BLOCKS
    elif cut is not None and cut.dim == 1 and shard_size % row_width == 0:
        route = Route.BLOCKS
    # A block of a weight cut by rows is a run of elements, because a shard may end within a row.
    width = 1 if cut is None or cut.dim == 0 else row_width
    return WeightPlan(shape, cut, layout, route, shard_size, width)


def group_by_layers(names: Sequence[str], num_layers: int) -> list[list[str]]:
    """Names in groups that are moved together: `num_layers` successive layers, or consecutive names without a
    layer number.
    """
    groups: list[list[str]] = []
    layers_in_last = num_layers  # full, so the first name starts a group
    numbers = {name: match and match[1] for name in names for match in [re.search(r"\.(\d+)\.", name)]}
    for layer, run in groupby(names, numbers.__getitem__):
        if layer is None or layers_in_last == num_layers:
            groups.append([])
            layers_in_last = 0
        groups[-1] += run
        layers_in_last = num_layers if layer is None else layers_in_last + 1
    return groups


class TPGroups:
    """The process groups of a layout. Every rank must create this together.

    `tp_group` is None if every rank has the whole model, `gather_group` if no two have the same slice.
    """

    def __init__(self, layout: TPLayout) -> None:
        self.tp_group = dist.group.WORLD if layout.gather_size == 1 < layout.tp_size else None
        self.gather_group = dist.group.WORLD if layout.tp_size == 1 < layout.gather_size else None
        if 1 < layout.tp_size < layout.world_size:
            mesh = DeviceMesh(distributed.device().type, layout.ranks, mesh_dim_names=("slice", "replica"))
            self.tp_group = mesh.get_group("slice")
            self.gather_group = mesh.get_group("replica")


# A parameter of the trainer and the plan of its slices.
Source = tuple[nn.Parameter, WeightPlan]


class Resharder:
    """Moves the trainer's weights into tensor-parallel slices. Every rank must create and use it together.

    `weights` are the trainer's by name, sharded or whole, in the same order on all ranks; `cuts` has those
    that are cut; `gather_partition_size` layers are moved at a time. `received_bytes` are those of this
    rank's last load.
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
        self._weights = weights
        self._layout = layout
        self._groups = groups
        self._sources: dict[str, list[Source]] = {}
        for name, weight in weights.items():
            tensor_cuts = [cuts.get(name), None, None]  # an adapter's factors are never cut
            self._sources[name] = [
                (p, plan_weight(tuple(getattr(p, "ds_shape", p.shape)), cut, layout))
                for p, cut in zip(weight.tensors(), tensor_cuts, strict=False)
            ]
        self._name_groups = group_by_layers(list(weights), gather_partition_size)

    def load(self) -> Iterator[tuple[str, TrainedWeight]]:
        """Yield (name, this rank's slice of the weight, with its whole adapter) for every weight.

        A tensor in the trainer's own memory is a view of it: read it, and load it again after an update. All
        others are contiguous and belong to the caller. Every rank must call and exhaust this.
        """
        self.received_bytes = 0
        for names in self._name_groups:
            tensors = iter(self._load_group([source for name in names for source in self._sources[name]]))
            for name in names:
                yield name, self._weights[name].replace_tensors([next(tensors) for _ in self._sources[name]])

    @torch.no_grad()
    def _load_group(self, sources: list[Source]) -> list[torch.Tensor]:
        """Slices of sources that are moved together, in their order."""
        slices: dict[int, torch.Tensor] = {}
        sent: dict[tuple[bool, torch.dtype], list[int]] = {}
        for index, (parameter, plan) in enumerate(sources):
            is_gathered = getattr(parameter, "ds_status", None) is ZeroParamStatus.AVAILABLE
            if is_gathered or not is_sharded(parameter):  # every rank holds the whole weight now
                whole = parameter.data
                tp_rank = plan.layout.tp_rank
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
        gathered, pending = [], []
        for plan, shard in zip(plans, shards, strict=True):
            gathered.append(shard.new_empty(plan.num_gathered_shards * plan.shard_size))
            group = self._groups.gather_group if plan.route is Route.ROWS else dist.group.WORLD
            work = dist.all_gather_into_tensor(gathered[-1], shard, group=group, async_op=True)
            pending.append(work)
        for work in pending:
            work.wait()
        return [plan.slice_of(shards) for plan, shards in zip(plans, gathered, strict=True)]

    def _exchange_blocks(self, plans: list[WeightPlan], shards: list[torch.Tensor]) -> list[torch.Tensor]:
        slices = [shard.new_empty(plan.local_shape) for plan, shard in zip(plans, shards, strict=True)]
        outgoing: list[list[torch.Tensor]] = []  # by rank, in the order of the weights
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
    """A flat tensor with room for the blocks of all ranks, and the number of elements of each rank's."""
    sizes = [sum(block.numel() for block in rank_blocks) for rank_blocks in blocks]
    return like.new_empty(sum(sizes)), sizes


def _parts_of(
    buffer: torch.Tensor, blocks: list[list[torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (part of the flat buffer, block) for every block, rank by rank."""
    flat = [block for rank_blocks in blocks for block in rank_blocks]
    for part, block in zip(buffer.split([block.numel() for block in flat]), flat, strict=True):
        yield part.view(block.shape), block


def _fetch_shard(parameter: nn.Parameter) -> torch.Tensor:
    """The shard on the compute device; one on the CPU is copied."""
    return parameter.ds_tensor.detach().to(distributed.device())
