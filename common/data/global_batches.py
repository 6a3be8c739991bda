"""Global batches whose rows depend only on the seed, distributed over the ranks.

A step's rows are the next G of a seeded permutation, G = rows per micro-batch x accumulation x ranks. One
rank, two ranks, accumulation and any split into micro-batches thus see the same global batches, with the same
mean loss over their tokens.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from common.data.micro_batches import TokenPlan, indexes_by_number
from common.ranks import distributed
from common.ranks.passes import watched

WINDOW_BATCHES = 32  # global batches sorted by length together: enough for almost no padding


@dataclass(frozen=True)
class RowPlan:
    """Global batches of rows per micro-batch x accumulation x ranks, split into micro-batches by rows."""

    rows_per_micro_batch: int
    accumulation: int = 1
    rows_flag: str = "--per_device_train_batch_size"
    data_name: str = "training data"  # for messages

    @property
    def global_rows(self) -> int:
        """Number of rows of a global batch."""
        return self.rows_per_micro_batch * self.accumulation * distributed.world_size()

    def cut(self, rows: list[int]) -> list[list[int]]:
        """This rank's micro-batches of a global batch."""
        size = self.rows_per_micro_batch
        starts = range(distributed.rank() * size, len(rows), distributed.world_size() * size)
        return [rows[start : start + size] for start in starts]


class Groups:
    """Rows with the same number, such as the pairs of a prompt; an epoch has at most `max_rows` per group.

    `sources` are (rows, weight) of each source, in the order of the rows: an epoch has weight x rows of a
    source, in whole groups, with a new sample in each epoch; without `sources` it has every row once.

    Stored as arrays with one entry per row: lists of objects would need ten times the memory. Groups are
    numbered in the order of their first rows. Without `sources` all arrays are empty if no two rows share a
    number.
    """

    def __init__(
        self,
        numbers: Sequence[int] | np.ndarray = (),
        max_rows: int = 0,
        sources: Sequence[tuple[int, float]] = (),
    ) -> None:
        _, firsts, group_of = np.unique(numbers, return_index=True, return_inverse=True)
        if len(firsts) == len(numbers) and not sources:
            firsts = group_of = np.empty(0, np.int64)
        self.group_of = firsts.argsort().argsort().astype(np.int32)[group_of]  # (rows,)
        self.rows = self.group_of.argsort(kind="stable").astype(np.int32)  # (rows,), group by group
        self.sizes = np.bincount(self.group_of)  # (groups,)
        self.has_weights = bool((self.sizes > 1).any())  # else all are 1
        self.starts = np.cumsum(self.sizes) - self.sizes  # (groups,): first index in `rows`
        self.counts = np.minimum(self.sizes, max_rows or len(numbers))  # (groups,): rows per sample
        ends = np.cumsum([rows for rows, _ in sources])
        source_of = np.searchsorted(ends, self.rows[self.starts], side="right")
        # Groups of each source, and how many of their rows an epoch has.
        self.weighted: list[tuple[np.ndarray, int]] = []
        for source, (_, weight) in enumerate(sources):
            own = (source_of == source).nonzero()[0]
            self.weighted.append((own, round(weight * int(self.counts[own].sum()))))

    def __len__(self) -> int:
        return len(self.sizes)

    def weight(self, row: int) -> float:
        """1 / the number of rows of the row's group in an epoch, so that every group has the same weight
        (InstructGPT's 1 / C(K, 2), arXiv:2203.02155 eq. 1).
        """
        return 1 / int(self.counts[self.group_of[row]])

    @property
    def epoch_rows(self) -> int:
        """Number of rows of an epoch."""
        if not self.weighted:
            return int(self.counts.sum())
        return sum(num_rows for _, num_rows in self.weighted)

    def _order(self, generator: torch.Generator) -> np.ndarray:
        """Groups of an epoch in random order; with weights, a source's last one may exceed its share."""
        if not self.weighted:
            return torch.randperm(len(self), generator=generator).numpy()
        chosen = []
        for own, num_rows in self.weighted:
            while num_rows > 0:
                order = own[torch.randperm(len(own), generator=generator).numpy()]
                ends = np.cumsum(self.counts[order])
                chosen.append(order[: np.searchsorted(ends, num_rows) + 1])
                num_rows -= int(ends[-1])
        groups = np.concatenate(chosen)
        return groups[torch.randperm(len(groups), generator=generator).numpy()]

    def sample(self, generator: torch.Generator, global_rows: int) -> np.ndarray:
        """Rows of an epoch: groups in random order, each within one global batch if there is room."""
        order = self._order(generator)
        sizes = self.sizes[order]
        starts = self.starts[order]
        counts = self.counts[order]
        indexes = _ranges(starts, counts)
        ends = np.cumsum(counts)
        for group in (sizes > counts).nonzero()[0]:
            sampled = torch.randperm(int(sizes[group]), generator=generator)[: counts[group]].sort().values
            indexes[ends[group] - counts[group] : ends[group]] = starts[group] + sampled.numpy()
        return self.rows[indexes][keep_together(counts, global_rows)]


