"""Parts of a checkpoint that every program has: how far it is, and its random numbers."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch

from common.ranks import distributed
from common.runs.durable_files import without_nan
from common.runs.pieces import Piece, PieceReader


@dataclass
class Progress:
    """Steps that are done, what the export will say, and which data they were."""

    data_key: str  # changes with the data and with all that decides its rows
    rows: dict[str, int]  # over all ranks, by the flags whose product with the number of ranks they are
    step: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    about_data: dict[str, int] = field(default_factory=dict)  # for run.json, see `DataReport.facts`

    def pieces(self) -> Iterator[Piece]:
        """Give nothing."""
        return iter(())

    def numbers(self) -> dict[str, Any]:
        """Return all of it."""
        return {
            "step": self.step,
            "facts": without_nan(self.facts),
            "data_key": self.data_key,
            "rows": self.rows,
        }

    def load(self, reader: PieceReader, numbers: dict[str, Any]) -> None:
        """Go on from what was saved; ValueError when the data or the rows of a step or update differ."""
        if numbers["data_key"] != self.data_key:
            raise ValueError(
                "the data have changed since it was saved, so its place in them means nothing; bring the old "
                "data back, or start a new run from its export"
            )
        for flags, now in self.rows.items():
            before = numbers["rows"][flags]
            if now != before:
                raise ValueError(
                    f"{flags} x number of ranks was {before}, now it is {now}, which makes other updates: "
                    f"choose them so that their product stays {before}"
                )
        self.step, self.facts = numbers["step"], numbers["facts"]


@contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Let the block draw what it likes: the generators of python, numpy and torch are then as they were."""
    states = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng([distributed.device()] if distributed.has_gpu() else []):
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


class RandomState:
    """The generators of python, numpy and torch on every rank.

    More ranks than were saved share what there is; what is drawn (dropout) then differs from a run that was
    not stopped.
    """

    def pieces(self) -> Iterator[Piece]:
        """Give this rank's states as bytes."""
        rank = distributed.rank()
        numpy_state = numpy.random.get_state()
        of_python = {
            "python": random.getstate(),
            "numpy": [numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]],
        }
        text = torch.frombuffer(bytearray(json.dumps(of_python).encode()), dtype=torch.uint8)
        yield Piece(f"{rank}:python", 0, text)
        yield Piece(f"{rank}:torch", 0, torch.get_rng_state())
        if distributed.has_gpu():
            yield Piece(f"{rank}:cuda", 0, torch.cuda.get_rng_state())

    def numbers(self) -> dict[str, Any]:
        """Return how many ranks there are."""
        return {"world_size": distributed.world_size()}

    def load(self, reader: PieceReader, numbers: dict[str, Any]) -> None:
        """Set all generators of this rank."""
        rank = distributed.rank() % numbers["world_size"]
        of_python = json.loads(bytes(reader.read(f"{rank}:python").tolist()))
        version, internal, gauss = of_python["python"]
        random.setstate((version, tuple(internal), gauss))
        kind, keys, *rest = of_python["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
        torch.set_rng_state(reader.read(f"{rank}:torch"))
        if distributed.has_gpu() and reader.numel(f"{rank}:cuda"):
            torch.cuda.set_rng_state(reader.read(f"{rank}:cuda"))
