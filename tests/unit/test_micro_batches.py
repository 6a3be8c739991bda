"""Plans of micro-batches: complete, under the cap, even over the ranks, as cheap as brute force finds."""

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data import micro_batches
from common.data.micro_batches import OVERHEAD_TOKENS, SortedItems, padding_fraction, plan_micro_batches

few_examples = settings(max_examples=40, deadline=None)


def cost_of(items, item_lengths, is_packed):
    lengths = [length for item in items for length in item_lengths[item]]
    return sum(lengths) if is_packed else len(lengths) * max(lengths, default=0)


def costs_of(plan, item_lengths, is_packed=False):
    return [[cost_of(items, item_lengths, is_packed) for items in of_rank] for of_rank in plan]


def by_length(item_lengths):
    longest = [max(lengths, default=0) for lengths in item_lengths]
    return sorted(range(len(longest)), key=lambda item: (-longest[item], item))


@st.composite
def problems(draw, max_items=24, max_length=300, max_ranks=4):
    """Item lengths and a cap that every single item fits under in either layout."""
    length = st.integers(0, draw(st.sampled_from([3, 40, max_length])))
    num_sequences = draw(st.sampled_from([(1, 1), (2, 2), (0, 3)]))
    item = st.lists(length, min_size=num_sequences[0], max_size=num_sequences[1])
    item_lengths = draw(st.lists(item, min_size=1, max_size=max_items))
    least = max(1, *(cost_of([i], item_lengths, False) for i in range(len(item_lengths))))
    max_tokens = least + draw(st.integers(0, 4 * least))
    return item_lengths, max_tokens, draw(st.integers(1, max_ranks))


# What holds for every plan


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_capped", [False, True])
@few_examples
@given(problem=problems(), num_per_rank=st.integers(0, 3))
def test_every_plan_is_complete_even_and_under_the_cap(is_packed, is_capped, problem, num_per_rank):
    item_lengths, max_tokens, num_ranks = problem
    num_per_rank = num_per_rank if is_capped else max(num_per_rank, 1)
    options = {"num_ranks": num_ranks, "is_packed": is_packed, "num_per_rank": num_per_rank}
    options["max_tokens"] = max_tokens if is_capped else 0
    try:
        plan = plan_micro_batches(item_lengths, **options)
    except ValueError as error:
        assert "do not fill" in str(error)
        assert len(item_lengths) < num_ranks * num_per_rank or len(item_lengths) % num_ranks
        return
    assert plan == plan_micro_batches([tuple(lengths) for lengths in item_lengths], **options)
    assert len(plan) == num_ranks
    numbers = {len(of_rank) for of_rank in plan}
    assert len(numbers) == 1 and min(numbers) >= max(num_per_rank, 1)
    assert is_capped or numbers == {num_per_rank}
    items = [items for of_rank in plan for items in of_rank]
    assert all(items)
    assert sorted(sum(items, [])) == list(range(len(item_lengths)))
    if is_capped:
        assert max(sum(costs_of(plan, item_lengths, is_packed), [])) <= max_tokens
    # Turns in descending cost: what runs at the same time on all ranks is next to one another in cost.
    turns = list(zip(*costs_of(plan, item_lengths, is_packed), strict=True))
    assert all(min(turn) >= max(after) for turn, after in pairwise(turns))


def test_a_plan_is_dealt_there_and_back():
    plan = plan_micro_batches([[9], [8], [7], [6], [5], [4]], num_ranks=2, max_tokens=9, is_packed=True)
    assert plan == [[[0], [3], [4]], [[1], [2], [5]]]  # 9 + 6 + 5 and 8 + 7 + 4


# Flat


def first_fit_decreasing(costs, max_tokens):
    bins = []
    for cost in sorted(costs, reverse=True):
        for items in bins:
            if sum(items) + cost <= max_tokens:
                items.append(cost)
                break
        else:
            bins.append([cost])
    return bins


