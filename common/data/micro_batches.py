"""Plans of micro-batches: which items go through the model together, and on which rank.

Every rank computes the plan from the same lengths: nothing is sampled and ties are resolved by index, so all
ranks make the same number of passes. An item is a row of SFT, a response or a pair, whose sequences stay
together.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from common.ranks import distributed

# Fixed cost of a pass (launches, hooks) in tokens: this much padding is cheaper than another pass. On a CPU,
# bench_train.py measures similar rates for 64 to 256; 16 and 512 are slower.
OVERHEAD_TOKENS = 64
# Larger passes need more memory and are no faster on a CPU (bench_train.py: similar rates for 1,024 to
# 16,384 tokens).
CPU_PASS_TOKENS = 2048


@dataclass(frozen=True)
class TokenPlan:
    """Cuts global batches into micro-batches of at most `max_tokens`, see `plan_micro_batches`."""

    row_lengths: np.ndarray  # (rows, sequences) int32
    max_tokens: int
    is_packed: bool = False
    # Length of the common prefix of a row's sequences, computed once if packed: (rows,) int32, or empty.
    shared_lengths: np.ndarray | Sequence[int] = ()
    # Group of each row; packed rows of a group share a prefix and stay together: (rows,) int32, or empty.
    groups: np.ndarray | Sequence[int] = ()

    def check_longest(self) -> None:
        """Raise ValueError if a single row exceeds `max_tokens`."""
        longest = self.row_lengths[self.row_lengths.max(axis=1).argmax()]
        plan_micro_batches([longest.tolist()], max_tokens=self.max_tokens, is_packed=self.is_packed)

    def cut(self, rows: list[int]) -> list[list[int]]:
        """This rank's micro-batches of a global batch."""
        lengths = self.row_lengths[rows]
        if self.is_packed and len(self.shared_lengths):
            lengths[:, 1:] -= self.shared_lengths[rows, None]
        groups = self.groups[rows].tolist() if len(self.groups) else []
        plan = plan_micro_batches(
            lengths.tolist(),
            num_ranks=distributed.world_size(),
            max_tokens=self.max_tokens,
            is_packed=self.is_packed,
            shared=[(group, 0) for group in groups],
        )
        return [[rows[item] for item in items] for items in plan[distributed.rank()]]


def plan_micro_batches(
    item_lengths: Sequence[Sequence[int]],
    *,
    num_ranks: int = 1,
    max_tokens: int,
    is_packed: bool = False,
    shared: Sequence[tuple[int, int]] = (),
) -> list[list[list[int]]]:
    """plan[rank][micro_batch] = item indexes: every item once, the same number of micro-batches on each rank,
    none empty.

    A micro-batch costs the sum of its lengths if `is_packed`, else its number of sequences x the longest;
    none costs more than `max_tokens`. Packed items of a group can share tokens: `shared` has each item's
    group and number of shared tokens; a group stays together, its items adjacent, as far as the cap and the
    ranks allow. Packed micro-batches are built by first-fit decreasing, then balanced; padded ones have items
    of adjacent lengths with at most OVERHEAD_TOKENS of padding. (Cuts by dynamic programming are at most 1.4
    % faster, and no faster on average over chat, pair and rollout lengths.) The j-th micro-batches of the
    ranks have similar costs, because ranks wait for one another. The most expensive come first, so that
    running out of memory shows in the first pass.

    Raises ValueError if a single item exceeds `max_tokens`, or there are fewer items than the ranks need.
    """
    shared = shared if is_packed and shared else [(item, 0) for item in range(len(item_lengths))]

    def cost(items: Sequence[int]) -> int:
        lengths = [length for item in items for length in item_lengths[item]]
        if not is_packed:
            return len(lengths) * max(lengths, default=0)
        shares = [shared[item] for item in items]
        return sum(lengths) - sum(count for _, count in shares) + sum(dict(shares).values())

    costs = [cost([item]) for item in range(len(item_lengths))]
    _check(item_lengths, costs, num_ranks, max_tokens, is_packed)
    if is_packed:
        parts = _cut_groups(shared, cost, max_tokens)
        bins = _fill([cost(part) for part in parts], max_tokens, num_ranks)
        micro_batches = [[item for i in bin_parts for item in parts[i]] for bin_parts in bins]
        for items in micro_batches:
            items.sort(key=lambda item: (shared[item][0], item))
    else:
        micro_batches = [sorted(items) for items in _cut_by_length(item_lengths, max_tokens)]
    return _deal(_split_to_a_multiple(micro_batches, cost, num_ranks), cost, num_ranks)


