"""Global batches whose rows depend on the seed alone, dealt to the ranks.

A step's rows are the next G of a seeded permutation, G = rows per micro-batch x accumulation x ranks. One
rank, two ranks, accumulation and any cut into micro-batches thus see the same global batches, and a token
mean over them is the same loss.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from common.data.micro_batches import plan_micro_batches

WINDOW_BATCHES = 32  # global batches that are sorted by length together: enough for next to no padding


@dataclass
class TokenBudget:
    """Micro-batches are cut by tokens: `row_lengths` has the lengths of each row's sequences."""

    row_lengths: Sequence[Sequence[int]]
    max_tokens: int
    is_packed: bool = False  # sequences end to end: padding costs nothing

    def check(self) -> None:
        """Raise ValueError when a row alone is above the budget."""
        longest = max(range(len(self.row_lengths)), key=lambda row: max(self.row_lengths[row]))
        plan_micro_batches([self.row_lengths[longest]], max_tokens=self.max_tokens, is_packed=self.is_packed)

    def cut(self, rows: Sequence[int], rank: int, world_size: int) -> list[list[int]]:
        """Return this rank's micro-batches of a global batch's rows; every rank gets as many."""
        lengths = [self.row_lengths[row] for row in rows]
        plan = plan_micro_batches(
            lengths, num_ranks=world_size, max_tokens=self.max_tokens, is_packed=self.is_packed
        )
        return [[rows[i] for i in micro_batch] for micro_batch in plan[rank]]


class GlobalBatches:
    """Micro-batches of one rank, optimizer step by optimizer step.

    With `group_lengths` (a length per row) rows of like length meet in a batch, so there is less padding to
    compute; which rows meet still depends on the seed alone. With a `budget` the rows of a step are cut into
    micro-batches by tokens; `rows_per_micro_batch` and `accumulation` then only say how many there are.

    Raises ValueError when the data do not fill one global batch, or a row is above the budget.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate: Callable[[list[Any]], Any],
        *,
        rows_per_micro_batch: int,
        accumulation: int = 1,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        what: str = "training data",
        rows_flag: str = "--per_device_train_batch_size",
        group_lengths: Sequence[int] | None = None,
        budget: TokenBudget | None = None,
    ) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed
        self.rows, self.accumulation = rows_per_micro_batch, accumulation
        self.rank, self.world_size, self.group_lengths = rank, world_size, group_lengths
        self.budget = budget
        if budget and len(budget.row_lengths):
            budget.check()
        self.global_rows = rows_per_micro_batch * accumulation * world_size
        if len(dataset) < self.global_rows:
            raise ValueError(
                f"the {what} has {len(dataset)} rows, fewer than one global batch of {self.global_rows} = "
                f"{rows_per_micro_batch} rows x {accumulation} accumulation steps x {world_size} ranks: "
                f"lower {rows_flag} {rows_per_micro_batch}, or give more data"
            )

    def __len__(self) -> int:
        """Return the optimizer steps of one epoch; a last incomplete global batch is left out."""
        return len(self.dataset) // self.global_rows

    def rows_until(self, num_steps: int) -> list[int]:
        """Return the rows that the first steps read, in rising order; all of them from one epoch on."""
        if num_steps >= len(self):
            return list(range(len(self.dataset)))
        return sorted(self._order(0)[: num_steps * self.global_rows])

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[list[Any]]:
        """Yield this rank's list of collated micro-batches for every step of an epoch."""
        order = self._order(epoch)
        for step in range(first_step, len(self)):
            rows = order[step * self.global_rows : (step + 1) * self.global_rows]
            yield [self.collate([self.dataset[i] for i in chosen]) for chosen in self._cut(rows)]

    def _cut(self, rows: list[int]) -> list[list[int]]:
        if self.budget:
            return self.budget.cut(rows, self.rank, self.world_size)
        starts = [(a * self.world_size + self.rank) * self.rows for a in range(self.accumulation)]
        return [rows[s : s + self.rows] for s in starts]

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        if self.group_lengths is None:
            return order
        window = WINDOW_BATCHES * self.global_rows
        batches: list[list[int]] = []
        for first in range(0, len(self) * self.global_rows, window):
            rows = sorted(order[first : min(first + window, len(self) * self.global_rows)], key=self._length)
            batches += [rows[i : i + self.global_rows] for i in range(0, len(rows), self.global_rows)]
        mixed = torch.randperm(len(batches), generator=generator).tolist()
        return [row for index in mixed for row in batches[index]]

    def _length(self, row: int) -> int:
        return self.group_lengths[row]

    def forever(self, num_done: int = 0) -> Iterator[list[Any]]:
        """Yield steps, epoch after epoch; the first `num_done` are left out, and nothing of them is read."""
        epoch, first_step = divmod(num_done, len(self))
        while True:
            yield from self.epoch(epoch, first_step)
            epoch, first_step = epoch + 1, 0


class BatchStream:
    """The steps of `GlobalBatches` one after the other, without end; `num_drawn` says how many were drawn."""

    def __init__(self, batches: GlobalBatches) -> None:
        self.batches, self.num_drawn = batches, 0
        self._steps = batches.forever()

    def __next__(self) -> list[Any]:
        """Return this rank's micro-batches of the next step."""
        found = next(self._steps)
        self.num_drawn += 1
        return found

    def skip_to(self, num_drawn: int) -> None:
        """Go on as if so many had been drawn; nothing of them is read."""
        self.num_drawn, self._steps = num_drawn, self.batches.forever(num_drawn)


def evaluation_batches(
    dataset: Dataset,
    collate: Callable[[list[Any]], Any],
    *,
    rows_per_batch: int,
    rank: int = 0,
    world_size: int = 1,
    max_batches: int = 0,
) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield (batch, is_real): every row once over all ranks, the same number of batches on each.

    `is_real` (rows,) bool is False for the rows that only fill up the last batches: they must not be counted.
    `max_batches` per rank bounds the work, 0 takes all rows.
    """
    num_batches = -(-len(dataset) // (rows_per_batch * world_size))
    for batch in range(min(num_batches, max_batches) if max_batches else num_batches):
        first = (batch * world_size + rank) * rows_per_batch
        indexes = range(first, first + rows_per_batch)
        rows = [dataset[i if i < len(dataset) else 0] for i in indexes]
        yield collate(rows), torch.tensor([i < len(dataset) for i in indexes])