@few_examples
@given(problems())
def test_flat_needs_no_more_than_first_fit_decreasing(problem):
    item_lengths, max_tokens, num_ranks = problem
    num_bins = len(first_fit_decreasing([sum(lengths) for lengths in item_lengths], max_tokens))
    needed = -(-num_bins // num_ranks) * num_ranks
    if needed > len(item_lengths):
        with pytest.raises(ValueError, match=f"do not fill {needed} micro-batches"):
            plan_micro_batches(item_lengths, num_ranks=num_ranks, max_tokens=max_tokens, is_packed=True)
        return
    plan = plan_micro_batches(item_lengths, num_ranks=num_ranks, max_tokens=max_tokens, is_packed=True)
    assert len(plan[0]) * num_ranks == needed


@few_examples
@given(problems(), st.integers(1, 4))
def test_flat_without_a_cap_is_balanced(problem, num_per_rank):
    item_lengths, _, num_ranks = problem
    num_bins = num_ranks * num_per_rank
    if num_bins > len(item_lengths):
        return
    plan = plan_micro_batches(item_lengths, num_ranks=num_ranks, is_packed=True, num_per_rank=num_per_rank)
    costs = sum(costs_of(plan, item_lengths, True), [])
    largest = max(sum(lengths) for lengths in item_lengths)
    # Graham 1969: the last item of the dearest bin went where the least was.
    assert max(costs) <= sum(costs) / num_bins + (1 - 1 / num_bins) * largest + 1e-9
    assert max(costs) - min(costs) <= largest


def test_flat_balances_within_the_least_number():
    assert plan_micro_batches([[5], [5], [1], [1]], max_tokens=11, is_packed=True) == [[[0, 2], [1, 3]]]


def test_flat_counts_what_an_item_has_together():
    item_lengths = [[3, 4], [1, 1], [2, 3], [5, 0]]
    plan = plan_micro_batches(item_lengths, max_tokens=10, is_packed=True)
    assert plan == [[[2, 3], [0, 1]]]  # 5 + 5, 7 + 2


def test_flat_keeps_first_fit_where_balancing_would_break_the_cap():
    # Balanced: 3 + 2 + 2 = 7 and 3 + 2 = 5.
    plan = plan_micro_batches([[3], [3], [2], [2], [2]], max_tokens=6, is_packed=True)
    assert plan == [[[0, 1], [2, 3, 4]]]


def test_flat_cuts_bins_of_first_fit_until_there_are_enough():
    # First-fit makes 8 full bins: 6, 3 + 3 four times and 2 + 2 + 2 three times. Balanced over 9 bins, 8 have
    # 3 + 2, and one 2 is left. A bin of a single item cannot be cut.
    item_lengths = [[6]] + [[3]] * 8 + [[2]] * 9
    plan = plan_micro_batches(item_lengths, num_ranks=9, max_tokens=6, is_packed=True)
    assert sorted(sum(costs_of(plan, item_lengths, True), [])) == [3, 3, 6, 6, 6, 6, 6, 6, 6]
    assert sorted(items for of_rank in plan for items in of_rank)[:4] == [[0], [1], [2], [3, 4]]


# Padded


def cheapest_by_brute_force(item_lengths, *, max_tokens, num_ranks, num_least, is_exact):
    """Least cost + overhead over all cuts of the ordered items, or None where no cuts are allowed."""
    order, num_items = by_length(item_lengths), len(item_lengths)
    best = None
    for count in range(max(num_least, 1), (num_least if is_exact else num_items) + 1):
        for inner in combinations(range(1, num_items), count - 1) if count % num_ranks == 0 else ():
            cuts = (0, *inner, num_items)
            costs = [cost_of(order[i:j], item_lengths, False) for i, j in pairwise(cuts)]
            if not max_tokens or max(costs) <= max_tokens:
                total = sum(costs) + OVERHEAD_TOKENS * count
                best = total if best is None else min(best, total)
    return best


def total_cost(plan, item_lengths):
    costs = sum(costs_of(plan, item_lengths), [])
    return sum(costs) + OVERHEAD_TOKENS * len(costs)


@pytest.mark.parametrize("is_capped", [False, True])
@few_examples
@given(problem=problems(max_items=8, max_ranks=3), num_per_rank=st.integers(0, 2))
def test_padded_is_as_cheap_as_brute_force_finds(is_capped, problem, num_per_rank):
    item_lengths, max_tokens, num_ranks = problem
    num_per_rank = num_per_rank if is_capped else max(num_per_rank, 1)
    options = {"max_tokens": max_tokens if is_capped else 0, "num_ranks": num_ranks}
    least = cheapest_by_brute_force(
        item_lengths, **options, num_least=num_ranks * num_per_rank, is_exact=not is_capped
    )
    if least is None:
        with pytest.raises(ValueError, match="do not fill"):
            plan_micro_batches(item_lengths, **options, num_per_rank=num_per_rank)
        return
    plan = plan_micro_batches(item_lengths, **options, num_per_rank=num_per_rank)
    assert total_cost(plan, item_lengths) == least


def cheapest_by_table(item_lengths, max_tokens, num_ranks):
    """The same least cost, by a plain table over (items, micro-batches modulo ranks)."""
    order, num_items = by_length(item_lengths), len(item_lengths)
    longest = [max(item_lengths[item], default=0) for item in order]
    before = [0, *accumulate(len(item_lengths[item]) for item in order)]
    table = [[float("inf")] * num_ranks for _ in range(num_items + 1)]
    table[0][0] = 0
    for end in range(1, num_items + 1):
        for start in range(end):
            cost = longest[start] * (before[end] - before[start])
            if cost <= max_tokens:
                for r in range(num_ranks):
                    value = table[start][r - 1] + cost + OVERHEAD_TOKENS
                    table[end][r] = min(table[end][r], value)
    return table[num_items][0]


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 5), st.sampled_from([300, 900, 4000]))
def test_padded_is_as_cheap_as_a_plain_table_for_many_items(draw, num_ranks, max_tokens):
    num_items = draw.randint(40, 80) // num_ranks * num_ranks
    item_lengths = [[draw.randint(1, 150) for _ in range(draw.choice([1, 2]))] for _ in range(num_items)]
    plan = plan_micro_batches(item_lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    assert total_cost(plan, item_lengths) == cheapest_by_table(item_lengths, max_tokens, num_ranks)


@few_examples
@given(st.lists(st.integers(0, 4), min_size=2, max_size=8), st.sampled_from([0, 4, 8, 12]))
def test_cuts_into_every_number_of_runs_are_the_cheapest(lengths, max_tokens):
    """Few different lengths make ties: most numbers of runs are then at no price the only best."""
    items = SortedItems([[length] for length in lengths], max_tokens)
    fewest, most = items.fewest_cuts(), list(range(len(lengths) + 1))
    for count in range(1, len(lengths) + 1):
        every = [(0, *inner, len(lengths)) for inner in combinations(range(1, len(lengths)), count - 1)]
        costs = [
            sum(items.cost([i, j]) for i, j in pairwise(cuts))
            for cuts in every
            if not max_tokens or all(items.cost([i, j]) <= max_tokens for i, j in pairwise(cuts))
        ]
        assert bool(costs) == (count >= len(fewest) - 1)
        if costs:
            cuts = items.cuts_of_count(count, fewest, most)
            assert len(cuts) == count + 1 and cuts == sorted(set(cuts))
            assert not max_tokens or all(items.cost([i, j]) <= max_tokens for i, j in pairwise(cuts))
            assert items.cost(cuts) == min(costs)


@few_examples
@given(problems())
def test_padded_is_never_worse_than_filling_up_in_order(problem):
    item_lengths, max_tokens, _ = problem
    greedy = []
    for item in by_length(item_lengths):
        if greedy and cost_of([*greedy[-1], item], item_lengths, False) <= max_tokens:
            greedy[-1].append(item)
        else:
            greedy.append([item])
    plan = plan_micro_batches(item_lengths, max_tokens=max_tokens)
    assert total_cost(plan, item_lengths) <= total_cost([greedy], item_lengths)


def test_padded_cuts_where_padding_costs_more_than_a_pass():
    # Together 4 x 100. Cut behind the long one: 100 + 3 x 10 + one pass more, 64.
    assert plan_micro_batches([[10], [100], [10], [10]], max_tokens=400) == [[[1], [0, 2, 3]]]
    # Together 2 x 100; apart 100 + 40 + 64. A pass is dearer than 60 of padding.
    assert plan_micro_batches([[40], [100]], max_tokens=400) == [[[0, 1]]]
    assert plan_micro_batches([[35], [100]], max_tokens=400) == [[[1], [0]]]


def test_a_pass_costs_what_the_constant_says(monkeypatch):
    monkeypatch.setattr(micro_batches, "OVERHEAD_TOKENS", 66)
    assert plan_micro_batches([[35], [100]], max_tokens=400) == [[[0, 1]]]


def test_padded_makes_a_multiple_of_the_ranks():
    item_lengths = [[50]] * 6
    assert len(plan_micro_batches(item_lengths, max_tokens=100)[0]) == 3
    plan = plan_micro_batches(item_lengths, num_ranks=2, max_tokens=100)
    assert costs_of(plan, item_lengths) == [[100, 50], [100, 50]]


def test_padded_pairs_cost_both_sides_at_the_longest():
    item_lengths = [[10, 90], [80, 80], [30, 20]]
    plan = plan_micro_batches(item_lengths, max_tokens=360)
    assert plan == [[[0, 1], [2]]]  # 4 x 90 and 2 x 30
    assert costs_of(plan, item_lengths) == [[360, 60]]
    assert plan_micro_batches(item_lengths, max_tokens=359) != plan


def test_num_per_rank_is_the_least_number_beside_a_cap():
    assert plan_micro_batches([[5], [5]], max_tokens=100) == [[[0, 1]]]
    assert plan_micro_batches([[5], [5]], max_tokens=100, num_per_rank=2) == [[[0], [1]]]
    assert plan_micro_batches([[5], [5]], max_tokens=100, num_per_rank=2, is_packed=True) == [[[0], [1]]]
    assert len(plan_micro_batches([[5]] * 4, max_tokens=5, num_per_rank=2)[0]) == 4


# Padding and errors


def test_padding_fraction():
    item_lengths = [[4], [2], [3], [1, 2]]
    assert padding_fraction([[[0, 1]], [[2, 3]]], item_lengths) == pytest.approx(1 - 12 / (8 + 9))
    assert padding_fraction([[[0]], [[1]]], item_lengths) == 0
    assert padding_fraction([[[0]]], [[0]]) == 0


@pytest.mark.parametrize(
    ("item_lengths", "options", "message"),
    [
        (
            [[5], [70], [60]],
            {"max_tokens": 64},
            "a sequence of 70 tokens is longer than --max_tokens_per_micro_batch 64; raise it to at least 70",
        ),
        (
            [[5, 5], [50, 30]],
            {"max_tokens": 99},
            "a pair of 100 tokens, padding included, is longer than --max_tokens_per_micro_batch 99; "
            "raise it to at least 100",
        ),
        (
            [[5, 5], [50, 30]],
            {"max_tokens": 79, "is_packed": True},
            "a pair of 80 tokens, laid end to end, is longer than --max_tokens_per_micro_batch 79; "
            "raise it to at least 80",
        ),
        (
            [[5, 5, 5]],
            {"max_tokens": 14, "is_packed": True},
            "a group of 3 sequences of 15 tokens, laid end to end, is longer than "
            "--max_tokens_per_micro_batch 14; raise it to at least 15",
        ),
        (
            [[5], [5], [5]],
            {"num_ranks": 4, "max_tokens": 10},
            "3 items do not fill 4 micro-batches, 1 on each of 4 ranks: give at least 4 items a step",
        ),
        (
            [[5]] * 5,
            {"num_ranks": 2, "num_per_rank": 3},
            "5 items do not fill 6 micro-batches, 3 on each of 2 ranks: give at least 6 items a step",
        ),
        # Each of three items needs a micro-batch of its own, and that is no multiple of two ranks.
        ([[5]] * 3, {"num_ranks": 2, "max_tokens": 5}, "3 items do not fill 4 micro-batches, 2 on each"),
        (
            [[5]] * 3,
            {"num_ranks": 2, "max_tokens": 5, "is_packed": True},
            "3 items do not fill 4 micro-batches",
        ),
        ([], {"max_tokens": 5}, "0 items do not fill 1 micro-batches"),
        ([[5]], {}, "give max_tokens or num_per_rank"),
        ([[5]], {"num_ranks": 0, "max_tokens": 5}, "num_ranks 0 must be at least 1"),
        ([[5]], {"max_tokens": -5}, "max_tokens -5 and num_per_rank 0 at least 0"),
    ],
)
def test_errors_name_the_numbers(item_lengths, options, message):
    with pytest.raises(ValueError) as error:
        plan_micro_batches(item_lengths, **options)
    assert message in str(error.value)