class EpochOrder:
    """Rows of every step, epoch after epoch; a last incomplete global batch of an epoch is left out.

    With `longest`, the length (rows,) of each row's longest sequence, a batch has rows of similar length and
    so needs less padding; its rows still depend only on the data and the seed.

    Raises ValueError if the `num_rows` rows of the data do not fill one global batch.
    """

    def __init__(
        self,
        num_rows: int,
        plan: RowPlan,
        seed: int = 0,
        groups: Groups | None = None,
        longest: np.ndarray | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.global_rows = plan.global_rows
        self.seed = seed
        self.groups = groups or Groups()
        self.longest = longest
        self.epoch_rows = self.groups.epoch_rows or num_rows
        self._epoch = -1
        self._rows = np.array([])  # rows of `_epoch`, in order
        if self.epoch_rows < self.global_rows:
            num_rows = f"{plan.rows_per_micro_batch} rows x {plan.accumulation} accumulation steps"
            raise ValueError(
                f"the {plan.data_name} has {self.epoch_rows} rows, fewer than one global batch of "
                f"{self.global_rows} = {num_rows} x {distributed.world_size()} ranks: lower {plan.rows_flag} "
                f"{plan.rows_per_micro_batch}, or use more data"
            )

    def __len__(self) -> int:
        """Number of optimizer steps of one epoch."""
        return self.epoch_rows // self.global_rows

    def rows_of(self, step: int) -> list[int]:
        """Rows of a step, counted from 0 over all epochs."""
        epoch, step = divmod(step, len(self))
        if epoch != self._epoch:
            self._epoch = epoch
            self._rows = self.epoch(epoch)
        return self._rows[step * self.global_rows :][: self.global_rows].tolist()

    def rows_until(self, num_steps: int) -> list[int]:
        """Rows of the first steps, ascending; all rows if they cover an epoch, unless it is a sample."""
        if num_steps >= len(self) and self.epoch_rows == self.num_rows and not self.groups.weighted:
            return list(range(self.num_rows))
        is_read = np.zeros(self.num_rows, dtype=bool)
        for epoch, first in enumerate(range(0, num_steps, len(self))):
            is_read[self.epoch(epoch)[: (num_steps - first) * self.global_rows]] = True
        return is_read.nonzero()[0].tolist()

    def epoch(self, epoch: int) -> np.ndarray:
        """Rows of an epoch in the order of its steps, int32."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        if self.groups:
            order = self.groups.sample(generator, self.global_rows)
        else:
            order = torch.randperm(self.num_rows, generator=generator).numpy().astype(np.int32)
        if self.longest is None:
            return order
        order = order[: len(self) * self.global_rows]
        window = WINDOW_BATCHES * self.global_rows
        windows = [self._sort(order[first : first + window]) for first in range(0, len(order), window)]
        batches = np.concatenate(windows).reshape(len(self), self.global_rows)
        return batches[torch.randperm(len(self), generator=generator).numpy()].reshape(-1)

    def _sort(self, rows: np.ndarray) -> np.ndarray:
        """The rows by length, with those of a group together."""
        numbers = self.groups.group_of[rows] if self.groups else rows
        parts = [rows[indexes] for indexes in indexes_by_number(numbers.tolist())]
        parts.sort(key=lambda part: self.longest[part].max())
        counts = np.array([len(part) for part in parts])
        return np.concatenate(parts)[keep_together(counts, self.global_rows)]


class GlobalBatches:
    """Endless micro-batches of one rank: `next` returns those of the next optimizer step.

    `num_steps` counts these steps; a resumed run sets it without reading earlier rows. If any group has
    several rows, each row has a `weight`.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate: Callable[[list[Any]], Any],
        order: EpochOrder,
        plan: RowPlan | TokenPlan,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.order = order
        self.plan = plan
        self.num_steps = 0

    @classmethod
    def by_rows(
        cls,
        dataset: Dataset,
        collate: Callable[[list[Any]], Any],
        plan: RowPlan,
        seed: int = 0,
        sources: Sequence[tuple[int, float]] = (),
    ) -> "GlobalBatches":
        """Batches of rows without groups, ordered by the seed; `sources` as in Groups.

        Raises ValueError as EpochOrder does.
        """
        groups = Groups(range(len(dataset)), sources=sources)
        return cls(dataset, collate, EpochOrder(len(dataset), plan, seed, groups), plan)

    def __len__(self) -> int:
        """Number of optimizer steps of one epoch."""
        return len(self.order)

    def __next__(self) -> list[Any]:
        """This rank's collated micro-batches of the next step, epoch after epoch."""
        rows = self.order.rows_of(self.num_steps)
        self.num_steps += 1
        return [self.collate([self._read(row) for row in part]) for part in self.plan.cut(rows)]

    def _read(self, row: int) -> Any:
        item = self.dataset[row]
        groups = self.order.groups
        return item | {"weight": groups.weight(row)} if groups.has_weights else item


def _ranges(firsts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The numbers first, first + 1, ... of all ranges, concatenated."""
    return np.repeat(firsts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())


def keep_together(counts: np.ndarray, size: int) -> np.ndarray:
    """Positions of the rows of groups of `counts` rows, in an order in which few groups cross a multiple of
    `size`: the next group is the first that still fits, or else the first one, which is split.
    """
    if not (counts > 1).any():
        return np.arange(len(counts))
    firsts = np.cumsum(counts) - counts
    # First row of each waiting group, by the group's size; the next group is last.
    waiting = {n: array("q", firsts[counts == n][::-1].tobytes()) for n in np.unique(counts).tolist()}
    starts = array("q")
    lengths = array("q")
    num_rows = 0
    while waiting:
        room = size - num_rows % size
        fitting = [n for n in waiting if n <= room]
        n = min(fitting or waiting, key=lambda n: waiting[n][-1])
        starts.append(waiting[n].pop())
        lengths.append(min(n, room))
        num_rows += lengths[-1]
        if not waiting[n]:
            del waiting[n]
        if n > room:
            waiting.setdefault(n - room, array("q")).append(starts[-1] + room)
    return _ranges(np.frombuffer(starts, np.int64), np.frombuffer(lengths, np.int64))


def evaluation_batches(
    dataset: Dataset,
    collate: Callable[[list[Any]], Any],
    *,
    rows_per_batch: int,
    max_rows: int = 0,
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield (batch, is_real): every row once over all ranks, the same number of batches on each.

    `is_real` (rows,) bool is False for rows that only fill up the last batches: they must not be counted.
    `max_rows`: limit over all ranks; 0: none.
    """
    rank = distributed.rank()
    world_size = distributed.world_size()
    num_rows = min(len(dataset), max_rows or len(dataset))
    num_batches = -(-num_rows // (rows_per_batch * world_size))
    for batch in watched(range(num_batches), num_batches, "batches"):
        first = (batch * world_size + rank) * rows_per_batch
        indexes = range(first, first + rows_per_batch)
        rows = [dataset[i if i < num_rows else 0] for i in indexes]
        yield collate(rows), torch.tensor([i < num_rows for i in indexes])
