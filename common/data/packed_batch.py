"""Sequences of any length laid end to end, without padding. PURE: imports torch only.

The layout of flash_attn_varlen_func, with several keys side by side as in ReaL's SequenceSample
(arXiv:2406.14088): an item (a prompt, say) may have one sequence of one key, K of another, none of a third.

# B items, S sequences of a key over all items, T tokens of the longest, total tokens of all S
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad as pad_ends

ROW_IDS = "row_ids"  # the key of texts that name the row of data an item was made of


@dataclass(frozen=True, eq=False)  # eq compares tensors as if they were booleans, and fails
class PackedBatch:
    """B items, each with its sequences of every key; items outside, an item's sequences inside.

    `lengths` and `group_ids` stay on the CPU wherever the data are: they steer Python. What a method returns
    may share memory with the batch it came from.
    """

    ids: tuple[Hashable, ...]  # (B,), no two alike
    data: dict[str, torch.Tensor]  # key -> (total, ...)
    lengths: dict[str, torch.Tensor]  # key -> (S,) int64
    group_ids: dict[str, torch.Tensor]  # key -> (S,) int64 into ids, never decreasing

    @classmethod
    def build(
        cls, ids: Sequence[Hashable], sequences: dict[str, Sequence[Sequence[torch.Tensor]]]
    ) -> "PackedBatch":
        """Batch of sequences[key][item] = a list of tensors (length, ...), which may be empty.

        Raises ValueError, naming the key, for a list that has not one entry an item, tensors that differ in
        dtype, device or trailing shape, and a key without a single sequence: nobody knows its dtype.
        """
        data, lengths, group_ids = {}, {}, {}
        for key, of_items in sequences.items():
            if len(of_items) != len(ids):
                raise ValueError(f"key {key!r}: sequences of {len(of_items)} items for {len(ids)} ids")
            flat = [tensor for of_item in of_items for tensor in of_item]
            _check_alike(key, flat)
            data[key] = torch.cat(flat)
            lengths[key] = torch.tensor([len(tensor) for tensor in flat])
            counts = torch.tensor([len(of_item) for of_item in of_items])
            group_ids[key] = torch.arange(len(ids)).repeat_interleave(counts)
        batch = cls(tuple(ids), data, lengths, group_ids)
        batch.check()
        return batch

    @classmethod
    def single(cls, item_id: Hashable, /, **keys: torch.Tensor | Sequence[torch.Tensor]) -> "PackedBatch":
        """Batch of one item; the value of a key is its sequence or the list of them."""
        values = {k: [v] if isinstance(v, torch.Tensor) else v for k, v in keys.items()}
        return cls.build((item_id,), {key: [value] for key, value in values.items()})

    @classmethod
    def from_lengths(
        cls,
        ids: Sequence[Hashable],
        data: dict[str, torch.Tensor],
        lengths: dict[str, torch.Tensor | Sequence[int]],
    ) -> "PackedBatch":
        """Batch of one sequence an item for every key: data[key] (total, ...), lengths[key] (B,).

        Raises what `check` raises.
        """
        on_cpu = {key: torch.as_tensor(value, dtype=torch.int64).cpu() for key, value in lengths.items()}
        group_ids = {key: torch.arange(len(value)) for key, value in on_cpu.items()}
        batch = cls(tuple(ids), dict(data), on_cpu, group_ids)
        for key, value in on_cpu.items():
            if value.shape != (len(batch),):
                raise ValueError(f"key {key!r}: lengths {tuple(value.shape)} for {len(batch)} ids")
        batch.check()
        return batch

    @classmethod
    def concat(cls, parts: Sequence["PackedBatch"]) -> "PackedBatch":
        """Batches end to end, in order: undoes `split`.

        Raises ValueError when there is none, their keys or a key's dtypes differ, or an id comes twice.
        """
        if not parts:
            raise ValueError("no batches to put end to end")
        ids = tuple(item_id for part in parts for item_id in part.ids)
        _check_unique(ids)
        keys = list(parts[0].data)
        for part in parts:
            if set(part.data) != set(keys):
                raise ValueError(f"keys {sorted(part.data)} of one batch, {sorted(keys)} of another")
        for key in keys:
            _check_alike(key, [part.data[key] for part in parts])
        firsts = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).tolist()
        data = {key: torch.cat([part.data[key] for part in parts]) for key in keys}
        lengths = {key: torch.cat([part.lengths[key] for part in parts]) for key in keys}
        group_ids = {
            key: torch.cat([part.group_ids[key] + first for part, first in zip(parts, firsts, strict=False)])
            for key in keys
        }
        return cls(ids, data, lengths, group_ids)

    @classmethod
    def unpad(
        cls, ids: Sequence[Hashable], columns: dict[str, tuple[torch.Tensor, torch.Tensor]]
    ) -> "PackedBatch":
        """Batch of one sequence an item: what a column's mask (B, T) bool selects of its tensor (B, T, ...).

        The mask may select any positions: left-padded, right-padded, with holes. On a GPU this waits for it.
        Raises ValueError, naming the key, for shapes that do not match or a mask that is not bool.
        """
        data, lengths, group_ids = {}, {}, {}
        for key, (padded, mask) in columns.items():
            if mask.dtype != torch.bool:
                raise ValueError(f"key {key!r}: mask must be bool, not {mask.dtype}")
            if mask.ndim != 2 or mask.shape != padded.shape[:2] or len(mask) != len(ids):
                shapes = f"tensor {tuple(padded.shape)} and mask {tuple(mask.shape)}"
                raise ValueError(f"key {key!r}: {shapes} for {len(ids)} ids")
            data[key] = padded[mask]
            lengths[key] = mask.sum(dim=1).cpu()
            group_ids[key] = torch.arange(len(ids))
        _check_unique(ids)
        return cls(tuple(ids), data, lengths, group_ids)

    def __len__(self) -> int:
        return len(self.ids)

    def split(self, counts: Sequence[int]) -> list["PackedBatch"]:
        """Consecutive items, counts[i] of them in part i: views of the data.

        Raises ValueError when a count is negative or they do not add up to the items.
        """
        if sum(counts) != len(self) or min(counts, default=0) < 0:
            raise ValueError(f"counts {list(counts)} must be 0 or more and add up to {len(self)} items")
        ends = torch.tensor(counts, dtype=torch.int64).cumsum(0)
        cuts = [0, *ends.tolist()]
        data, lengths, group_ids = {}, {}, {}
        for key, group in self.group_ids.items():
            last = torch.searchsorted(group, ends)  # sequences before the end of each part
            num_sequences = last.diff(prepend=last.new_zeros(1)).tolist()
            num_tokens = self._starts(key)[last].diff(prepend=last.new_zeros(1)).tolist()
            data[key] = self.data[key].split(num_tokens)
            lengths[key] = self.lengths[key].split(num_sequences)
            group_ids[key] = group.split(num_sequences)
        return [
            PackedBatch(
                self.ids[first : first + count],
                {key: tensors[part] for key, tensors in data.items()},
                {key: tensors[part] for key, tensors in lengths.items()},
                {key: tensors[part] - first for key, tensors in group_ids.items()},
            )
            for part, (first, count) in enumerate(zip(cuts, counts, strict=False))
        ]

    def select(self, indexes: Sequence[int] | torch.Tensor) -> "PackedBatch":
        """Items `indexes`, in that order.

        Raises ValueError for an index that is no integer, out of range, or there twice: ids stay unique.
        """
        index = torch.as_tensor(indexes).cpu()
        if not len(index):
            index = index.long()
        if index.dtype == torch.bool or index.is_floating_point():
            raise ValueError(f"indexes must be integers, not {index.dtype}")
        chosen = index.tolist()
        if chosen and not 0 <= min(chosen) <= max(chosen) < len(self):
            raise ValueError(f"indexes {chosen} must be from 0 to {len(self) - 1}")
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"indexes {chosen} must not have one twice")
        data, lengths, group_ids = {}, {}, {}
        for key, group in self.group_ids.items():
            counts = group.bincount(minlength=len(self))  # (B,) sequences of each item
            first = counts.cumsum(0) - counts
            data[key], lengths[key] = self._take(key, _spans(first[index], counts[index]))
            group_ids[key] = torch.arange(len(index)).repeat_interleave(counts[index])
        return PackedBatch(tuple(self.ids[i] for i in chosen), data, lengths, group_ids)

    def ungroup(self, like: str) -> "PackedBatch":
        """Batch in which every sequence of key `like` is an item: the k-th of item `id` has the id (id, k).

        Keys of one sequence an item are repeated for each, keys grouped as `like` go along. An item without
        a sequence of `like` is gone. Raises ValueError for any other key: whose are its sequences?
        """
        group = self._group(like)
        counts = group.bincount(minlength=len(self))
        within = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group]
        data, lengths = {}, {}
        for key, other in self.group_ids.items():
            if torch.equal(other, group):
                data[key], lengths[key] = self.data[key], self.lengths[key]
            elif torch.equal(other, torch.arange(len(self))):
                data[key], lengths[key] = self._take(key, group)
            else:
                raise ValueError(f"key {key!r}: neither one sequence an item, nor as many as {like!r}")
        pairs = zip(group.tolist(), within.tolist(), strict=True)
        alone = torch.arange(len(group))
        return PackedBatch(
            tuple((self.ids[g], k) for g, k in pairs), data, lengths, dict.fromkeys(data, alone)
        )

    def pad(
        self, key: str, *, pad_value: float = 0, on_left: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequences of a key as (S, T, ...), and the mask (S, T) bool of what is no padding."""
        self._group(key)
        data, lengths = self.data[key], self.lengths[key]
        num_rows, width = len(lengths), max(lengths.tolist(), default=0)
        starts = torch.arange(num_rows) * width
        if on_left:
            starts += width - lengths
        # By index and not by mask: a boolean index makes the host wait for the GPU.
        positions = _spans(starts, lengths, data.device)
        flat = data.new_full((num_rows * width, *data.shape[1:]), pad_value).index_copy(0, positions, data)
        mask = torch.zeros(num_rows * width, dtype=torch.bool, device=data.device)
        mask.index_fill_(0, positions, True)
        return flat.view(num_rows, width, *data.shape[1:]), mask.view(num_rows, width)

    def with_key(self, key: str, data: torch.Tensor, *, like: str) -> "PackedBatch":
        """Batch with one key more, or another under its name: data (total, ...) cut as the key `like`."""
        group, lengths = self._group(like), self.lengths[like]
        if data.ndim < 1 or len(data) != len(self.data[like]):
            wanted = len(self.data[like])
            raise ValueError(f"key {key!r}: data {tuple(data.shape)}, but {like!r} has {wanted} tokens")
        return self._plus(key, data, lengths, group)

    def with_numbers(self, key: str, values: torch.Tensor) -> "PackedBatch":
        """Batch with one number an item more: values (B,), read back by `numbers`."""
        if values.shape != (len(self),):
            raise ValueError(f"key {key!r}: values {tuple(values.shape)} for {len(self)} items")
        ones = torch.ones(len(self), dtype=torch.int64)
        return self._plus(key, values, ones, torch.arange(len(self)))

    def join(self, other: "PackedBatch") -> "PackedBatch":
        """The same items with the keys of both batches; those of `other` win.

        Raises ValueError when the ids differ.
        """
        if self.ids != other.ids:
            raise ValueError("batches of other items cannot be joined")
        fields = ("data", "lengths", "group_ids")
        return replace(self, **{name: getattr(self, name) | getattr(other, name) for name in fields})

    def without(self, *keys: str) -> "PackedBatch":
        """Batch without these keys."""
        for key in keys:
            self._group(key)
        left = [key for key in self.data if key not in keys]
        fields = (self.data, self.lengths, self.group_ids)
        return PackedBatch(self.ids, *({key: field[key] for key in left} for field in fields))

    def numbers(self, key: str) -> torch.Tensor:
        """Values (B,) of a key that has exactly one token an item; ValueError for any other key."""
        one_each = torch.equal(self._group(key), torch.arange(len(self)))
        if not one_each or not bool((self.lengths[key] == 1).all()):
            raise ValueError(f"key {key!r}: not one number an item, but lengths {self.lengths[key].tolist()}")
        return self.data[key]

    def with_texts(self, key: str, texts: Sequence[str]) -> "PackedBatch":
        """Batch with one text an item more, as UTF-8; read back by `texts`."""
        encoded = [text.encode(errors="replace") for text in texts]
        data = torch.tensor([byte for text in encoded for byte in text], dtype=torch.uint8)
        return self.join(self.from_lengths(self.ids, {key: data}, {key: [len(text) for text in encoded]}))

    def texts(self, key: str) -> list[str]:
        """Texts (B,) of a key that `with_texts` made."""
        return [bytes(sequence.tolist()).decode() for sequence in self.sequences(key)]

    def to(self, device: torch.device | str) -> "PackedBatch":
        """Batch with its data on `device`; lengths and group_ids stay on the CPU."""
        return replace(self, data={key: tensor.to(device) for key, tensor in self.data.items()})

    def cu_seqlens(self, key: str) -> torch.Tensor:
        """Where each sequence starts and the last one ends: (S + 1,) int32 on the data's device."""
        self._group(key)
        return self._starts(key).to(dtype=torch.int32).to(self.data[key].device)

    def sequences(self, key: str) -> list[torch.Tensor]:
        """Sequences (length, ...) of a key: views of its data."""
        self._group(key)
        return list(self.data[key].split(self.lengths[key].tolist()))

    def check(self) -> None:
        """Raise ValueError that names the key and what is wrong; for tests, and where a batch comes in."""
        _check_unique(self.ids)
        for name, field in (("lengths", self.lengths), ("group_ids", self.group_ids)):
            if set(field) != set(self.data):
                raise ValueError(f"keys {sorted(field)} of {name}, {sorted(self.data)} of data")
        for key in self.data:
            wrong = self._what_is_wrong(key)
            if wrong:
                raise ValueError(f"key {key!r}: {wrong}")

    def _what_is_wrong(self, key: str) -> str:
        data, lengths, group = self.data[key], self.lengths[key], self.group_ids[key]
        for name, tensor in (("lengths", lengths), ("group_ids", group)):
            if tensor.dtype != torch.int64 or tensor.device.type != "cpu" or tensor.ndim != 1:
                of = f"{tensor.dtype} of shape {tuple(tensor.shape)} on {tensor.device}"
                return f"{name} must be one row of int64 on the CPU, not {of}"
        if len(lengths) != len(group):
            return f"{len(lengths)} lengths, but {len(group)} group_ids"
        if bool((lengths < 0).any()):
            return f"a negative length among {lengths.tolist()}"
        if data.ndim < 1 or int(lengths.sum()) != len(data):
            return f"lengths add up to {int(lengths.sum())}, data are {tuple(data.shape)}"
        if bool((group.diff() < 0).any()):
            return f"group_ids {group.tolist()} decrease"
        if len(group) and not 0 <= int(group[0]) <= int(group[-1]) < len(self):
            return f"group_ids {group.tolist()} for {len(self)} ids"
        return ""

    def _group(self, key: str) -> torch.Tensor:
        """Return the group_ids of a key that must be there."""
        if key not in self.group_ids:
            raise ValueError(f"key {key!r} is not among {sorted(self.group_ids)}")
        return self.group_ids[key]

    def _starts(self, key: str) -> torch.Tensor:
        """Return (S + 1,) int64 on the CPU: tokens before each sequence, and all of them."""
        return pad_ends(self.lengths[key].cumsum(0), (1, 0))

    def _take(self, key: str, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the data and the lengths of sequences `rows` (N,) of a key, in that order."""
        data, lengths = self.data[key], self.lengths[key][rows]
        return data.index_select(0, _spans(self._starts(key)[rows], lengths, data.device)), lengths

    def _plus(
        self, key: str, data: torch.Tensor, lengths: torch.Tensor, group: torch.Tensor
    ) -> "PackedBatch":
        return PackedBatch(
            self.ids,
            self.data | {key: data},
            self.lengths | {key: lengths},
            self.group_ids | {key: group},
        )


def _spans(starts: torch.Tensor, lengths: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Positions starts[i] .. starts[i] + lengths[i] - 1 of every i, end to end: int64 on `device`."""
    total = int(lengths.sum())  # on the CPU: no wait, and output_size spares repeat_interleave another
    shifts = starts - (lengths.cumsum(0) - lengths)
    shifts, lengths = torch.stack((shifts, lengths)).to(device)
    return torch.arange(total, device=device) + shifts.repeat_interleave(lengths, output_size=total)


def _check_unique(ids: Sequence[Hashable]) -> None:
    seen: set[Hashable] = set()
    for item_id in ids:
        if item_id in seen:
            raise ValueError(f"id {item_id!r} comes twice")
        seen.add(item_id)


def _check_alike(key: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise unless torch.cat takes the tensors as they are: it would promote dtypes without a word."""
    if not tensors:
        raise ValueError(f"key {key!r}: no sequence at all, so its dtype is unknown; leave the key out")
    if any(tensor.ndim < 1 for tensor in tensors):
        raise ValueError(f"key {key!r}: a sequence without a length; give each item a list of (length, ...)")
    kinds = {(tensor.dtype, tensor.shape[1:], tensor.device) for tensor in tensors}
    if len(kinds) > 1:
        names = sorted(f"{dtype} (length, {', '.join(map(str, s))}) on {d}" for dtype, s, d in kinds)
        raise ValueError(f"key {key!r}: sequences differ: {'; '.join(names)}")
