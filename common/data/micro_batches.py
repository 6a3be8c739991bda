"""Which items go through the model together, on which rank. PURE: standard library only.

Every rank computes the same plan from the same lengths: nothing is drawn, ties go by index, and so all ranks
make the same number of passes.

# An item is what must stay together: a row of SFT, a pair. Its lengths are those of its sequences.
"""

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate, pairwise

# What a pass costs beside its tokens (launches, hooks), in tokens: padding up to it is cheaper than another
# pass. From 64 to 256 bench_train.py's rates are alike on a CPU; 16 and 512 are slower.
OVERHEAD_TOKENS = 64

_NAMES = {1: "sequence", 2: "pair"}


def plan_micro_batches(
    item_lengths: Sequence[Sequence[int]],
    *,
    num_ranks: int = 1,
    max_tokens: int = 0,
    is_packed: bool = False,
    num_per_rank: int = 0,
) -> list[list[list[int]]]:
    """plan[rank][micro_batch] = item indexes: every item once, each rank as many micro-batches, none empty.

    A micro-batch costs the sum of its lengths where `is_packed` (laid end to end), else its number of
    sequences x the longest (padded). With `max_tokens` no cost is above it: flat micro-batches are as few
    as first-fit decreasing makes them, then balanced; padded ones hold neighbours by length, cut where
    the sum of cost + OVERHEAD_TOKENS is least. `num_per_rank` is then the least number per rank; without
    `max_tokens` it is the number. The j-th micro-batches of the ranks cost alike, for ranks wait for one
    another. The dearest come first: what does not fit into memory fails in the first pass.

    Raises ValueError when an item alone is above `max_tokens`, or the items are too few. They never are when
    their number is a multiple of `num_ranks` and at least num_ranks x num_per_rank.
    """
    _check_options(item_lengths, num_ranks, max_tokens, is_packed, num_per_rank)
    options = (num_ranks, max_tokens, num_ranks * num_per_rank)
    if is_packed:
        micro_batches = _flat_micro_batches([sum(lengths) for lengths in item_lengths], *options)
    else:
        micro_batches = _padded_micro_batches(item_lengths, *options)
    return _deal(micro_batches, item_lengths, num_ranks, is_packed)


def padding_fraction(plan: Sequence[Sequence[Sequence[int]]], item_lengths: Sequence[Sequence[int]]) -> float:
    """Return the share of padding among all positions when the plan's micro-batches are padded: [0, 1)."""
    micro_batches = [micro_batch for of_rank in plan for micro_batch in of_rank]
    num_positions = sum(_cost(micro_batch, item_lengths, False) for micro_batch in micro_batches)
    num_tokens = sum(_cost(micro_batch, item_lengths, True) for micro_batch in micro_batches)
    return 1 - num_tokens / num_positions if num_positions else 0.0


def _cost(items: Sequence[int], item_lengths: Sequence[Sequence[int]], is_packed: bool) -> int:
    lengths = [length for item in items for length in item_lengths[item]]
    return sum(lengths) if is_packed else len(lengths) * max(lengths, default=0)


def _check_options(
    item_lengths: Sequence[Sequence[int]], num_ranks: int, max_tokens: int, is_packed: bool, num_per_rank: int
) -> None:
    if num_ranks < 1 or max_tokens < 0 or num_per_rank < 0:
        raise ValueError(
            f"num_ranks {num_ranks} must be at least 1, max_tokens {max_tokens} and num_per_rank "
            f"{num_per_rank} at least 0"
        )
    if not max_tokens and not num_per_rank:
        raise ValueError("give max_tokens or num_per_rank: nothing says how many micro-batches to make")
    _check_enough(len(item_lengths), num_ranks * max(num_per_rank, 1), num_ranks)
    costs = [_cost([item], item_lengths, is_packed) for item in range(len(item_lengths))]
    num_tokens = max(costs)
    if max_tokens and num_tokens > max_tokens:
        num_sequences = len(item_lengths[costs.index(num_tokens)])
        name = _NAMES.get(num_sequences, f"group of {num_sequences} sequences")
        layout = "" if num_sequences == 1 else ", laid end to end," if is_packed else ", padding included,"
        raise ValueError(
            f"a {name} of {num_tokens} tokens{layout} is longer than --max_tokens_per_micro_batch "
            f"{max_tokens}; raise it to at least {num_tokens}"
        )


