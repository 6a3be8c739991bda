"""Which ranks need what of whom: by hand, and all ranks' exchange played by one process."""

import random
from math import prod

import pytest
import torch
from torch import nn

from common.generation.resharding import Resharder, Route, TPGroups, TPLayout, group_by_layers, plan_weight
from common.generation.tp_plans import Cut
from common.models.lora import TrainedWeight

WORLDS = [(1, 1), (2, 2), (4, 1), (4, 2), (8, 4), (8, 8)]


def even_cut(dim: int, size: int, tp_size: int) -> Cut:
    step = size // tp_size
    return Cut(dim, tuple(((j * step, (j + 1) * step),) for j in range(tp_size)))


def fused_cut(dim: int, size: int, tp_size: int) -> Cut:
    """Return the cut of query, key and value that lie behind one another."""
    part, step = size // 3, size // 3 // tp_size
    starts = [[k * part + j * step for k in range(3)] for j in range(tp_size)]
    return Cut(dim, tuple(tuple((start, start + step) for start in of_rank) for of_rank in starts))


def shards_of(weight: torch.Tensor, world_size: int) -> list[torch.Tensor]:
    """Return what DeepSpeed gives each rank: equal runs, the last of them filled up."""
    size = -(-weight.numel() // world_size)
    flat = torch.full((size * world_size,), float("nan"))
    flat[: weight.numel()] = weight.flatten()
    return list(flat.view(world_size, size).unbind())


def play_switch(
    weight: torch.Tensor, cut: Cut | None, world_size: int, tp_size: int, is_contiguous: bool
) -> Route:
    """Check every rank's slice after a switch among ranks that this process plays; return the route."""
    plans = [
        plan_weight(tuple(weight.shape), cut, TPLayout(world_size, tp_size, r, is_contiguous))
        for r in range(world_size)
    ]
    shards = shards_of(weight, world_size)
    for rank, plan in enumerate(plans):
        num_received, layout = 0, plan.layout
        if plan.route is Route.BLOCKS:
            found = torch.full(plan.local_shape, float("nan"))
            for source, other in enumerate(plans):
                for target, block in zip(
                    plan.blocks_from(source, found), other.blocks_to(rank, shards[source]), strict=True
                ):
                    target.copy_(block)
                    num_received += block.numel() * (source != rank)
        else:
            ranks = layout.ranks[layout.tp_rank] if plan.route is Route.ROWS else range(world_size)
            gathered = torch.cat([shards[source] for source in ranks])
            num_received = gathered.numel() - plan.shard_size
            found = plan.slice_of(gathered)
        assert torch.equal(found, weight if cut is None else cut.take(weight, layout.tp_rank)), plan
        assert num_received == plan.count_received() and found.is_contiguous(), plan
    return plan.route


@pytest.mark.parametrize(
    ("tp_size", "is_contiguous", "tp_groups", "gather_groups"),
    [
        (1, False, [[0], [1], [2], [3]], [[0, 1, 2, 3]]),
        (2, False, [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        (4, False, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
        (1, True, [[0], [1], [2], [3]], [[0, 1, 2, 3]]),
        (2, True, [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        (4, True, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
    ],
)
def test_tp_layout_of_four_ranks(tp_size, is_contiguous, tp_groups, gather_groups):
    for rank in range(4):
        layout = TPLayout(4, tp_size, rank, is_contiguous)
        assert (layout.ranks.T.tolist(), layout.ranks.tolist()) == (tp_groups, gather_groups)
        assert rank in gather_groups[layout.tp_rank]


def test_tp_layout_describes_its_replicas():
    assert TPLayout(4, 2).describe() == "replica 0 of ranks 0, 2; replica 1 of ranks 1, 3"
    assert TPLayout(4, 2, 3, True).describe() == "replica 0 of ranks 0, 1; replica 1 of ranks 2, 3"
    assert TPLayout(64, 1).describe().endswith("; replica 7 of rank 7; 56 more")


@pytest.mark.parametrize(
    ("shape", "cut", "expected"),
    [
        ((6, 6), even_cut(0, 6, 2), Route.ROWS),  # a shard ends inside a row: no matter
        ((8, 6, 5), even_cut(1, 6, 2), Route.BLOCKS),
        ((12, 6), fused_cut(0, 12, 2), Route.BLOCKS),
        ((7, 3), Cut(0, (((0, 4),), ((4, 7),))), Route.BLOCKS),
        ((6, 6), even_cut(1, 6, 2), Route.WHOLE),  # shards end inside rows
        ((8, 6), Cut(0, (((0, 8),),) * 2), Route.WHOLE),  # a cut that leaves all to everybody is none
        ((12, 6), Cut(0, (((6, 12), (0, 6)),) * 2), Route.BLOCKS),  # all, in another order
        ((7, 3), None, Route.WHOLE),
    ],
)
def test_route_by_shape(shape, cut, expected):
    assert plan_weight(shape, cut, TPLayout(4, 2)).route is expected
    if expected is Route.ROWS:  # of neighbours only one has a shard of its own slice
        assert plan_weight(shape, cut, TPLayout(4, 2, is_contiguous=True)).route is Route.BLOCKS


def test_group_by_layers_by_hand():
    names = ["embed.weight", "layers.0.a", "layers.0.b", "layers.1.a", "layers.2.experts.7.a", "norm", "head"]
    names = [f"model.{name}" for name in names]
    assert group_by_layers(names, 1) == [names[:1], names[1:3], names[3:4], names[4:5], names[5:]]
    assert group_by_layers(names, 2) == [names[:1], names[1:4], names[4:5], names[5:]]
    assert group_by_layers(names, 9) == [names[:1], names[1:5], names[5:]]


def random_cut(draw: random.Random, shape: tuple[int, ...], tp_size: int) -> Cut:
    """Return ranges in any order, uneven, some empty, some given to several ranks."""
    dim = draw.randrange(len(shape))
    ranges = [
        tuple(
            (start, draw.randint(start, shape[dim]))
            for start in (draw.randint(0, shape[dim]) for _ in range(draw.randint(1, 3)))
        )
        for _ in range(tp_size)
    ]
    return Cut(dim, tuple(ranges))


@pytest.mark.parametrize("is_contiguous", [False, True])
@pytest.mark.parametrize(("world_size", "tp_size"), WORLDS)
def test_every_way_gives_the_slices_of_the_whole_weight(world_size, tp_size, is_contiguous):
    draw, seen = random.Random(world_size * 10 + tp_size), set()
    for _ in range(150):
        shape = tuple(draw.choice((1, 3, 4, 7, 8, 12, 24)) for _ in range(draw.randint(1, 3)))
        weight = torch.arange(prod(shape), dtype=torch.float32).view(shape)
        cut = draw.choice((random_cut, lambda *_: None, even, fused))(draw, shape, tp_size)
        seen.add(play_switch(weight, cut, world_size, tp_size, is_contiguous))
    sends_rows = tp_size == world_size or not is_contiguous
    assert seen >= {Route.BLOCKS, Route.WHOLE} and (tp_size == 1 or (Route.ROWS in seen) == sends_rows)


def even(draw: random.Random, shape: tuple[int, ...], tp_size: int) -> Cut | None:
    dims = [dim for dim, size in enumerate(shape) if size % tp_size == 0]
    return even_cut(dims[0], shape[dims[0]], tp_size) if dims else None


def fused(draw: random.Random, shape: tuple[int, ...], tp_size: int) -> Cut | None:
    dims = [dim for dim, size in enumerate(shape) if size % (3 * tp_size) == 0]
    return fused_cut(dims[-1], shape[dims[-1]], tp_size) if dims else None


def test_whole_parameters_are_cut_here_and_shared_where_they_can_be():
    rows, columns, uncut, fused_weight = (nn.Parameter(torch.randn(8, 6)) for _ in range(4))
    parameters = {"layers.0.rows": rows, "layers.0.columns": columns, "layers.0.uncut": uncut}
    parameters["layers.0.fused"] = fused_weight
    weights = {name: TrainedWeight(parameter) for name, parameter in parameters.items()}
    cuts = {
        "layers.0.rows": even_cut(0, 8, 2),
        "layers.0.columns": even_cut(1, 6, 2),
        "layers.0.fused": fused_cut(1, 6, 2),
    }
    groups = TPGroups.__new__(TPGroups)  # nothing may be sent: there is nobody
    resharder = Resharder(weights, cuts, TPLayout(4, 2, 3), groups, gather_partition_size=1)
    found = {name: weight.parameter for name, weight in resharder.load()}
    assert list(found) == list(parameters)
    assert found["layers.0.uncut"].data_ptr() == uncut.data_ptr()
    assert found["layers.0.rows"].data_ptr() == rows[4:].data_ptr()
    assert torch.equal(found["layers.0.rows"], rows[4:])
    assert torch.equal(found["layers.0.columns"], columns[:, 3:])
    assert torch.equal(found["layers.0.fused"], fused_weight[:, [1, 3, 5]])
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in found.values())
    assert resharder.received_bytes == 0
