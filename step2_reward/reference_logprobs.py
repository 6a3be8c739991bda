"""What the reference thinks of every pair: computed once, by the policy itself before it learns anything.

So no second model is ever in memory, and the first loss is exactly log 2. The numbers are a part of a
checkpoint, for weights that have moved cannot give them again.

# M pairs of a data set
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from common.ranks import distributed
from common.runs.saved_state import Stateful, TensorReader, TensorSlice


class ReferencePairs(Dataset):
    """Rows of pairs, each with its `reference_logprobs` (2,) fp32: of the chosen answer, of the rejected one.

    They are NaN until `compute` has been called.
    """

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs
        self.logprobs = torch.full((len(pairs), 2), torch.nan)  # (M, 2)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.pairs[index], "reference_logprobs": self.logprobs[index]}

    @torch.no_grad()
    def compute(
        self,
        score: Callable[[Any], torch.Tensor],
        collate: Callable[[list[Any]], Any],
        rows: Sequence[int],
        rows_per_batch: int,
    ) -> None:
        """Fill in these rows: `score` gives the log-probabilities (2N,) of a collated batch, pair by pair.

        Every rank must call this, and each computes its share.
        """
        if not rows:
            return
        lengths = self.pairs.lengths("chosen_ids")
        in_order = sorted(rows, key=lambda row: (lengths[row], row))  # less padding
        size, rank, world_size = rows_per_batch, distributed.rank(), distributed.world_size()
        found = torch.zeros_like(self.logprobs, dtype=torch.float64)
        for first in range(0, len(in_order), size * world_size):
            mine = in_order[first + rank * size :][:size]
            batch = mine or in_order[:1]  # as many passes on every rank
            scores = score(collate([self[row] for row in batch])).view(-1, 2)
            if mine:
                found[mine] = scores.double().cpu()
        # Each row has one rank's number and zeros: the sum is that number.
        self.logprobs[rows] = distributed.reduce_sum(found)[rows].float()


class ReferencePart(Stateful):
    """The reference's log-probabilities, as a part of a checkpoint."""

    def __init__(self, data_sets: dict[str, ReferencePairs]) -> None:
        self.data_sets = data_sets

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Give all of it on the first rank: every rank has the same."""
        if distributed.is_main():
            for name, pairs in self.data_sets.items():
                yield TensorSlice(name, 0, pairs.logprobs.flatten())

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Take what was computed."""
        for name, pairs in self.data_sets.items():
            pairs.logprobs = reader.read(name, 0, pairs.logprobs.numel()).view(-1, 2)
