"""How each weight gets from training shards to tensor-parallel slices: layout, routes, packing.

Numbers and tensors of one rank only, nothing is sent here. `tp_reshard` explains the layout and moves.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
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
    rank: int

    def __post_init__(self) -> None:
        if self.tp_size < 1 or self.world_size % self.tp_size:
            raise ValueError(f"tp_size {self.tp_size} does not divide the {self.world_size} ranks")

    @property
    def gather_size(self) -> int:
        """Ranks of a gather group, N/t."""
        return self.world_size // self.tp_size

    def tp_rank_of(self, rank: int) -> int:
        """Return which slice a rank holds."""
        return rank // self.gather_size

    @property
    def tp_rank(self) -> int:
        """The slice that this rank holds."""
        return self.tp_rank_of(self.rank)

    @property
    def tp_ranks(self) -> list[int]:
        """The ranks of this rank's tensor-parallel group, by tp_rank."""
        return self.all_tp_groups[self.rank % self.gather_size]

    @property
    def gather_ranks(self) -> list[int]:
        """The ranks that hold the same slice as this one, this one among them."""
        return self.all_gather_groups[self.tp_rank]

    @property
    def all_tp_groups(self) -> list[list[int]]:
        """Every tensor-parallel group."""
        return [list(range(i, self.world_size, self.gather_size)) for i in range(self.gather_size)]

    @property
    def all_gather_groups(self) -> list[list[int]]:
        """Every gather group, by tp_rank."""
        size = self.gather_size
        return [list(range(j * size, (j + 1) * size)) for j in range(self.tp_size)]


class Route(Enum):
    """How a sharded weight gets to its slices."""

    ROWS = "the slice is the gather group's shards end to end: gathered straight into place"
    ALL = "not cut, and the weight is all shards end to end: gathered straight into place"
    PIECES = "every rank sends every other one the rectangle of its shard that is in the other's slice"
    WHOLE = "vectors that are not cut, and odd ones: all shards are gathered, packed; the slice is cut here"


class Piece(NamedTuple):
    """A rectangle, where it lies in a shard (as a matrix) and where in a slice (as a matrix)."""

    rows: slice
    columns: slice
    to_rows: slice
    to_columns: slice

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return (self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start)


