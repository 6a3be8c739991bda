"""Global batches whose rows depend only on the seed, distributed over the ranks.

A step's rows are the next G of a seeded permutation, G = rows per micro-batch x accumulation x ranks. One
rank, two ranks, accumulation and any cut into micro-batches thus see the same global batches, and a token
mean over them is the same loss. Which items go through the model together, on which rank, every rank plans
from the same lengths: nothing is drawn, ties go by index, and so all ranks make the same number of passes.

An item is a row of SFT or a pair, whose sequences stay together. Its lengths are those of its sequences.
"""

import heapq
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from common.ranks import distributed

# The cost of a pass besides its tokens (launches, hooks), in tokens: so much padding is cheaper than another
# pass. From 64 to 256 bench_train.py's rates are alike on a CPU; 16 and 512 are slower.
OVERHEAD_TOKENS = 64
WINDOW_BATCHES = 32  # global batches that are sorted by length together: enough for next to no padding


class GlobalBatches:
    """Micro-batches of one rank, optimizer step by optimizer step: `next` gives a step's, without end.

    `num_drawn` counts those steps; a resumed run sets it, and nothing of what came before is read.

    `row_lengths` has the lengths of each row's sequences, for the two ways that depend on them. With
    `group_by_length` rows of like length meet in a batch, so there is less padding to compute; which rows
    meet still depends on the seed alone. With `max_tokens` the rows of a step are cut into micro-batches by
    tokens, see `plan_micro_batches`; `rows_per_micro_batch` and `accumulation` then only say how many rows
    there are.

    `groups` has a number for each row: the rows with the same one, the pairs of a prompt, are kept in one
    global batch where there is room. `max_of_group` of them are in an epoch, drawn anew for each; a row then
    has a `weight`, 1 over how many of its group there are, so that every group weighs alike (InstructGPT's
    1 / C(K, 2), arXiv:2203.02155 eq. 1).

    Raises ValueError when the data do not fill one global batch, or a row alone is above `max_tokens`.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate: Callable[[list[Any]], Any],
        *,
        rows_per_micro_batch: int,
        accumulation: int = 1,
        seed: int = 0,
        what: str = "training data",
        rows_flag: str = "--per_device_train_batch_size",
        row_lengths: Sequence[Sequence[int]] | np.ndarray = (),
        group_by_length: bool = False,
        max_tokens: int = 0,
        shared_lengths: Sequence[int] | np.ndarray = (),
        groups: Sequence[int] | np.ndarray = (),
        max_of_group: int = 0,
    ) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed
        self.rows, self.accumulation = rows_per_micro_batch, accumulation
        self.rank, self.world_size = distributed.rank(), distributed.world_size()
        # Arrays of what every row has: lists of objects would take ten times the memory.
        self.row_lengths = np.asarray(row_lengths, dtype=np.int32)  # (rows, sequences)
        self.group_by_length, self.max_tokens = group_by_length, max_tokens
        # Sequences end to end, known once there is a model: padding costs nothing then, and what the
        # sequences of a row begin with, so many tokens, is computed once.
        self.is_packed = False
        self.shared_lengths = np.asarray(shared_lengths, dtype=np.int32)
        self.num_drawn = 0
        self.max_of_group = max_of_group or len(dataset)
        # Each row's group, numbered by their first rows, and the rows group by group; none: each by itself.
        self.group_of, self._rows, sizes = _by_group(np.asarray(groups))
        self._first = np.cumsum(sizes) - sizes  # of a group in `_rows`
        self._sizes = sizes
        self.num_rows = int(self._num_of(sizes).sum()) if len(sizes) else len(dataset)  # of an epoch
        self._order: tuple[int, np.ndarray] = -1, np.array([])  # of an epoch
        if max_tokens and len(self.row_lengths):
            longest = self.row_lengths[self.row_lengths.max(axis=1).argmax()]
            plan_micro_batches([longest.tolist()], max_tokens=max_tokens)
        self.global_rows = rows_per_micro_batch * accumulation * self.world_size
        if self.num_rows < self.global_rows:
            raise ValueError(
                f"the {what} has {self.num_rows} rows, fewer than one global batch of {self.global_rows} = "
                f"{rows_per_micro_batch} rows x {accumulation} accumulation steps x {self.world_size} ranks: "
                f"lower {rows_flag} {rows_per_micro_batch}, or give more data"
            )

    def __len__(self) -> int:
        """Return the optimizer steps of one epoch; a last incomplete global batch is left out."""
        return self.num_rows // self.global_rows

    def __next__(self) -> list[Any]:
        """Return this rank's collated micro-batches of the next step, epoch after epoch."""
        epoch, step = divmod(self.num_drawn, len(self))
        if self._order[0] != epoch:
            self._order = epoch, self._order_of(epoch)
        rows = self._order[1][step * self.global_rows : (step + 1) * self.global_rows].tolist()
        self.num_drawn += 1
        return [self.collate([self._read(i) for i in chosen]) for chosen in self._cut(rows)]

    def rows_until(self, num_steps: int) -> list[int]:
        """Return the rows that the first steps read, in rising order; all of them from one epoch on, unless
        epochs draw.
        """
        if num_steps >= len(self) and self.num_rows == len(self.dataset):
            return list(range(len(self.dataset)))
        is_read = np.zeros(len(self.dataset), dtype=bool)
        for epoch, first in enumerate(range(0, num_steps, len(self))):
            is_read[self._order_of(epoch)[: (num_steps - first) * self.global_rows]] = True
        return is_read.nonzero()[0].tolist()

    def _read(self, index: int) -> Any:
        row = self.dataset[index]
        if not len(self._sizes):
            return row
        return row | {"weight": 1 / int(self._num_of(self._sizes[self.group_of[index]]))}

    def _num_of(self, sizes: np.ndarray) -> np.ndarray:
        """How many rows of groups of these sizes an epoch has."""
        return np.minimum(sizes, self.max_of_group)

    def _draw(self, generator: torch.Generator) -> np.ndarray:
        """The rows of an epoch: groups in a drawn order, of each as many as an epoch has."""
        order = torch.randperm(len(self._sizes), generator=generator).numpy()
        sizes, firsts = self._sizes[order], self._first[order]
        counts = self._num_of(sizes)
        places = _ranges(firsts, counts)
        ends = np.cumsum(counts)
        for group in (sizes > counts).nonzero()[0]:
            drawn = torch.randperm(int(sizes[group]), generator=generator)[: counts[group]].sort().values
            places[ends[group] - counts[group] : ends[group]] = firsts[group] + drawn.numpy()
        return self._rows[places][keep_together(counts, self.global_rows)]

    def _cut(self, rows: list[int]) -> list[list[int]]:
        if not self.max_tokens:
            starts = [(a * self.world_size + self.rank) * self.rows for a in range(self.accumulation)]
            return [rows[s : s + self.rows] for s in starts]
        lengths = self.row_lengths[rows].tolist()
        if self.is_packed and len(self.shared_lengths):
            lengths = [self._computed(row) for row in rows]
        together = []
        if len(self._sizes) and self.row_lengths.shape[1] == 1:  # rows of a conversation begin alike
            together = [(group, 0) for group in self.group_of[rows].tolist()]
        plan = plan_micro_batches(
            lengths,
            num_ranks=self.world_size,
            max_tokens=self.max_tokens,
            is_packed=self.is_packed,
            shared=together,
        )
        return [[rows[i] for i in items] for items in plan[self.rank]]

    def _computed(self, row: int) -> tuple[int, ...]:
        """Return the lengths of a row's sequences as they are computed end to end."""
        first, *others = self.row_lengths[row].tolist()
        shared = int(self.shared_lengths[row])
        return first, *(length - shared for length in others)

    def _order_of(self, epoch: int) -> np.ndarray:
        """The rows of an epoch in the order of its steps, int32."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        if len(self._sizes):
            order = self._draw(generator)
        else:
            order = torch.randperm(len(self.dataset), generator=generator).numpy().astype(np.int32)
        if not self.group_by_length:
            return order
        longest = self.row_lengths.max(axis=1)
        window = WINDOW_BATCHES * self.global_rows
        batches: list[np.ndarray] = []
        for first in range(0, len(self) * self.global_rows, window):
            rows = order[first : min(first + window, len(self) * self.global_rows)]
            groups = self.group_of[rows] if len(self._sizes) else rows
            parts = [rows[places] for places in _by_number(groups.tolist())]
            parts.sort(key=lambda part: longest[part].max())
            places = keep_together(np.array([len(part) for part in parts]), self.global_rows)
            rows = np.concatenate(parts)[places]
            batches += [rows[i : i + self.global_rows] for i in range(0, len(rows), self.global_rows)]
        mixed = torch.randperm(len(batches), generator=generator).tolist()
        return np.concatenate([batches[index] for index in mixed])


def _by_group(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each row's group (rows,), the rows group by group (rows,), both int32, and sizes (groups,) int64.

    Groups are numbered in the order of their first rows. All are empty where each row is one.
    """
    _, firsts, group_of = np.unique(groups, return_index=True, return_inverse=True)
    if len(firsts) == len(groups):
        return np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.int64)
    group_of = firsts.argsort().argsort().astype(np.int32)[group_of]
    return group_of, group_of.argsort(kind="stable").astype(np.int32), np.bincount(group_of)


