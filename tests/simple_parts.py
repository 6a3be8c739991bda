"""Parts of a checkpoint that are as simple as can be."""

from collections.abc import Iterator
from typing import Any

import torch

from common.ranks import distributed
from common.runs.saved_state import Stateful, TensorReader, TensorSlice


class SimplePart(Stateful):
    """A flat tensor, of which every rank owns a run, and a number."""

    def __init__(self, version: int = 0, numel: int = 1000) -> None:
        self.numel = numel
        self.set(version)

    def set(self, version: int) -> None:
        """Become another state: every byte of the tensor tells which."""
        self.version = version
        self.tensor = torch.full((self.numel,), version, dtype=torch.int64)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        size = -(-self.numel // distributed.world_size())
        start = distributed.rank() * size
        yield TensorSlice("tensor", start, self.tensor[start : start + size])

    def json_state(self) -> dict[str, Any]:
        return {"version": self.version}

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        self.version, self.tensor = state["version"], reader.read("tensor", 0, self.numel)

    def whole_version(self) -> int:
        """Which state it is; a mixture of two fails."""
        assert self.tensor.unique().tolist() == [self.version]
        return self.version


def make_parts(version: int = 0) -> dict[str, SimplePart]:
    """Two parts, one of them with more than a page of memory."""
    return {"model": SimplePart(version, 5000), "loop": SimplePart(version, 3)}


def versions(parts: dict[str, SimplePart]) -> set[int]:
    """Which states the parts are in: one, or the checkpoint was a mixture."""
    return {part.whole_version() for part in parts.values()}
