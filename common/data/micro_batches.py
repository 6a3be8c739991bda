"""Which items go through the model together, on which rank. PURE: standard library only.

Every rank computes the same plan from the same lengths: nothing is drawn, ties go by index, and so all ranks
make the same number of passes.

# An item is what must stay together: a row of SFT, a pair. Its lengths are those of its sequences.
"""

import heapq
from collections.abc import Callable, Sequence

# What a pass costs beside its tokens (launches, hooks), in tokens: padding up to it is cheaper than another
# pass. From 64 to 256 bench_train.py's rates are alike on a CPU; 16 and 512 are slower.
OVERHEAD_TOKENS = 64

_NAMES = {1: "sequence", 2: "pair"}


def plan_micro_batches(
    item_lengths: Sequence[Sequence[int]], *, num_ranks: int = 1, max_tokens: int, is_packed: bool = False
) -> list[list[list[int]]]:
    """plan[rank][micro_batch] = item indexes: every item once, each rank as many micro-batches, none empty.

    A micro-batch costs the sum of its lengths where `is_packed`, else its number of sequences x the longest;
    none costs above `max_tokens`. Packed micro-batches are as few as first-fit decreasing makes them, then
    balanced; padded ones hold neighbours by length with at most OVERHEAD_TOKENS of padding. (Cuts by dynamic
    programming are 1.4 % faster at most, and no faster in the mean of chat, pair and rollout lengths.) The
    j-th micro-batches of the ranks cost alike, for ranks wait for one another. The dearest come first: what
    does not fit into memory fails in the first pass.

    Raises ValueError when an item alone is above `max_tokens`, or the items are fewer than the ranks need.
    """

    def cost(items: Sequence[int]) -> int:
        lengths = [length for item in items for length in item_lengths[item]]
        return sum(lengths) if is_packed else len(lengths) * max(lengths, default=0)

    costs = [cost([item]) for item in range(len(item_lengths))]
    _check(item_lengths, costs, num_ranks, max_tokens, is_packed)
    if is_packed:
        micro_batches = _fill(costs, max_tokens, num_ranks)
    else:
        micro_batches = _cut_by_length(item_lengths, max_tokens)
    return _deal(_split_to_a_multiple(micro_batches, cost, num_ranks), cost, num_ranks)


def _check(
    item_lengths: Sequence[Sequence[int]], costs: list[int], num_ranks: int, max_tokens: int, is_packed: bool
) -> None:
    if len(costs) < num_ranks:
        raise ValueError(f"{len(costs)} items do not fill a micro-batch on each of {num_ranks} ranks")
    if max(costs) > max_tokens:
        num_sequences = len(item_lengths[costs.index(max(costs))])
        name = _NAMES.get(num_sequences, f"group of {num_sequences} sequences")
        layout = "" if num_sequences == 1 else ", laid end to end," if is_packed else ", padding included,"
        raise ValueError(
            f"a {name} of {max(costs)} tokens{layout} is longer than --max_tokens_per_micro_batch "
            f"{max_tokens}; raise it to at least {max(costs)}"
        )


def _cut_by_length(item_lengths: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Cut the items, longest first, where the cap or OVERHEAD_TOKENS of padding are reached."""
    longest_of = [max(lengths, default=0) for lengths in item_lengths]
    micro_batches: list[list[int]] = []
    width = num_sequences = padding = 0
    for item in sorted(range(len(longest_of)), key=lambda item: (-longest_of[item], item)):
        count = len(item_lengths[item])
        more = count * (width - longest_of[item])
        fits = width * (num_sequences + count) <= max_tokens and padding + more <= OVERHEAD_TOKENS
        if micro_batches and fits:
            micro_batches[-1].append(item)
            num_sequences, padding = num_sequences + count, padding + more
        else:
            micro_batches.append([item])
            width, num_sequences, padding = longest_of[item], count, 0
    return micro_batches


def _fill(costs: list[int], max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Put items together by first-fit decreasing, and evenly where that keeps to the cap."""
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item in order:
        i = next((i for i, room in enumerate(rooms) if costs[item] <= room), len(bins))
        if i == len(bins):
            bins.append([])
            rooms.append(max_tokens)
        bins[i].append(item)
        rooms[i] -= costs[item]
    num_bins = -(-len(bins) // num_ranks) * num_ranks
    if num_bins > len(costs):
        return bins
    balanced = _balance(order, costs, num_bins)
    fits = max(sum(costs[item] for item in items) for items in balanced) <= max_tokens
    return balanced if fits else bins


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


def _split_to_a_multiple(
    micro_batches: list[list[int]], cost: Callable[[Sequence[int]], int], num_ranks: int
) -> list[list[int]]:
    """Halve the dearest until each rank gets as many: their number is a multiple of `num_ranks`."""
    found = list(micro_batches)
    while len(found) % num_ranks:
        costs = [(cost(items), i) for i, items in enumerate(found) if len(items) > 1]
        if not costs:
            raise ValueError(
                f"{len(found)} items cannot be dealt to {num_ranks} ranks: give a multiple of {num_ranks}"
            )
        items = found.pop(max(costs)[1])
        found += [items[: len(items) // 2], items[len(items) // 2 :]]
    return found


def _deal(
    micro_batches: list[list[int]], cost: Callable[[Sequence[int]], int], num_ranks: int
) -> list[list[list[int]]]:
    """Deal in descending cost, there and back over the ranks, so that their sums come out alike too."""
    ordered = sorted(map(sorted, micro_batches), key=lambda items: (-cost(items), items))
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for i, micro_batch in enumerate(ordered):
        turn, slot = divmod(i, num_ranks)
        plan[slot if turn % 2 == 0 else num_ranks - 1 - slot].append(micro_batch)
    return plan