def _ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers first, first + 1, ... of each range, end to end."""
    return np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def _by_number(numbers: Iterable[int]) -> list[list[int]]:
    """The places of each number, in the order of their first ones."""
    places: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(numbers):
        places[int(number)].append(place)
    return list(places.values())


def keep_together(counts: np.ndarray, size: int) -> np.ndarray:
    """The places of groups of rows, `counts` of each, end to end, in an order in which few groups lie across
    a multiple of `size`: what is next is the first group that still fits in, and where none does, the
    beginning of the first of all.
    """
    if not (counts > 1).any():
        return np.arange(len(counts))
    firsts = np.cumsum(counts) - counts
    groups = {n: (counts == n).nonzero()[0] for n in np.unique(counts).tolist()}
    num_taken = dict.fromkeys(groups, 0)
    rests: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (group, first row) of cut groups, by size
    begins, takes, num_rows = array("q"), array("q"), 0

    def next_of(n: int) -> int:
        return rests[n][-1][0] if rests[n] else int(groups[n][num_taken[n]])

    while groups or any(rests.values()):
        room = size - num_rows % size
        waiting = groups.keys() | {n for n, of_size in rests.items() if of_size}
        n = min((n for n in waiting if n <= room), key=next_of, default=0) or min(waiting, key=next_of)
        group = next_of(n)
        if rests[n]:
            begin = rests[n].pop()[1]
        else:
            begin = int(firsts[group])
            num_taken[n] += 1
            if num_taken[n] == len(groups[n]):
                del groups[n]
        begins.append(begin)
        takes.append(min(n, room))
        num_rows += takes[-1]
        if n > room:
            rests[n - room].append((group, begin + room))
    return _ranges(np.frombuffer(begins, np.int64), np.frombuffer(takes, np.int64))


def evaluation_batches(
    dataset: Dataset,
    collate: Callable[[list[Any]], Any],
    *,
    rows_per_batch: int,
    max_batches: int = 0,
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield (batch, is_real): every row once over all ranks, the same number of batches on each.

    `is_real` (rows,) bool is False for the rows that only fill up the last batches: they must not be counted.
    `max_batches` per rank bounds the work, 0 takes all rows.
    """
    rank, world_size = distributed.rank(), distributed.world_size()
    num_batches = -(-len(dataset) // (rows_per_batch * world_size))
    for batch in range(min(num_batches, max_batches) if max_batches else num_batches):
        first = (batch * world_size + rank) * rows_per_batch
        indexes = range(first, first + rows_per_batch)
        rows = [dataset[i if i < len(dataset) else 0] for i in indexes]
        yield collate(rows), torch.tensor([i < len(dataset) for i in indexes])


def plan_micro_batches(
    item_lengths: Sequence[Sequence[int]],
    *,
    num_ranks: int = 1,
    max_tokens: int,
    is_packed: bool = False,
    shared: Sequence[tuple[int, int]] = (),
) -> list[list[list[int]]]:
    """plan[rank][micro_batch] = item indexes: every item once, each rank as many micro-batches, none empty.

    A micro-batch costs the sum of its lengths where `is_packed`, else its number of sequences x the longest;
    none costs above `max_tokens`. Packed, items of a group may share tokens: `shared` has each item's group
    and how many; a group stays together, its items next to each other, as far as the cap and the ranks let
    it. Packed micro-batches are as few as first-fit decreasing makes them, then balanced; padded ones hold
    neighbours by length with at most OVERHEAD_TOKENS of padding. (Cuts by dynamic programming are 1.4 %
    faster at most, and no faster in the mean of chat, pair and rollout lengths.) The j-th micro-batches of
    the ranks cost alike, for ranks wait for one another. The dearest come first: what does not fit into
    memory fails in the first pass.

    Raises ValueError when an item alone is above `max_tokens`, or the items are fewer than the ranks need.
    """
    shared = shared if is_packed and shared else [(item, 0) for item in range(len(item_lengths))]

    def cost(items: Sequence[int]) -> int:
        lengths = [length for item in items for length in item_lengths[item]]
        if not is_packed:
            return len(lengths) * max(lengths, default=0)
        of_items = [shared[item] for item in items]
        return sum(lengths) - sum(count for _, count in of_items) + sum(dict(of_items).values())

    costs = [cost([item]) for item in range(len(item_lengths))]
    _check(item_lengths, costs, num_ranks, max_tokens, is_packed)
    if is_packed:
        parts = _cut_groups(shared, cost, max_tokens)
        bins = _fill([cost(part) for part in parts], max_tokens, num_ranks)
        micro_batches = [[item for part in some for item in parts[part]] for some in bins]
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
    """Return the items by groups, each in as few parts of about one size as keep to the cap."""
    parts_of_groups = []
    for items in _by_number(group for group, _ in shared):
        for num_parts in range(1, len(items) + 1):
            size = -(-len(items) // num_parts)
            parts = [items[first : first + size] for first in range(0, len(items), size)]
            if max(map(cost, parts)) <= max_tokens:
                break
        parts_of_groups += parts
    return parts_of_groups


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
    parts = list(micro_batches)
    while len(parts) % num_ranks:
        costs = [(cost(items), i) for i, items in enumerate(parts) if len(items) > 1]
        if not costs:
            raise ValueError(
                f"{len(parts)} items do not divide over {num_ranks} ranks: give a multiple of {num_ranks}"
            )
        items = parts.pop(max(costs)[1])
        parts += [items[: len(items) // 2], items[len(items) // 2 :]]
    return parts


def _deal(
    micro_batches: list[list[int]], cost: Callable[[Sequence[int]], int], num_ranks: int
) -> list[list[list[int]]]:
    """Deal in descending cost, there and back over the ranks, so that their sums come out alike too."""
    ordered = sorted(micro_batches, key=lambda items: (-cost(items), items))
    plan: list[list[list[int]]] = [[] for _ in range(num_ranks)]
    for i, micro_batch in enumerate(ordered):
        turn, slot = divmod(i, num_ranks)
        plan[slot if turn % 2 == 0 else num_ranks - 1 - slot].append(micro_batch)
    return plan
