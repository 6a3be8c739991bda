"""Plans of micro-batches: complete, under the cap, even over the ranks."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data.global_batches import OVERHEAD_TOKENS, plan_micro_batches


def cost_of(items, item_lengths, is_packed):
    lengths = [length for item in items for length in item_lengths[item]]
    return sum(lengths) if is_packed else len(lengths) * max(lengths, default=0)


@st.composite
def problems(draw):
    """Item lengths, a cap that every single item fits under in either layout, and ranks."""
    length = st.integers(0, draw(st.sampled_from([3, 40, 300])))
    num_sequences = draw(st.sampled_from([(1, 1), (2, 2), (0, 3)]))
    item = st.lists(length, min_size=num_sequences[0], max_size=num_sequences[1])
    num_ranks, turns = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    item_lengths = draw(st.lists(item, min_size=num_ranks * turns, max_size=num_ranks * turns))
    least = max(1, *(cost_of([i], item_lengths, False) for i in range(len(item_lengths))))
    return item_lengths, least + draw(st.integers(0, 4 * least)), num_ranks


@pytest.mark.parametrize("is_packed", [False, True])
@settings(max_examples=60, deadline=None)
@given(problem=problems())
def test_every_plan_is_complete_even_and_under_the_cap(is_packed, problem):
    item_lengths, max_tokens, num_ranks = problem
    options = {"num_ranks": num_ranks, "is_packed": is_packed, "max_tokens": max_tokens}
    plan = plan_micro_batches(item_lengths, **options)
    assert plan == plan_micro_batches([tuple(lengths) for lengths in item_lengths], **options)
    assert len(plan) == num_ranks and len({len(of_rank) for of_rank in plan}) == 1
    items = [items for of_rank in plan for items in of_rank]
    assert all(items) and sorted(sum(items, [])) == list(range(len(item_lengths)))
    costs = [[cost_of(items, item_lengths, is_packed) for items in of_rank] for of_rank in plan]
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
    ],
)
def test_packed_by_hand(item_lengths, options, expected):
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
def test_padded_by_hand(item_lengths, options, expected):
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
def test_errors_name_the_numbers(item_lengths, options, message):
    with pytest.raises(ValueError) as error:
        plan_micro_batches(item_lengths, **options)
    assert message in str(error.value)
