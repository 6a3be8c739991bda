"""Global batches do not depend on ranks or accumulation; an evaluation reads each row once; micro-batches."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from operator import itemgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.global_batches import (
    EpochOrder,
    GlobalBatches,
    Groups,
    RowPlan,
    evaluation_batches,
    keep_together,
)
from common.data.micro_batches import OVERHEAD_TOKENS, TokenPlan, plan_micro_batches
from common.ranks import distributed

ROWS = list(range(50))


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Let this process be one of several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "rank", lambda: rank)
        patch.setattr(distributed, "world_size", lambda: world_size)
        yield


def build_batches(rows, plan: RowPlan, lengths=(), *, groups=None, is_sorted=False, max_tokens=0):
    """Batches by seed 3, cut by tokens where there is a cap."""
    lengths = np.array(lengths, dtype=np.int32)
    longest = lengths.max(axis=1) if is_sorted else None
    order = EpochOrder(len(rows), plan, 3, groups, longest)
    return GlobalBatches(rows, list, order, TokenPlan(lengths, max_tokens) if max_tokens else plan)


def global_rows(rows: int, accumulation: int, world_size: int, **more) -> list[list[int]]:
    """The rows of each step of an epoch, over all ranks and micro-batches, in their global order."""
    steps: list[list[list[int]]] = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            batches = build_batches(ROWS, RowPlan(rows, accumulation), **more)
            batches.num_steps = len(batches)  # the second epoch
            for step in range(len(batches)):
                if rank == 0:
                    steps.append([[]] * (accumulation * world_size))
                for index, micro_batch in enumerate(next(batches)):
                    assert len(micro_batch) == rows
                    steps[step][index * world_size + rank] = micro_batch
    return [[row for part in parts for row in part] for parts in steps]


@pytest.mark.parametrize(("rows", "accumulation", "world_size"), [(4, 2, 1), (4, 1, 2), (2, 2, 2), (1, 2, 4)])
@pytest.mark.parametrize("lengths", [(), [((7 * i) % 23,) for i in ROWS]])
def test_global_batches_have_the_same_rows_under_any_split(rows, accumulation, world_size, lengths):
    grouped = {"lengths": lengths, "is_sorted": bool(lengths)}
    expected = global_rows(8, 1, 1, **grouped)
    assert global_rows(rows, accumulation, world_size, **grouped) == expected
    assert len(expected) == 6 and len({row for step in expected for row in step}) == 48


def test_global_batches_differ_by_epoch_and_resume_inside_one():
    batches = build_batches(ROWS, RowPlan(8))
    steps = [next(batches) for _ in range(12)]
    assert len(batches) == 6 and steps[:6] != steps[6:]
    for num_steps in (0, 1, 5, 6, 11):
        batches.num_steps = num_steps
        assert [next(batches) for _ in range(num_steps, 12)] == steps[num_steps:]
        assert batches.num_steps == 12


def test_grouping_by_length_brings_like_rows_together_in_mixed_order():
    lengths = [(7 * i) % 23 for i in ROWS]
    plain = global_rows(8, 1, 1)
    grouped = global_rows(8, 1, 1, lengths=[(n,) for n in lengths], is_sorted=True)

    def padding(steps):
        return sum(max(lengths[r] for r in step) - lengths[r] for step in steps for r in step)

    assert padding(grouped) < 0.5 * padding(plain)
    means = [sum(lengths[r] for r in step) for step in grouped]
    assert means != sorted(means), "batches must not come from short to long"


def test_too_few_rows_for_one_batch_is_an_error_with_the_arithmetic():
    told = "50 rows, fewer than one global batch of 64 = 16 rows x 2 .* x 2 ranks"
    with as_rank(0, 2), pytest.raises(ValueError, match=told):
        build_batches(ROWS, RowPlan(16, 2))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_evaluation_counts_each_row_once_with_as_many_batches_on_every_rank(world_size):
    seen, num_batches = [], set()
    for rank in range(world_size):
        with as_rank(rank, world_size):
            batches = list(evaluation_batches(ROWS, list, rows_per_batch=4))
        num_batches.add(len(batches))
        seen += [row for rows, real in batches for row, is_real in zip(rows, real, strict=True) if is_real]
    assert sorted(seen) == ROWS and len(num_batches) == 1
    few = list(evaluation_batches(ROWS, list, rows_per_batch=4, max_rows=8))
    assert [rows for rows, _ in few] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    cut = [
        (rows, is_real.tolist())
        for rows, is_real in evaluation_batches(ROWS, list, rows_per_batch=5, max_rows=8)
    ]
    assert cut == [([0, 1, 2, 3, 4], [True] * 5), ([5, 6, 7, 0, 0], [True] * 3 + [False] * 2)]


# ---- plans of micro-batches: complete, under the cap, even over the ranks


def cost_of(items, item_lengths, is_packed, shared=()):
    lengths = [length for item in items for length in item_lengths[item]]
    if not is_packed:
        return len(lengths) * max(lengths, default=0)
    groups = {shared[item] for item in items} if shared else ()
    return sum(lengths) - sum(shared[i][1] for i in items if shared) + sum(once for _, once in groups)


@st.composite
def problems(draw):
    """Item lengths, a cap that every single item fits under in either layout, and ranks."""
    length = st.integers(0, draw(st.sampled_from([3, 40, 300])))
    num_sequences = draw(st.sampled_from([(1, 1), (2, 2), (0, 3)]))
    item = st.lists(length, min_size=num_sequences[0], max_size=num_sequences[1])
    num_ranks, turns = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    item_lengths = draw(st.lists(item, min_size=num_ranks * turns, max_size=num_ranks * turns))
    least = max(1, *(cost_of([i], item_lengths, False) for i in range(len(item_lengths))))
    shared = []
    if draw(st.booleans()):  # groups share what their shortest has
        groups = draw(st.lists(st.integers(0, 5), min_size=len(item_lengths), max_size=len(item_lengths)))
        of_groups = [[sum(x) for x, g in zip(item_lengths, groups, strict=True) if g == n] for n in groups]
        shared = [(group, min(of_group)) for group, of_group in zip(groups, of_groups, strict=True)]
    return item_lengths, least + draw(st.integers(0, 4 * least)), num_ranks, shared


@pytest.mark.parametrize("is_packed", [False, True])
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_plan_micro_batches_is_complete_even_and_under_the_cap(is_packed, problem):
    item_lengths, max_tokens, num_ranks, shared = problem
    options = {"num_ranks": num_ranks, "is_packed": is_packed, "max_tokens": max_tokens, "shared": shared}
    plan = plan_micro_batches(item_lengths, **options)
    assert plan == plan_micro_batches([tuple(lengths) for lengths in item_lengths], **options)
    assert len(plan) == num_ranks and len({len(of_rank) for of_rank in plan}) == 1
    items = [items for of_rank in plan for items in of_rank]
    assert all(items) and sorted(sum(items, [])) == list(range(len(item_lengths)))
    costs = [[cost_of(items, item_lengths, is_packed, shared) for items in of_rank] for of_rank in plan]
    for group in items if is_packed and shared else ():
        changes = sum(shared[a][0] != shared[b][0] for a, b in pairwise(group))
        assert changes + 1 == len({shared[item][0] for item in group}), "a group's items stand together"
    assert max(map(max, costs)) <= max_tokens
    # Turns in descending cost: what runs at the same time on all ranks is next to one another in cost.
    turns = list(zip(*costs, strict=True))
    assert all(min(turn) >= max(after) for turn, after in pairwise(turns))


@pytest.mark.parametrize(
    ("item_lengths", "options", "expected"),
    [
        # dealt there and back: 9 + 6 + 5 and 8 + 7 + 4
        (
            [[9], [8], [7], [6], [5], [4]],
            {"num_ranks": 2, "max_tokens": 9},
            [[[0], [3], [4]], [[1], [2], [5]]],
        ),
        # balanced within the least number: 5 + 1 twice
        ([[5], [5], [1], [1]], {"max_tokens": 11}, [[[0, 2], [1, 3]]]),
        # an item's sequences count together: 5 + 5, 7 + 2
        ([[3, 4], [1, 1], [2, 3], [5, 0]], {"max_tokens": 10}, [[[2, 3], [0, 1]]]),
        # balanced it would be 3 + 2 + 2 = 7 and 3 + 2 = 5
        ([[3], [3], [2], [2], [2]], {"max_tokens": 6}, [[[0, 1], [2, 3, 4]]]),
        # two groups of 3 + 1 + 1: each whole, and its 3 counts once
        (
            [[4], [4], [4], [4]],
            {"max_tokens": 5, "shared": [(0, 3), (1, 3), (0, 3), (1, 3)]},
            [[[0, 2], [1, 3]]],
        ),
        # a group above the cap is cut evenly, and has its 3 in each part
        ([[4]] * 4, {"max_tokens": 6, "shared": [(0, 3)] * 4}, [[[0, 1], [2, 3]]]),
        # as it is for ranks that would have nothing
        ([[4]] * 4, {"max_tokens": 9, "num_ranks": 2, "shared": [(0, 3)] * 4}, [[[0, 1]], [[2, 3]]]),
    ],
)
def test_plan_micro_batches_packed_by_hand(item_lengths, options, expected):
    assert plan_micro_batches(item_lengths, **options, is_packed=True) == expected


@pytest.mark.parametrize(
    ("item_lengths", "options", "expected"),
    [
        # neighbours by length, up to the cap
        ([[10], [100], [90], [12]], {"max_tokens": 200}, [[[1, 2], [0, 3]]]),
        # up to OVERHEAD_TOKENS of padding are cheaper than a pass
        ([[100], [100 - OVERHEAD_TOKENS]], {"max_tokens": 400}, [[[0, 1]]]),
        ([[100], [99 - OVERHEAD_TOKENS]], {"max_tokens": 400}, [[[0], [1]]]),
        # both sequences of a pair are as long as the longest of the micro-batch
        ([[50, 30], [50, 50]], {"max_tokens": 200}, [[[0, 1]]]),
        ([[50, 30], [50, 50]], {"max_tokens": 199}, [[[0], [1]]]),
        # one micro-batch is no two ranks' work
        ([[5], [5]], {"num_ranks": 2, "max_tokens": 100}, [[[0]], [[1]]]),
    ],
)
def test_plan_micro_batches_padded_by_hand(item_lengths, options, expected):
    assert plan_micro_batches(item_lengths, **options) == expected


@pytest.mark.parametrize(
    ("item_lengths", "options", "message"),
    [
        (
            [[5], [70], [60]],
            {"max_tokens": 64},
            "a sequence of 70 tokens is longer than --max_tokens_per_micro_batch 64; raise it to at least 70",
        ),
        ([[5, 5], [50, 30]], {"max_tokens": 99}, "a pair of 100 tokens, padding included, is longer than"),
        ([[5]] * 3, {"num_ranks": 4, "max_tokens": 10}, "3 items do not fill a micro-batch on each of 4"),
    ],
)
def test_plan_micro_batches_errors_name_the_numbers(item_lengths, options, message):
    with pytest.raises(ValueError) as error:
        plan_micro_batches(item_lengths, **options)
    assert message in str(error.value)


# ---- groups: the pairs of a prompt


def test_groups_are_kept_together_by_hand():
    groups = [[0, 1, 2], [3, 4], [5], [6, 7, 8], [9], [10, 11, 12, 13, 14]]
    # Of 4: the first three and the first single one; two and the next single one, then the beginning of the
    # next, for none has one; and so on.
    counts = np.array([len(group) for group in groups])
    assert keep_together(counts, 4).tolist() == [0, 1, 2, 5, 3, 4, 9, 6, 7, 8, 10, 11, 12, 13, 14]
    assert keep_together(np.ones(9, int), 4).tolist() == list(range(9))


GROUPS = [0] * 7 + [1, 2, 2, 3, 3, 3] + [4] * 3 + list(range(5, 20))  # 31 rows


def draw_epochs(rows: int, world_size: int, num_steps: int, sources=(), **more) -> list[list[dict]]:
    """The rows of the first steps over all ranks, each with its weight."""
    steps: list[list[dict]] = [[] for _ in range(num_steps)]
    for rank in range(world_size):
        with as_rank(rank, world_size):
            data = [{"row": i} for i in range(len(GROUPS))]
            batches = build_batches(data, RowPlan(rows), groups=Groups(GROUPS, 3, sources), **more)
            for step in steps:
                step += [row for micro_batch in next(batches) for row in micro_batch]
    return steps


@pytest.mark.parametrize("by_length", [False, True])
def test_every_epoch_draws_anew_and_a_prompts_pairs_stay_in_one_batch(by_length):
    lengths = [((7 * i) % 23,) for i in range(len(GROUPS))]
    more = {"lengths": lengths, "is_sorted": by_length}
    steps = draw_epochs(9, 1, 15, **more)  # 27 rows an epoch: 3 steps
    epochs = [sum(steps[i : i + 3], []) for i in range(0, 15, 3)]
    seen = [sorted(row["row"] for row in epoch) for epoch in epochs]
    assert all(len(set(rows)) == 27 and set(range(7, 31)) < set(rows) for rows in seen), (
        "the small ones whole"
    )
    drawn = [tuple(row for row in rows if row < 7) for rows in seen]
    assert {len(rows) for rows in drawn} == {3} and len(set(drawn)) > 1
    assert len(set(sum(drawn, ()))) > 3, "other pairs come to be seen"
    for row in sum(epochs, []):
        size = min(GROUPS.count(GROUPS[row["row"]]), 3)
        assert row["weight"] == 1 / size
    for step in steps:
        numbers = [GROUPS[row["row"]] for row in step]
        assert all(numbers.count(n) == min(GROUPS.count(n), 3) for n in set(numbers)), "none is cut"
    # Two ranks draw alike, and so does a run that begins in the second epoch.
    assert [sorted(r["row"] for r in s) for s in draw_epochs(3, 3, 15, **more)] == [
        sorted(r["row"] for r in s) for s in steps
    ]
    order = build_batches(ROWS[:31], RowPlan(9), groups=Groups(GROUPS, 3), **more).order
    assert order.rows_of(4) == [row["row"] for row in steps[4]]


def test_epoch_order_rows_until_equals_what_epochs_draw():
    order = EpochOrder(31, RowPlan(9), 3, Groups(GROUPS, 3))
    read: set[int] = set()
    for step in range(7):
        read.update(order.rows_of(step))
        assert order.rows_until(step + 1) == sorted(read)


SOURCES = [(13, 2.0), (3, 0.5), (15, 1.4)]  # of the rows of GROUPS
WEIGHTED_ROWS = 2 * 9 + round(0.5 * 3) + round(1.4 * 15)  # at most 3 rows of a group


def test_epoch_has_as_many_rows_of_a_source_as_its_weight_says():
    order = EpochOrder(50, RowPlan(1), 3, Groups(range(50), sources=[(10, 3.0), (20, 0.5), (20, 1.25)]))
    assert len(order) == 30 + 10 + 25
    epochs = [order.epoch(epoch).tolist() for epoch in range(40)]
    for rows in epochs:
        assert len(rows) == 65 and all(rows.count(row) == 3 for row in range(10))
        assert {rows.count(row) for row in range(10, 30)} == {0, 1}
        assert {rows.count(row) for row in range(30, 50)} == {1, 2}
        assert sum(row < 30 for row in rows) == 40
    assert len(set(map(tuple, epochs))) == 40
    assert {row for rows in epochs[:9] for row in rows} == set(range(50)), "another half in each epoch"
    # An epoch may have as many rows as the data, and still not each of them.
    order = EpochOrder(20, RowPlan(1), 3, Groups(range(20), sources=[(10, 1.5), (10, 0.5)]))
    assert order.rows_until(20) == sorted(set(order.epoch(0).tolist())) != list(range(20))


def test_weights_keep_groups_together_and_the_rows_of_all_ranks():
    more = {"sources": SOURCES}
    steps = draw_epochs(9, 1, 12, **more)
    order = EpochOrder(31, RowPlan(1), 3, Groups(GROUPS, 3, SOURCES))
    assert len(order) == WEIGHTED_ROWS
    of_ranks, of_one = (
        [sorted(step, key=itemgetter("row")) for step in s] for s in (draw_epochs(3, 3, 12, **more), steps)
    )
    assert of_ranks == of_one
    rows = order.epoch(0).tolist()
    places = [[i for i, row in enumerate(rows) if row == of_pair] for of_pair in (8, 9)]
    assert len(places[0]) == 2 and [i + 1 for i in places[0]] == places[1], "a pair is together, twice"
    assert all(row["weight"] == 1 / min(GROUPS.count(GROUPS[row["row"]]), 3) for row in sum(steps, []))


def test_groups_of_one_row_change_nothing():
    plain = build_batches(ROWS, RowPlan(8))
    grouped = build_batches(ROWS, RowPlan(8), groups=Groups(ROWS, 1))
    assert [next(plain) for _ in range(9)] == [next(grouped) for _ in range(9)]


def bytes_of(number: int) -> np.ndarray:
    """What so many pairs keep, and what they take at most while an epoch is drawn."""
    generator, rows = np.random.default_rng(0), [{}] * number
    numbers = generator.integers(0, number // 3, number)
    tracemalloc.start()
    try:
        order = EpochOrder(number, RowPlan(64), groups=Groups(numbers, 2))
        lengths = generator.integers(9, 300, (number, 2)).astype(np.int32)
        plan = TokenPlan(lengths, 10**6, shared_lengths=np.zeros(number, np.int32))
        batches = GlobalBatches(rows, list, order, plan)
        next(batches)
        return np.array(tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()


def test_a_million_pairs_take_sixty_mebibytes():
    """With the lengths of their answers, groups, and an epoch's order; more while an epoch is drawn."""
    bytes_of(1_000)  # imports
    kept, peak = (bytes_of(40_000) - bytes_of(20_000)) * 50 / 2**20
    assert kept < 40 and peak < 75
