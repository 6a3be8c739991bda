"""The state that a checkpoint holds: slices of flat tensors in safetensors files, and what JSON can hold.

Each rank writes the slices that it owns, and any rank reads any slice: M ranks can read what N have saved.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from common.ranks import distributed
from common.runs.durable_files import without_nan


class TensorSlice(NamedTuple):
    """A run of a flat tensor."""

    key: str
    start: int
    tensor: torch.Tensor  # (numel,) of any dtype, on any device


class TensorReader:
    """Reads slices from the files of all ranks, whatever slices these were written in."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = [safe_open(file, "pt") for file in files]
        # key -> (start, end, file, name there), in order
        self.index: dict[str, list[tuple[int, int, int, str]]] = defaultdict(list)
        for number, file in enumerate(self.files):
            for name in file.keys():  # noqa: SIM118  (it is no dictionary)
                key, start = name.rsplit("@", 1)
                end = int(start) + file.get_slice(name).get_shape()[0]
                self.index[key].append((int(start), end, number, name))
        for slices in self.index.values():
            slices.sort()

    def numel(self, key: str) -> int:
        """Return the length of a flat tensor, 0 for one that is not there."""
        return max((end for _, end, _, _ in self.index.get(key, ())), default=0)

    def read(self, key: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Return elements start to start + numel (None: to the end) of a flat tensor.

        Raises ValueError when they are not all there.
        """
        slices = self.index.get(key, [])
        end = self.numel(key) if numel is None else start + numel
        parts = [
            self.files[number].get_slice(name)[max(start - first, 0) : min(end, last) - first]
            for first, last, number, name in slices
            if first < end and start < last
        ]
        if not slices or sum(map(len, parts)) < end - start:
            raise ValueError(f"it holds {self.numel(key)} elements of {key}, not the {end} that are needed")
        if not parts:  # nothing, of the right dtype
            _, _, number, name = slices[0]
            return self.files[number].get_slice(name)[:0]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def write_slices(file: Path, slices: Iterable[TensorSlice]) -> None:
    """Write a rank's slices, no two of which may overlap in memory; keys may hold any text."""
    named: dict[str, torch.Tensor] = {}
    for key, start, tensor in slices:
        name = f"{key}@{start}"
        assert name not in named, f"two slices of {key} begin at {start}"
        named[name] = tensor.detach().cpu().contiguous()
    save_file(named, file)


class Stateful:
    """Something that a checkpoint saves and loads. Every rank must call each method together."""

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Give the slices that this rank owns; none unless overridden."""
        return iter(())

    def json_state(self) -> dict[str, Any]:
        """Return what is no tensor, the same on every rank; nothing unless overridden."""
        return {}

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Take what was saved; `state` is from `json_state`. Raises ValueError when it is not of this run."""
        raise NotImplementedError


@dataclass
class Progress(Stateful):
    """Steps that are done, what the export will say, and which data they were."""

    data_key: str  # changes with the data and with all that decides its rows
    rows: dict[str, int]  # over all ranks, by the flags whose product with the number of ranks they are
    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    about_data: dict[str, int] = field(default_factory=dict)  # for run.json, see `DataReport.facts`

    def json_state(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            "step": self.step,
            "facts": without_nan(self.facts),
            "data_key": self.data_key,
            "rows": self.rows,
        }

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Take the step; ValueError when the data, or the rows of a step or update, differ."""
        if state["data_key"] != self.data_key:
            raise ValueError(
                "the data have changed since it was saved, so its position in them means nothing; bring the "
                "old data back, or start a new run from its export"
            )
        for flags, now in self.rows.items():
            before = state["rows"][flags]
            if now != before:
                raise ValueError(
                    f"{flags} x number of ranks was {before}, now it is {now}, which makes other updates: "
                    f"choose them so that their product stays {before}"
                )
        self.step, self.facts = state["step"], state["facts"]


@contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Let the block sample what it likes: the generators of python, numpy and torch are then as they were."""
    states = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng([distributed.device()] if distributed.has_gpu() else []):
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


class RandomState(Stateful):
    """The generators of python, numpy and torch on every rank.

    More ranks than were saved share what there is; dropout then differs from a run that was
    not stopped.
    """

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Give this rank's states as bytes."""
        rank = distributed.rank()
        numpy_state = numpy.random.get_state()
        of_python = {
            "python": random.getstate(),
            "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        }
        text = torch.frombuffer(bytearray(json.dumps(of_python).encode()), dtype=torch.uint8)
        yield TensorSlice(f"{rank}:python", 0, text)
        yield TensorSlice(f"{rank}:torch", 0, torch.get_rng_state())
        if distributed.has_gpu():
            yield TensorSlice(f"{rank}:cuda", 0, torch.cuda.get_rng_state())

    def json_state(self) -> dict[str, Any]:
        """Return how many ranks there are."""
        return {"world_size": distributed.world_size()}

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Set all generators of this rank."""
        rank = distributed.rank() % state["world_size"]
        of_python = json.loads(bytes(reader.read(f"{rank}:python").tolist()))
        version, internal, gauss = of_python["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, *rest = of_python["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
        torch.set_rng_state(reader.read(f"{rank}:torch"))
        if distributed.has_gpu() and reader.numel(f"{rank}:cuda"):
            torch.cuda.set_rng_state(reader.read(f"{rank}:cuda"))