def _check(
    item_lengths: Sequence[Sequence[int]], costs: list[int], num_ranks: int, max_tokens: int, is_packed: bool
) -> None:
    if len(costs) < num_ranks:
        raise ValueError(f"{len(costs)} items do not fill a micro-batch on each of {num_ranks} ranks")
    if max(costs) > max_tokens:
        num_sequences = len(item_lengths[costs.index(max(costs))])
        names = {1: "sequence", 2: "pair"}
        name = names.get(num_sequences, f"group of {num_sequences} sequences")
        layout = "" if num_sequences == 1 else ", laid end to end," if is_packed else ", padding included,"
        raise ValueError(
            f"a {name} of {max(costs)} tokens{layout} is longer than --max_tokens_per_micro_batch "
            f"{max_tokens}; raise it to at least {max(costs)}"
        )


def _cut_groups(
    shared: Sequence[tuple[int, int]], cost: Callable[[Sequence[int]], int], max_tokens: int
) -> list[list[int]]:
    """Items by group, each group in as few parts of similar size as the cap allows."""
    parts_of_groups = []
    for items in indexes_by_number(group for group, _ in shared):
        for num_parts in range(1, len(items) + 1):
            size = -(-len(items) // num_parts)
            parts = [items[first : first + size] for first in range(0, len(items), size)]
            if max(map(cost, parts)) <= max_tokens:
                break
        parts_of_groups += parts
    return parts_of_groups


def _cut_by_length(item_lengths: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Items, longest first, cut before the cap or OVERHEAD_TOKENS of padding would be exceeded."""
    longest_of = [max(lengths, default=0) for lengths in item_lengths]
    micro_batches: list[list[int]] = []
    width = num_sequences = padding = 0
    for item in sorted(range(len(longest_of)), key=lambda item: (-longest_of[item], item)):
        count = len(item_lengths[item])
        more = count * (width - longest_of[item])
        fits = width * (num_sequences + count) <= max_tokens and padding + more <= OVERHEAD_TOKENS
        if micro_batches and fits:
            micro_batches[-1].append(item)
            num_sequences = num_sequences + count
            padding = padding + more
        else:
            micro_batches.append([item])
            width = longest_of[item]
            num_sequences = count
            padding = 0
    return micro_batches


def _fill(costs: list[int], max_tokens: int, num_ranks: int) -> list[list[int]]:
    """Pack items by first-fit decreasing, then evenly if that respects the cap."""
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
    """Put each item into the bin with the smallest sum (longest processing time first); none stays empty."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    # The number of items is the second key, so that items of cost 0 go to empty bins first.
    heap = [(0, 0, i) for i in range(num_bins)]
    for item in order:
        total, num_items, i = heap[0]
        bins[i].append(item)
        heapq.heapreplace(heap, (total + costs[item], num_items + 1, i))
    return bins


def _split_to_a_multiple(
    micro_batches: list[list[int]], cost: Callable[[Sequence[int]], int], num_ranks: int
) -> list[list[int]]:
    """Halve the most expensive micro-batches until their number is a multiple of `num_ranks`."""
    parts = list(micro_batches)
    while len(parts) % num_ranks:
        costs = [(cost(items), i) for i, items in enumerate(parts) if len(items) > 1]
        if not costs:
            raise ValueError(
                f"{len(parts)} items cannot be divided among {num_ranks} ranks: use a multiple of {num_ranks}"
            )
        items = parts.pop(max(costs)[1])
        parts += [items[: len(items) // 2], items[len(items) // 2 :]]
    return parts


def _deal(
    micro_batches: list[list[int]], cost: Callable[[Sequence[int]], int], num_ranks: int
) -> list[list[list[int]]]:
    """Distribute in descending cost, back and forth over the ranks, so that their sums are similar too."""
    ordered = sorted(micro_batches, key=lambda items: (-cost(items), items))
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for i, micro_batch in enumerate(ordered):
        turn, slot = divmod(i, num_ranks)
        plan[slot if turn % 2 == 0 else num_ranks - 1 - slot].append(micro_batch)
    return plan


def indexes_by_number(numbers: Iterable[int]) -> list[list[int]]:
    """Indexes of each distinct number, ordered by its first occurrence."""
    indexes: dict[int, list[int]] = {}
    for index, number in enumerate(numbers):
        indexes.setdefault(number, []).append(index)
    return list(indexes.values())