def _check_enough(num_items: int, num_needed: int, num_ranks: int) -> None:
    if num_items < num_needed:
        raise ValueError(
            f"{num_items} items do not fill {num_needed} micro-batches, {num_needed // num_ranks} on each of "
            f"{num_ranks} ranks: give at least {num_needed} items a step"
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _deal(
    micro_batches: list[list[int]], item_lengths: Sequence[Sequence[int]], num_ranks: int, is_packed: bool
) -> list[list[list[int]]]:
    """Deal in descending cost, there and back over the ranks, so that their sums come out alike too."""
    ordered = sorted(
        (sorted(micro_batch) for micro_batch in micro_batches),
        key=lambda micro_batch: (-_cost(micro_batch, item_lengths, is_packed), micro_batch),
    )
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for i, micro_batch in enumerate(ordered):
        turn, place = divmod(i, num_ranks)
        plan[place if turn % 2 == 0 else num_ranks - 1 - place].append(micro_batch)
    return plan


# ---------------------------------------------------------------------------------------------------------
# Flat: bin packing, then balance
# ---------------------------------------------------------------------------------------------------------


def _flat_micro_batches(costs: list[int], num_ranks: int, max_tokens: int, num_least: int) -> list[list[int]]:
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    if not max_tokens:
        return _balance(order, costs, num_least)
    bins = _first_fit(order, costs, max_tokens)
    num_bins = max(_round_up(len(bins), num_ranks), num_least)
    _check_enough(len(costs), num_bins, num_ranks)
    balanced = _balance(order, costs, num_bins)
    if max(sum(costs[item] for item in items) for items in balanced) <= max_tokens:
        return balanced
    # Bins this full are balanced well enough: the dearest are cut in two until there are enough.
    heap = [_dearest_first(items, costs) for items in bins]
    heapq.heapify(heap)
    while len(heap) < num_bins:
        *_, dearest = heapq.heappop(heap)
        for items in _balance(dearest, costs, 2):
            heapq.heappush(heap, _dearest_first(items, costs))
    return [items for *_, items in heap]


def _dearest_first(items: list[int], costs: list[int]) -> tuple[bool, int, list[int]]:
    """Return a key of a heap; a single item comes last, for it cannot be cut."""
    return len(items) == 1, -sum(costs[item] for item in items), items


def _first_fit(order: list[int], costs: list[int], max_tokens: int) -> list[list[int]]:
    """Put each item into the first bin with room; in descending order the bins are nearly the fewest."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item in order:
        cost = costs[item]
        for i, room in enumerate(rooms):
            if cost <= room:
                bins[i].append(item)
                rooms[i] -= cost
                break
        else:
            bins.append([item])
            rooms.append(max_tokens - cost)
    return bins


def _balance(order: list[int], costs: list[int], num_bins: int) -> list[list[int]]:
    """Put each item into the bin with the least so far (longest processing time first); none stays empty."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    # The number of items comes second, so that items of cost 0 go to empty bins first.
    heap = [(0, 0, i) for i in range(num_bins)]
    for item in order:
        total, num_items, i = heap[0]
        bins[i].append(item)
        heapq.heapreplace(heap, (total + costs[item], num_items + 1, i))
    return bins


# ---------------------------------------------------------------------------------------------------------
# Padded: neighbours by length
# ---------------------------------------------------------------------------------------------------------


def _padded_micro_batches(
    item_lengths: Sequence[Sequence[int]], num_ranks: int, max_tokens: int, num_least: int
) -> list[list[int]]:
    """Cut the items, ordered by length, where the sum of cost + OVERHEAD_TOKENS is least.

    The least cost is convex in the number of runs: only the multiples of num_ranks around the best number of
    all can be best, or the least number allowed.
    """
    items = SortedItems(item_lengths, max_tokens)
    num_items = len(item_lengths)
    fewest, most = items.fewest_cuts(), list(range(num_items + 1))
    if not max_tokens:
        return items.runs(items.cuts_of_count(num_least, fewest, most))
    num_least = max(_round_up(len(fewest) - 1, num_ranks), num_least)
    _check_enough(num_items, num_least, num_ranks)
    best = items.cheapest_cuts(OVERHEAD_TOKENS)
    below = (len(best) - 1) // num_ranks * num_ranks
    candidates = []
    for count in sorted({max(below, num_least), max(below + num_ranks, num_least)}):
        if count < len(best):
            candidates.append(items.cuts_of_count(count, fewest, best))
        elif count <= num_items:
            candidates.append(items.cuts_of_count(count, best, most))
    return items.runs(min(candidates, key=lambda cuts: items.cost(cuts) + OVERHEAD_TOKENS * len(cuts)))


class SortedItems:
    """Items by length, longest first, cut into runs of neighbours; none may cost above `max_tokens` (0: any).

    Cuts are [0, ..., n]: run k is from cuts[k] to cuts[k + 1]. A run from i to j costs
    longest[i] x (num_before[j] - num_before[i]), and infinitely much above the cap. As lengths only fall, it
    is a Monge cost: cost(a, c) + cost(b, d) <= cost(a, d) + cost(b, c) for a <= b <= c <= d. Hence the least
    cost is convex in the number of runs, and a price per run finds the cheapest cuts into a given number
    (Aggarwal, Schieber and Tokuyama 1994, "Finding a minimum-weight k-link path in graphs with the concave
    Monge property").
    """

    def __init__(self, item_lengths: Sequence[Sequence[int]], max_tokens: int) -> None:
        longest = [max(lengths, default=0) for lengths in item_lengths]
        self.order = sorted(range(len(longest)), key=lambda item: (-longest[item], item))
        self.longest = [longest[item] for item in self.order]
        self.num_before = [0, *accumulate(len(item_lengths[item]) for item in self.order)]
        # furthest[i]: where a run from i must end at the latest.
        self.furthest = [len(longest)] * len(longest)
        for i, length in enumerate(self.longest):
            if max_tokens and length:
                reach = self.num_before[i] + max_tokens // length
                self.furthest[i] = bisect_right(self.num_before, reach) - 1

    def runs(self, cuts: list[int]) -> list[list[int]]:
        """Return the items of each run."""
        return [self.order[i:j] for i, j in pairwise(cuts)]

    def cost(self, cuts: list[int]) -> int:
        """Return the cost of all runs in positions."""
        return sum(self.longest[i] * (self.num_before[j] - self.num_before[i]) for i, j in pairwise(cuts))

    def fewest_cuts(self) -> list[int]:
        """Return the cheapest cuts into as few runs as can be: one run less outweighs any padding."""
        return self.cheapest_cuts(self.longest[0] * self.num_before[-1] + 1)

    def cheapest_cuts(self, price: int, unit: int = 1) -> list[int]:
        """Return cuts with the least unit x cost + price x number of runs, in O(n log n)."""
        num_items = len(self.longest)
        totals, previous = [0] * (num_items + 1), [0] * (num_items + 1)
        # Cuts up to `end` whose last run starts at i are on a line over num_before[end]. A later start that
        # is as good stays so (Monge): the queue holds (start, first end for which it is the best of all).
        intercepts, slopes = [0] * num_items, [unit * length for length in self.longest]
        queue: deque[tuple[int, int]] = deque()
        for end in range(1, num_items + 1):
            new = end - 1
            intercepts[new] = totals[new] + price - slopes[new] * self.num_before[new]
            first = end
            while queue:
                rival, since = queue[-1]
                gap, fall = intercepts[new] - intercepts[rival], slopes[rival] - slopes[new]
                if fall:
                    first = bisect_left(self.num_before, -(-gap // fall), lo=end)
                else:
                    first = end if gap <= 0 else num_items + 1
                first = min(first, self.furthest[rival] + 1)
                if first > since:
                    break
                queue.pop()
                first = end
            if first <= num_items:
                queue.append((new, first))
            if len(queue) > 1 and queue[1][1] <= end:
                queue.popleft()
            start = previous[end] = queue[0][0]
            totals[end] = intercepts[start] + slopes[start] * self.num_before[end]
        cuts = [num_items]
        while cuts[-1]:
            cuts.append(previous[cuts[-1]])
        return cuts[::-1]

    def cuts_of_count(self, count: int, few: list[int], many: list[int]) -> list[int]:
        """Return the cheapest cuts into `count` runs, from those into fewer (`few`) and more (`many`).

        Both must be the cheapest at some price per run, and `count` between their numbers.
        """
        while len(few) - 1 != count and len(many) - 1 != count:
            # The price per run, as price / unit, at which few and many are equally good.
            price, unit = self.cost(few) - self.cost(many), len(many) - len(few)
            middle = self.cheapest_cuts(price, unit)
            gain = unit * (self.cost(few) - self.cost(middle)) + price * (len(few) - len(middle))
            if not gain:
                return _exchange(few, many, count)
            few, many = (middle, many) if len(middle) - 1 <= count else (few, middle)
        return few if len(few) - 1 == count else many


def _exchange(few: list[int], many: list[int], count: int) -> list[int]:
    """Return cuts into `count` runs, which are as good as `few` and `many` at a price where both are best.

    They follow `many` until a run of it lies within the run of `few` that is `extra` runs behind, and then go
    on as `few`. Crossed over so, both cost no more together (Monge), so none costs more alone.
    """
    extra = count - (len(few) - 1)
    k = next(k for k in range(len(few) - 1) if many[k + extra + 1] <= few[k + 1])
    return many[: k + extra + 1] + few[k + 1 :]
