"""The reference of --loss dpo, ipo and kto: the initial policy, evaluated once on every pair.

No second model is ever in memory, and DPO's first loss is exactly log 2.

# M pairs of a data set
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from common.data.collators import collate_pairs
from common.ranks import distributed, watchdog
from common.ranks.passes import watched
from common.runs.saved_state import Stateful, TensorReader, TensorSlice


class ReferencePairs(Dataset):
    """Rows of pairs, each with its `reference_logprobs` (2,) fp32 of the chosen and the rejected response
    (under --loss kto, of the rated and the mismatched one).

    NaN until a Reference has computed them.
    """

    def __init__(self, pairs: Any) -> None:
        self.pairs = pairs
        self.logprobs = torch.full((len(pairs), 2), torch.nan)  # (M, 2)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.pairs[index], "reference_logprobs": self.logprobs[index]}

    def lengths(self, column: str) -> Any:
        """Lengths of the rows of a column."""
        return self.pairs.lengths(column)


class Reference(Stateful):
    """Log-probabilities of the pairs under the initial policy.

    They are saved in checkpoints, because the trained weights cannot reproduce them.
    """

    def __init__(self, train: Any, held_out: Any) -> None:
        self.pairs = {"train": ReferencePairs(train), "eval": ReferencePairs(held_out)}

    @watchdog.phase("the reference's log-probabilities")
    def compute(self, trainer: Any, rows: Sequence[int], *, is_begun: bool) -> None:
        """Evaluate the policy of a trainer on the training `rows` and all held-out pairs, unless `is_begun`.

        Every rank must call this. Raises ValueError if a run that `is_begun` needs rows that were not
        evaluated.
        """
        train, held_out = self.pairs.values()
        num_missing = int(train.logprobs[rows].isnan().any(1).sum())
        if num_missing and is_begun:
            raise ValueError(
                f"--max_train_steps {trainer.args.max_train_steps}, --num_train_epochs "
                f"{trainer.args.num_train_epochs}: {num_missing} more rows need the "
                "reference's log-probabilities, but the model has been trained since; start over with "
                "--resume overwrite"
            )
        if not is_begun:
            compute_reference(trainer, train, rows)
            compute_reference(trainer, held_out, range(len(held_out)))

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """All log-probabilities, on the first rank; every rank has the same."""
        if distributed.is_main():
            for name, pairs in self.pairs.items():
                yield TensorSlice(name, 0, pairs.logprobs.flatten())

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Load saved log-probabilities."""
        for name, pairs in self.pairs.items():
            pairs.logprobs = reader.read(name, 0, pairs.logprobs.numel()).view(-1, 2)


@torch.no_grad()
def compute_reference(trainer: Any, pairs: ReferencePairs, rows: Sequence[int]) -> None:
    """Fill in the reference log-probabilities of these rows by the current policy in eval mode.

    Every rank must call this. Each rank computes its share.
    """
    if not rows:
        return
    trainer.engine.eval()
    lengths = pairs.lengths(f"{trainer.sides[0]}_ids")
    by_length = sorted(rows, key=lambda row: (lengths[row], row))  # by length, for less padding
    args = trainer.args
    size = args.per_device_eval_batch_size or args.per_device_train_batch_size
    rank = distributed.rank()
    num_rows = size * distributed.world_size()
    batches = [by_length[first : first + num_rows] for first in range(0, len(by_length), num_rows)]
    for batch_rows in watched(batches, len(batches), "batches"):
        if not pairs.logprobs[batch_rows].isnan().any():  # by a run that was stopped in this pass
            continue
        own = batch_rows[rank * size :][:size]
        batch = own or by_length[:1]  # every rank makes a pass
        logprobs = trainer.compute_logprobs(collate_pairs([pairs[row] for row in batch])).view(-1, 2)
        computed = torch.zeros(len(batch_rows), 2, dtype=torch.float64)
        computed[rank * size :][: len(own)] = logprobs[: len(own)].double().cpu()
        # Each row has one rank's value and zeros: the sum is that value.
        pairs.logprobs[batch_rows] = distributed.reduce_sum(computed).float()
