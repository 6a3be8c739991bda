"""Who sends what when weights go from training shards (ZeRO stage 3) to tensor-parallel slices.

# N ranks, t tensor-parallel size, M bytes of weights

Ranks [j*N/t, (j+1)*N/t) are the gather group of tp_rank j, and a tensor-parallel group takes one rank of
each. So a weight cut by rows needs no other ranks than the gather group: their flat shards, laid end to end,
*are* slice j. A rank receives, of the bytes of a weight that is cut

    by rows        (N-t)/(N t)     the other shards of its slice
    by columns     (N-1)/(N t)     its columns of everybody's rows
    not at all     (N-1)/N         (shards are padded to equal length: up to N-1 elements more)

where gathering everything would be (N-1)/N of M. `resharder.py` moves; here are numbers and tensors of one
rank only.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch

from common.generation.tp_plans import Cut


@dataclass(frozen=True)
class TPLayout:
    """Which ranks work together: no communication, only numbers."""

    world_size: int
    tp_size: int
    rank: int = 0

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.world_size % self.tp_size:
            raise ValueError(f"tp_size {self.tp_size} does not divide the {self.world_size} ranks")

    @property
    def gather_size(self) -> int:
        """Ranks of a gather group, N/t."""
        return self.world_size // self.tp_size

    @property
    def ranks(self) -> torch.Tensor:
        """Ranks (t, N/t) int64: row j is the gather group of slice j, a column a tensor-parallel group."""
        return torch.arange(self.world_size).view(self.tp_size, self.gather_size)

    def tp_rank_of(self, rank: int) -> int:
        """Return which slice a rank holds."""
        return rank // self.gather_size

    @property
    def tp_rank(self) -> int:
        """The slice that this rank holds."""
        return self.tp_rank_of(self.rank)


class Route(Enum):
    """How a sharded weight gets to its slices."""

    ROWS = "the gather group's shards are gathered: end to end they are the slice"
    BLOCKS = "every rank sends every other one the blocks of its shard that are in the other's slice"
    WHOLE = "all shards are gathered; what is cut (odd sizes) is cut here"


class Block(NamedTuple):
    """A rectangle of a weight, (rows, columns), by where it lies in a shard and in a slice as matrices."""

    in_shard: tuple[slice, slice]
    in_slice: tuple[slice, slice]


@dataclass(frozen=True)
class WeightPlan:
    """One weight's way. `cut` is None when every rank holds all of it; `shard_size` counts elements, padding
    included; `width` is the length of a row of the matrix that the blocks are rectangles of.
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
        """How many shards come together on this rank, its own among them (not for BLOCKS)."""
        return self.layout.gather_size if self.route is Route.ROWS else self.layout.world_size

    @property
    def is_view(self) -> bool:
        """Whether this rank's shard, reshaped, is its slice: nothing is sent or copied."""
        return self.num_gathered_shards == 1 and (self.route is Route.ROWS or self.cut is None)

    def blocks(self, source: int, tp_rank: int) -> list[Block]:
        """Return what of rank `source`'s shard belongs into slice `tp_rank`; sender and receiver agree."""
        rows_per_shard = self.shard_size // self.width
        first = source * rows_per_shard
        last = min(first + rows_per_shard, prod(self.shape) // self.width)
        scale = prod(self.shape[self.cut.dim + 1 :])
        found, offset = [], 0
        for start, stop in self.cut.ranges[tp_rank]:
            start, stop = start * scale, stop * scale
            if self.cut.dim == 0:
                rows, columns = slice(max(start, first), min(stop, last)), slice(0, 1)
                in_slice = slice(offset + rows.start - start, offset + rows.stop - start), columns
            else:
                rows, columns = slice(first, last), slice(start, stop)
                in_slice = rows, slice(offset, offset + stop - start)
            if rows.start < rows.stop and start < stop:
                found.append(Block((slice(rows.start - first, rows.stop - first), columns), in_slice))
            offset += stop - start
        return found

    def blocks_to(self, destination: int, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of this rank's shard that a rank needs."""
        matrix = shard.view(-1, self.width)
        found = self.blocks(self.layout.rank, self.layout.tp_rank_of(destination))
        return [matrix[block.in_shard] for block in found]

    def blocks_from(self, source: int, of_slice: torch.Tensor) -> list[torch.Tensor]:
        """Return the views of this rank's slice that a rank's blocks belong into, in the order of
        `blocks_to`.
        """
        matrix = of_slice.flatten(1) if self.cut.dim else of_slice.view(-1, 1)
        return [matrix[block.in_slice] for block in self.blocks(source, self.layout.tp_rank)]

    def slice_of(self, gathered: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice, contiguous, from the shards that were gathered, end to end."""
        if self.route is Route.ROWS:
            return gathered.view(self.local_shape)
        whole = gathered[: prod(self.shape)].view(self.shape)
        if self.cut is None:
            return whole
        return self.cut.take(whole, self.layout.tp_rank).clone(memory_format=torch.contiguous_format)

    def count_received(self) -> int:
        """Return how many elements this rank receives."""
        if self.route is not Route.BLOCKS:
            return (self.num_gathered_shards - 1) * self.shard_size
        own = self.blocks(self.layout.rank, self.layout.tp_rank)
        return prod(self.local_shape) - sum(prod(s.stop - s.start for s in b.in_slice) for b in own)


@lru_cache(maxsize=4096)
def plan_weight(shape: tuple[int, ...], cut: Cut | None, layout: TPLayout) -> WeightPlan:
    """Return the cheapest way for a weight of `shape`."""
    if cut is not None:
        if len(cut.ranges) != layout.tp_size:
            raise ValueError(f"a cut for {len(cut.ranges)} ranks, but tp_size is {layout.tp_size}")
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
        route = Route.ROWS if is_even and cut.ranges == shares else Route.BLOCKS
    elif cut is not None and cut.dim == 1 and shard_size % row_width == 0:
        route = Route.BLOCKS
    # Cut by rows, a block is a run of elements, wherever in a row a shard may end.
    width = 1 if cut is None or cut.dim == 0 else row_width
    return WeightPlan(shape, cut, layout, route, shard_size, width)


def group_by_layers(names: Sequence[str], num_layers: int) -> list[list[str]]:
    """Return the names in groups that are moved together: `num_layers` successive layers, or a run of names
    that have no layer number.
    """
    groups: list[list[str]] = []
    layers_in_last = num_layers  # full: what comes next begins a group
    numbers = {name: match and match[1] for name in names for match in [re.search(r"\.(\d+)\.", name)]}
    for layer, run in groupby(names, numbers.__getitem__):
        if layer is None or layers_in_last == num_layers:
            groups.append([])
            layers_in_last = 0
        groups[-1] += run
        layers_in_last = num_layers if layer is None else layers_in_last + 1
    return groups
