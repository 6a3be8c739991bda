"""The batch type: sequences of any length laid end to end, without padding. PURE: imports torch only.

The layout of flash_attn_varlen_func with several keys: the one batch type from collators to models. Layouts
are computed from lengths that stay on the CPU, so nothing waits for a GPU to read a length.

# B items (a row, a pair, a response), T tokens of the longest sequence, total tokens of all
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

PADDED_TOKENS = 32_768  # at most, padding included, in a batch that is scored: 64 rows of 512
ROW_IDS = "row_ids"  # key of the texts that name each item's source row


@dataclass(frozen=True, eq=False)  # a generated __eq__ would use the truth value of tensors, and raise
class PackedBatch:
    """B items, each with one sequence per key; a number is a sequence of length 1.

    `lengths` stay on the CPU wherever the data are. Results of methods may share memory with the batch.
    """

    ids: tuple[Hashable, ...]  # (B,), unique
    data: dict[str, torch.Tensor]  # key -> (total, ...)
    lengths: dict[str, torch.Tensor]  # key -> (B,) int64

    @classmethod
    def build(cls, ids: Sequence[Hashable], sequences: dict[str, Sequence[torch.Tensor]]) -> "PackedBatch":
        """Batch of sequences[key][item] (length, ...).

        Asserts that every list has one sequence per item, and that a key's sequences have the same dtype,
        device and trailing shape: torch.cat would promote dtypes silently.
        """
        data = {key: _join(key, items) for key, items in sequences.items()}
        lengths = {key: torch.tensor([len(x) for x in items]) for key, items in sequences.items()}
        batch = cls(tuple(ids), data, lengths)
        batch.check()
        return batch

    @classmethod
    def concat(cls, parts: Sequence["PackedBatch"]) -> "PackedBatch":
        """Batches end to end, in order.

        Asserts that there is at least one, that keys and their dtypes are equal, and that no id occurs twice.
        """
        assert parts, "no batches to concatenate"
        keys = list(parts[0].data)
        assert all(part.data.keys() == parts[0].data.keys() for part in parts), "batches differ in their keys"
        data = {key: _join(key, [part.data[key] for part in parts]) for key in keys}
        lengths = {key: torch.cat([part.lengths[key] for part in parts]) for key in keys}
        batch = cls(tuple(item_id for part in parts for item_id in part.ids), data, lengths)
        batch.check()
        return batch

    def __repr__(self) -> str:
        """Number of items, and dtype and shape of each key: the tensors would print thousands of numbers."""
        keys = (f"{key} {tuple(x.shape)} {x.dtype}".replace("torch.", "") for key, x in self.data.items())
        return f"PackedBatch of {len(self)}: {', '.join(keys)}"

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, indexes: Sequence[int] | torch.Tensor) -> "PackedBatch":
        """Items `indexes`, in that order.

        Raises IndexError for an index out of range; asserts that none occurs twice.
        """
        index = torch.as_tensor(indexes, dtype=torch.int64, device="cpu")
        data, lengths = {}, {}
        for key, key_lengths in self.lengths.items():
            starts = key_lengths.cumsum(0) - key_lengths
            lengths[key] = key_lengths[index]
            positions = token_positions(lengths[key], starts[index])
            data[key] = self.data[key].index_select(0, *to_device([positions], self.data[key].device))
        batch = PackedBatch(tuple(self.ids[i] for i in index.tolist()), data, lengths)
        batch.check()
        return batch

    def interleave(self, *keys: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences of K keys, item by item: (total, ...), and their lengths (B, K) on the CPU.

        With a prompt's key and a response's, each prompt is followed by its response.
        """
        key_lengths = torch.stack([self._lengths(key) for key in keys])  # (K, B)
        starts = (key_lengths.flatten().cumsum(0) - key_lengths.flatten()).view(key_lengths.shape)
        data = torch.cat([self.data[key] for key in keys])
        positions = token_positions(key_lengths.T.flatten(), starts.T.flatten())
        return data.index_select(0, *to_device([positions], data.device)), key_lengths.T

    def pad(self, key: str, *, on_left: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences of a key as (B, T, ...), padded with 0, and the mask (B, T) bool, True for real
        tokens.
        """
        lengths = self._lengths(key)
        return pad_sequences(self.data[key], lengths, on_left=on_left)

    def with_key(
        self, key: str, data: torch.Tensor, *, like: str = "", lengths: torch.Tensor | None = None
    ) -> "PackedBatch":
        """Batch with an added or replaced key: data (total, ...), with the lengths of the key `like` or
        `lengths` (B,) int64.
        """
        lengths = self._lengths(like) if lengths is None else lengths.cpu()
        batch = replace(self, data=self.data | {key: data}, lengths=self.lengths | {key: lengths})
        batch._check_key(key)
        return batch

    def with_numbers(self, key: str, values: torch.Tensor) -> "PackedBatch":
        """Batch with an added number per item: values (B,), read back by `numbers`."""
        return self.with_key(key, values, lengths=torch.ones(len(self), dtype=torch.int64))

    def numbers(self, key: str) -> torch.Tensor:
        """Values (B,) of a key that has exactly one token per item."""
        lengths = self._lengths(key)
        assert bool((lengths == 1).all()), f"key {key!r}: lengths {lengths.tolist()}, not 1"
        return self.data[key]

    def with_texts(self, key: str, texts: Sequence[str]) -> "PackedBatch":
        """Batch with an added text per item, as UTF-8; read back by `texts`."""
        encoded = [text.encode(errors="replace") for text in texts]
        data = torch.tensor([byte for text in encoded for byte in text], dtype=torch.uint8)
        return self.with_key(key, data, lengths=torch.tensor([len(text) for text in encoded]))

    def texts(self, key: str) -> list[str]:
        """Texts (B,) of a key from `with_texts`."""
        return [bytes(sequence.tolist()).decode() for sequence in self.sequences(key)]

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Batch with its data on `device`; lengths stay on the CPU."""
        moved = to_device(list(self.data.values()), device)
        return replace(self, data=dict(zip(self.data, moved, strict=True)))

    def sequences(self, key: str) -> list[torch.Tensor]:
        """Sequences (length, ...) of a key: views of its data."""
        return list(self.data[key].split(self._lengths(key).tolist()))

    def check(self) -> None:
        """Assert that the batch is well-formed; the message names the key."""
        assert len(set(self.ids)) == len(self.ids), f"an id occurs twice: {sorted(map(repr, self.ids))}"
        assert self.lengths.keys() == self.data.keys(), (
            f"lengths of {list(self.lengths)}, not {list(self.data)}"
        )
        for key in self.data:
            self._check_key(key)

    def _check_key(self, key: str) -> None:
        lengths = self.lengths[key]
        shape = tuple(self.data[key].shape)
        layout = (lengths.dtype, lengths.device.type, lengths.shape)
        assert layout == (torch.int64, "cpu", (len(self),)), f"key {key!r}: lengths are {layout}"
        assert bool((lengths >= 0).all()), f"key {key!r}: a negative length among {lengths.tolist()}"
        assert shape[:1] == (int(lengths.sum()),), f"key {key!r}: lengths {lengths.tolist()}, data {shape}"

    def _lengths(self, key: str) -> torch.Tensor:
        assert key in self.lengths, f"key {key!r} is not among {sorted(self.lengths)}"
        return self.lengths[key]


def to_device(tensors: Sequence[torch.Tensor], device: torch.device | str) -> list[torch.Tensor]:
    """The tensors on a device. CPU tensors are copied to a GPU together, as one block of pinned memory,
    without waiting.
    """
    if torch.device(device).type != "cuda" or any(tensor.is_cuda for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())  # keeps all aligned
    parts = [tensors[i].contiguous().flatten().view(torch.uint8) for i in order]
    block = torch.cat(parts).pin_memory().to(device, non_blocking=True)
    moved = dict(zip(order, block.split([len(part) for part in parts]), strict=True))
    return [moved[i].view(tensor.dtype).view(tensor.shape) for i, tensor in enumerate(tensors)]


def token_positions(lengths: torch.Tensor, starts: torch.Tensor | None = None) -> torch.Tensor:
    """0, 1, 2, ... within each sequence, or counted from its entry in `starts`: (total,) int64, on the CPU.

    lengths, starts (S,) int64.
    """
    shifts = lengths - lengths.cumsum(0)
    if starts is not None:
        shifts = shifts + starts
    return torch.arange(int(lengths.sum())) + shifts.repeat_interleave(lengths)


def padded_slots(lengths: torch.Tensor, *, on_left: bool = False) -> torch.Tensor:
    """Slot of each token in S padded rows end to end: (total,) int64; lengths (S,), both on the CPU."""
    width = max(lengths.tolist(), default=0)
    starts = torch.arange(len(lengths)) * width
    return token_positions(lengths, starts + width - lengths if on_left else starts)


def pad_sequences(
    data: torch.Tensor, lengths: torch.Tensor, *, pad_value: float = 0, on_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences laid end to end (total, ...) as rows (S, T, ...), and the mask (S, T) bool, True for real
    tokens: the only place that pads tokens. lengths (S,) int64 on the CPU.
    """
    shape = (len(lengths), max(lengths.tolist(), default=0))
    (slots,) = to_device([padded_slots(lengths, on_left=on_left)], data.device)
    flat = data.new_full((shape[0] * shape[1], *data.shape[1:]), pad_value).index_copy(0, slots, data)
    mask = torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=data.device).index_fill(0, slots, True)
    return flat.view(*shape, *data.shape[1:]), mask.view(shape)


def sum_by_sequence(x: torch.Tensor, mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sums (S,) of x (n,) over each of S sequences laid end to end; x has one number per token selected by
    `mask` (total,) bool; mask and lengths (S,) int64 on the CPU.
    """
    sequence = torch.arange(len(lengths)).repeat_interleave(lengths)[mask]  # (n,)
    return x.new_zeros(len(lengths)).index_add(0, *to_device([sequence], x.device), x)


def score_by_length(
    rows: list[Any], batch_size: int, score_batch: Callable[[list[Any]], list[float]]
) -> list[float]:
    """A score per row, computed in batches of rows of similar length, which need little padding.

    A batch has at most `batch_size` rows, and PADDED_TOKENS unless its only row is longer.
    """
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    batches: list[list[int]] = []
    for index in order:
        num_rows = min(batch_size, PADDED_TOKENS // max(len(rows[index]), 1))
        if not batches or len(batches[-1]) >= num_rows:
            batches.append([])
        batches[-1].append(index)
    scores = [score for batch in batches for score in score_batch([rows[index] for index in batch])]
    return [score for _, score in sorted(zip(order, scores, strict=True))]


def pack_rows(rows: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids end to end (total,) int64, and their lengths (S,) int64."""
    token_ids = torch.tensor([token_id for row in rows for token_id in row], dtype=torch.int64)
    return token_ids, torch.tensor([len(row) for row in rows], dtype=torch.int64)


def pad_rows(
    rows: Sequence[Sequence[int]], pad_id: int, *, on_left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids as (S, T) int64, padded with `pad_id`, and their mask: see `pad_sequences`."""
    return pad_sequences(*pack_rows(rows), pad_value=pad_id, on_left=on_left)


def _join(key: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensors of a key end to end; all must be of one kind."""
    kinds = {(tensor.dtype, tensor.shape[1:], tensor.device) for tensor in tensors}
    assert len(kinds) == 1, f"key {key!r}: sequences must be of one kind, not {kinds}"
    return torch.cat(list(tensors))