@dataclass(frozen=True)
class WeightPlan:
    """One weight's way. `cut` is None when every rank holds all of it; `shard_size` counts elements, padding
    included; `width` is the length of a row of the matrix that the pieces are rectangles of.
    """

    shape: tuple[int, ...]
    cut: Cut | None
    layout: TPLayout
    route: Route
    shard_size: int
    width: int

    @property
    def numel(self) -> int:
        """Elements of the whole weight."""
        return prod(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's slice."""
        if self.cut is None:
            return self.shape
        size = sum(stop - start for start, stop in self.cut.ranges[self.layout.tp_rank])
        return (*self.shape[: self.cut.dim], size, *self.shape[self.cut.dim + 1 :])

    @property
    def num_gathered_shards(self) -> int:
        """How many shards come together on this rank, its own among them (not for PIECES)."""
        return self.layout.gather_size if self.route is Route.ROWS else self.layout.world_size

    @property
    def is_view(self) -> bool:
        """Whether this rank's shard, reshaped, is its slice: nothing is sent or copied."""
        return self.num_gathered_shards == 1 and (self.route is Route.ROWS or self.cut is None)

    def pieces(self, source: int, tp_rank: int) -> list[Piece]:
        """Return what of rank `source`'s shard belongs into slice `tp_rank`; sender and receiver agree."""
        rows_per_shard = self.shard_size // self.width
        first = source * rows_per_shard
        last = min(first + rows_per_shard, self.numel // self.width)
        scale = prod(self.shape[self.cut.dim + 1 :])
        found, offset = [], 0
        for start, stop in self.cut.ranges[tp_rank]:
            start, stop = start * scale, stop * scale
            if self.cut.dim == 0:
                low, high = max(start, first), min(stop, last)
                to_rows = slice(offset + low - start, offset + high - start)
                piece = Piece(slice(low - first, high - first), slice(0, 1), to_rows, slice(0, 1))
            else:
                to_columns = slice(offset, offset + stop - start)
                piece = Piece(slice(0, last - first), slice(start, stop), slice(first, last), to_columns)
            if piece.rows.start < piece.rows.stop and start < stop:
                found.append(piece)
            offset += stop - start
        return found

    def count_elements(self, source: int, destination: int) -> int:
        """Return how many elements of its shard one rank sends another by PIECES."""
        if source == destination:
            return 0
        return sum(piece.numel for piece in self.pieces(source, self.layout.tp_rank_of(destination)))

    def count_received(self) -> int:
        """Return how many elements this rank receives."""
        if self.route is Route.PIECES:
            return sum(self.count_elements(s, self.layout.rank) for s in range(self.layout.world_size))
        return (self.num_gathered_shards - 1) * self.shard_size


def plan_weight(shape: tuple[int, ...], cut: Cut | None, layout: TPLayout) -> WeightPlan:
    """Return the cheapest way for a weight of `shape`."""
    if cut is not None:
        merged = tuple(_merge_ranges(ranges) for ranges in cut.ranges)
        if len(merged) != layout.tp_size:
            raise ValueError(f"a cut for {len(merged)} ranks, but tp_size is {layout.tp_size}")
        size = shape[cut.dim]
        cut = None if set(merged) == {((0, size),)} else Cut(cut.dim, merged)
    numel = prod(shape)
    shard_size = -(-numel // layout.world_size)
    is_even = numel == shard_size * layout.world_size
    row_width = prod(shape[1:])
    if cut is None:
        route = Route.ALL if is_even and len(shape) > 1 else Route.WHOLE
    elif cut.dim == 0:
        step = size // layout.tp_size
        shares = tuple(((j * step, (j + 1) * step),) for j in range(layout.tp_size))
        is_in_equal_shares = size % layout.tp_size == 0 and cut.ranges == shares
        route = Route.ROWS if is_even and is_in_equal_shares else Route.PIECES
    else:
        route = Route.PIECES if cut.dim == 1 and shard_size % row_width == 0 else Route.WHOLE
    # Cut by rows, a piece is a run of elements, wherever in a row a shard may end.
    width = 1 if cut is None or cut.dim == 0 else row_width
    return WeightPlan(shape, cut, layout, route, shard_size, width)


def _merge_ranges(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return tuple(merged)


def group_by_layers(names: Sequence[str], num_layers: int) -> list[list[str]]:
    """Return the names in groups that are moved together: `num_layers` successive layers, or a run of names
    that have no layer number.
    """
    groups: list[list[str]] = []
    layers_in_last = num_layers  # full: what comes next begins a group
    for layer, run in groupby(names, _layer_number):
        if layer is None or layers_in_last == num_layers:
            groups.append([])
            layers_in_last = 0
        groups[-1] += run
        layers_in_last = num_layers if layer is None else layers_in_last + 1
    return groups


def _layer_number(name: str) -> int | None:
    match = re.search(r"\.(\d+)\.", name)
    return int(match[1]) if match else None


def pack_pieces(plans: Sequence[WeightPlan], shards: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Lay what this rank sends into the flat `buffer`: by destination, then weight by weight."""
    layout, position = plans[0].layout, 0
    for destination in range(layout.world_size):
        if destination == layout.rank:
            continue
        for plan, shard in zip(plans, shards, strict=True):
            matrix = shard.view(-1, plan.width)
            for piece in plan.pieces(layout.rank, layout.tp_rank_of(destination)):
                block = matrix[piece.rows, piece.columns]
                buffer[position : position + piece.numel].view(block.shape).copy_(block)
                position += piece.numel


def unpack_pieces(
    plans: Sequence[WeightPlan],
    shards: Sequence[torch.Tensor],
    buffer: torch.Tensor,
    slices: Sequence[torch.Tensor],
) -> None:
    """Fill the slices from what arrived in the flat `buffer` (by source) and from this rank's own shards."""
    layout, position = plans[0].layout, 0
    for source in range(layout.world_size):
        for plan, shard, whole_slice in zip(plans, shards, slices, strict=True):
            target = whole_slice.flatten(1) if plan.cut.dim else whole_slice.view(-1, 1)
            for piece in plan.pieces(source, layout.tp_rank):
                place = target[piece.to_rows, piece.to_columns]
                if source == layout.rank:
                    place.copy_(shard.view(-1, plan.width)[piece.rows, piece.columns])
                else:
                    place.copy_(buffer[position : position + piece.numel].view(place.shape))
                    position += piece.numel


def unpack_whole(plan: WeightPlan, shards: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice, in memory of its own, from all shards of a weight (N, shard_size)."""
    whole = shards.flatten().narrow(0, 0, plan.numel).view(plan.shape)
    if plan.cut is not None:
        whole = plan.cut.take(whole, plan.layout.tp_rank)
    return whole.clone(memory_format=torch.contiguous_format)
