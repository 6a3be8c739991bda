"""All that moves in the PPO loop beside the engines, a part of a checkpoint; and a step not finished yet."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from common.data.packed_batch import PackedBatch
from common.ranks import distributed
from common.runs.saved_state import Stateful, TensorReader, TensorSlice

OPEN = "open"


@dataclass
class OpenStep:
    """A PPO step that is being made: all of it that lasts from one minibatch to the next."""

    step: int
    batch: PackedBatch  # with all that the losses read
    summary: dict[str, float]  # what the step's numbers were before its updates
    means: dict[str, list[float]] = field(default_factory=dict)  # one a minibatch that was learned from
    num_minibatches: int = 0  # that are done, refused ones too
    is_done: bool = False  # an early stop

    @property
    def position(self) -> str:
        """Return the name of where the step is: after its last minibatch."""
        return f"update-{self.num_minibatches:04d}"


class TrainerState(Stateful):
    """Controllers, normalisers, counters, rollouts that wait, and a step that is not finished."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def _batches(self) -> dict[str, PackedBatch]:
        trainer = self.trainer
        batches = {f"waiting{i}": batch for i, batch in enumerate(trainer.waiting)}
        return batches | ({OPEN: trainer.open_step.batch} if trainer.open_step else {})

    def _owners(self) -> Mapping[str, Any]:
        trainer = self.trainer
        owners: dict[str, Any] = {
            "rollout": trainer.rollout,
            "losses": trainer.losses,
            "kl": trainer.kl_controller,
            "switch_costs": trainer.roles.actor.hybrid_engine.costs,
        }
        if trainer.evaluation:
            owners["evaluation"] = trainer.evaluation
        if trainer.value_normaliser:
            owners["value_norm"] = trainer.value_normaliser
        return owners

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Give the rows that this rank holds."""
        for name, batch in self._batches().items():
            prefix = f"{name}:{distributed.rank()}"
            yield TensorSlice(f"{prefix}:ids", 0, torch.tensor(batch.ids, dtype=torch.int64))
            for key in batch.data:  # columns may share their memory, which a file's slices must not
                yield TensorSlice(f"{prefix}:{key}:data", 0, batch.data[key].clone())
                yield TensorSlice(f"{prefix}:{key}:lengths", 0, batch.lengths[key].clone())

    def json_state(self) -> dict[str, Any]:
        """Return the rest."""
        trainer = self.trainer
        keys = {name: list(batch.data) for name, batch in self._batches().items()}
        state = {name: owner.state_dict() for name, owner in self._owners().items()}
        state |= {"keys": keys, "num_ranks": distributed.world_size()}
        state["num_prompts"] = trainer.prompts.num_drawn
        if trainer.open_step:
            kept = dataclasses.fields(OpenStep)
            state[OPEN] = {f.name: getattr(trainer.open_step, f.name) for f in kept if f.name != "batch"}
        return state

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Take what was saved, rows by any number of ranks."""
        trainer = self.trainer
        for name, owner in self._owners().items():
            owner.load_state_dict(state[name])
        batches = {
            name: _read_rows(reader, name, keys, state["num_ranks"]) for name, keys in state["keys"].items()
        }
        is_open = OPEN in batches
        trainer.open_step = OpenStep(batch=batches.pop(OPEN), **state[OPEN]) if is_open else None
        trainer.waiting = deque(batches.values())
        trainer.prompts.skip_to(state["num_prompts"])


def _read_rows(reader: TensorReader, name: str, keys: list[str], num_ranks: int) -> PackedBatch:
    """Return this rank's share of the rows that `num_ranks` have saved: as many on each, groups whole."""
    parts, first = [], 0
    num_rows = sum(reader.numel(f"{name}:{rank}:ids") for rank in range(num_ranks))
    share = num_rows // distributed.world_size()
    begin, end = distributed.rank() * share, (distributed.rank() + 1) * share
    for rank in range(num_ranks):
        num_here = reader.numel(f"{name}:{rank}:ids")
        rows = range(max(begin - first, 0), max(min(end - first, num_here), 0))
        first += num_here
        if len(rows):
            parts.append(_read_batch(reader, f"{name}:{rank}", keys).select(rows))
    return PackedBatch.concat(parts)


def _read_batch(reader: TensorReader, prefix: str, keys: list[str]) -> PackedBatch:
    ids = reader.read(f"{prefix}:ids").tolist()
    data, lengths = (
        {key: reader.read(f"{prefix}:{key}:{part}") for key in keys} for part in ("data", "lengths")
    )
    return PackedBatch(tuple(ids), data, lengths)
