"""Runs of named flat tensors in safetensors files: each rank writes what it owns, any rank reads any run."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file


class Piece(NamedTuple):
    """A run of a flat tensor."""

    key: str
    start: int
    tensor: torch.Tensor  # (numel,) of any dtype, on any device


class PieceReader:
    """Reads runs from the files of all ranks, whatever runs these were written in."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = [safe_open(file, "pt") for file in files]
        # key -> (start, end, file, name there), in order
        self.index: dict[str, list[tuple[int, int, int, str]]] = defaultdict(list)
        for number, file in enumerate(self.files):
            for name in file.keys():  # noqa: SIM118  (it is no dictionary)
                key, start = name.rsplit("@", 1)
                end = int(start) + file.get_slice(name).get_shape()[0]
                self.index[key].append((int(start), end, number, name))
        for runs in self.index.values():
            runs.sort()

    def numel(self, key: str) -> int:
        """Return the length of a flat tensor, 0 for one that is not there."""
        return max((end for _, end, _, _ in self.index.get(key, ())), default=0)

    def read(self, key: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Return elements start to start + numel (None: to the end) of a flat tensor.

        Raises ValueError when they are not all there.
        """
        end = self.numel(key) if numel is None else start + numel
        parts = []
        place = start
        for first, last, number, name in self.index.get(key, ()):
            if last <= place or first >= end:
                continue
            if first > place:
                break
            parts.append(self.files[number].get_slice(name)[place - first : min(end, last) - first])
            place = min(end, last)
        if place < end or not self.index.get(key):
            raise ValueError(f"it holds {self.numel(key)} elements of {key}, not the {end} that are needed")
        if not parts:  # nothing, of the right dtype
            _, _, number, name = self.index[key][0]
            parts = [self.files[number].get_slice(name)[:0]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def write_pieces(file: Path, pieces: Iterable[Piece]) -> None:
    """Write a rank's pieces; keys may hold any text."""
    named: dict[str, torch.Tensor] = {}
    for piece in pieces:
        name = f"{piece.key}@{piece.start}"
        assert name not in named, f"two pieces of {piece.key} begin at {piece.start}"
        named[name] = piece.tensor.detach().cpu().contiguous()
    save_file(_without_overlaps(named), file)


def _without_overlaps(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, with copies of those that share memory: safetensors refuses them.

    Runs of one buffer that lie side by side are no copies: they are most of a checkpoint.
    """
    apart = {}
    ends: dict[int, int] = {}  # of what was taken from a storage so far
    for name, tensor in sorted(tensors.items(), key=lambda named: named[1].data_ptr()):
        storage, place = tensor.untyped_storage().data_ptr(), tensor.data_ptr()
        if place < ends.get(storage, 0):
            tensor = tensor.clone()
        else:
            ends[storage] = place + tensor.nbytes
        apart[name] = tensor
    return apart
