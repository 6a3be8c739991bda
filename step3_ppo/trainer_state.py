"""All that moves in the PPO loop beside the engines, a part of a checkpoint; and a step not finished yet."""

import dataclasses
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from common.data.packed_batch import PackedBatch
from common.ranks import distributed
from common.runs.saved_state import Stateful, TensorReader, TensorSlice

OPEN = "open"


@dataclass
class OpenStep:
    """A PPO step that is being made: all of it that lasts from one minibatch to the next."""

    step: int
    record: PackedBatch  # with all that the losses read
    summary: dict[str, float]  # what the step's numbers were before its updates
    means: dict[str, list[float]] = field(default_factory=dict)  # one a minibatch that was learned from
    num_minibatches: int = 0  # that are done, refused ones too
    is_done: bool = False  # an early stop


class TrainerState(Stateful):
    """Controllers, normalisers, counters, rollouts that wait, and a step that is not finished."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def _records(self) -> dict[str, PackedBatch]:
        trainer = self.trainer
        records = {f"waiting{i}": record for i, record in enumerate(trainer.waiting)}
        return records | ({OPEN: trainer.open_step.record} if trainer.open_step else {})

    def _owners(self) -> Mapping[str, Any]:
        trainer = self.trainer
        owners: dict[str, Any] = {"rollout": trainer.rollout, "losses": trainer.losses}
        owners["kl"] = trainer.kl_controller
        if trainer.evaluation and trainer.evaluation.is_held_out:
            owners["evaluation"] = trainer.evaluation
        return owners | ({"value_norm": trainer.value_normaliser} if trainer.value_normaliser else {})

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Give the records; every rank holds all of them, the first one writes."""
        for name, record in self._records().items() if distributed.is_main() else ():
            for key in record.data:
                # Keys share tensors, and a file of safetensors must hold each once.
                yield TensorSlice(f"{name}:{key}:data", 0, record.data[key].clone())
                yield TensorSlice(f"{name}:{key}:lengths", 0, record.lengths[key].clone())

    def json_state(self) -> dict[str, Any]:
        """Return the rest."""
        trainer = self.trainer
        records = {name: {"ids": r.ids, "keys": list(r.data)} for name, r in self._records().items()}
        found = {name: owner.state_dict() for name, owner in self._owners().items()}
        found |= {"records": records, "num_prompts": trainer.prompts.num_drawn}
        if trainer.open_step:
            kept = dataclasses.fields(OpenStep)
            found[OPEN] = {f.name: getattr(trainer.open_step, f.name) for f in kept if f.name != "record"}
        return found

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Go on with what was saved."""
        trainer = self.trainer
        for name, owner in self._owners().items():
            owner.load_state_dict(state[name])
        records = {name: _read_record(reader, name, told) for name, told in state["records"].items()}
        is_open = OPEN in records
        trainer.open_step = OpenStep(record=records.pop(OPEN), **state[OPEN]) if is_open else None
        trainer.waiting = deque(records.values())
        trainer.prompts.skip_to(state["num_prompts"])


def _read_record(reader: TensorReader, name: str, told: dict[str, Any]) -> PackedBatch:
    parts = [
        {key: reader.read(f"{name}:{key}:{part}") for key in told["keys"]} for part in ("data", "lengths")
    ]
    return PackedBatch(tuple(told["ids"]), *parts)
