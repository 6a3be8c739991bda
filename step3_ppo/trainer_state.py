"""State that is kept between steps, besides the engines: running averages, a step in progress; and its
checkpoints, with waiting rollout batches.

# N tokens of any layout, flat or (B, R); mask (N) bool, tokens that count
"""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch
from torch import nn

from common.data.packed_batch import PackedBatch
from common.ranks import distributed
from common.ranks.zero3 import local_shard, swapped_shards
from common.runs.saved_state import Segment, Stateful, TensorReader, TensorSlice
from step3_ppo.rollout_batch import from_tensors, to_tensors

NUM_TOKENS = "policy/num_tokens"  # tokens of an update that the actor was trained on
# Endings of the metrics that are means over the updates of a step; all others are means over their tokens.
MEANS_OVER_UPDATES = ("/loss", "unsup_loss", "router_loss", "grad_norm", "learning_rate")
MIN_VARIANCE = 1e-5  # of returns: avoids a division by 0 for equal ones


class ValueNormaliser:
    """Running mean and variance of all returns: exponential average ("exp") or average over all ("ma").

    The critic's output is in normalised units; `denormalise` converts it back. "exp" is the debiased average
    of MAPPO's ValueNorm (arXiv:2103.01955) and of ReaL: an update keeps `beta` of the old value. "ma" weighs
    every token equally and ignores `beta`. Before the first update both directions are the identity.
    """

    def __init__(self, kind: str, beta: float = 0.99995) -> None:
        self.kind, self.beta = kind, beta
        self.weight = 0.0  # "exp": 1 - beta^updates, the debiasing term; "ma": tokens seen
        self.mean = 0.0
        self.variance = 0.0

    def update(self, returns: torch.Tensor, mask: torch.Tensor) -> None:
        """Add the counted returns (N) of all ranks, in real units; without any, nothing changes.

        Every rank must call this.
        """
        kept = returns[mask].double()
        count, total = distributed.reduce_sum(torch.stack([mask.sum().double(), kept.sum()])).tolist()
        if not count:
            return
        mean = total / count
        variance = float(distributed.reduce_sum((kept - mean).square().sum())) / count
        kept_weight = self.weight * (self.beta if self.kind == "exp" else 1.0)
        new_weight = 1.0 - self.beta if self.kind == "exp" else count
        self.weight = kept_weight + new_weight
        share = new_weight / self.weight
        # Equal to using means of x and x^2, whose difference loses precision, or its sign, far from 0.
        distance = mean - self.mean
        self.variance += share * (variance - self.variance) + share * (1 - share) * distance**2
        self.mean += share * distance

    def state_dict(self) -> dict[str, float]:
        """State for a resumed run."""
        return {"weight": self.weight, "mean": self.mean, "variance": self.variance}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a saved state."""
        self.weight = state["weight"]
        self.mean = state["mean"]
        self.variance = state["variance"]

    @property
    def std(self) -> float:
        """The standard deviation to divide by."""
        return max(self.variance, MIN_VARIANCE) ** 0.5 if self.weight else 1.0

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """(x - mean) / std: fp32, the shape of x, in the critic's units. Nothing is clipped."""
        return ((x.double() - self.mean) / self.std).float()

    def denormalise(self, x: torch.Tensor) -> torch.Tensor:
        """x * std + mean: fp32, the shape of x, in real units."""
        return (x.double() * self.std + self.mean).float()


class ExponentialMovingAverage(Stateful):
    """average <- decay average + (1 - decay) weights, in fp32, of this rank's share of each weight."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.averages = {name: local_shard(p).detach().float().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the current weights."""
        for name, parameter in self.parameters.items():
            self.averages[name].lerp_(local_shard(parameter).float(), 1 - self.decay)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Context in which the averages replace the weights. Every rank must call this."""
        return swapped_shards(self.parameters, self.averages)

    def _segments(self) -> list[Segment]:
        return [Segment.of_share(name, p, self.averages[name]) for name, p in self.parameters.items()]

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """This rank's part of the averages."""
        for segment in self._segments():
            yield from segment.save(segment.name, segment.owner)

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Load saved averages. Raises ValueError if a parameter is missing or has another size."""
        for segment in self._segments():
            segment.load(reader, segment.name, segment.owner)


@dataclass
class OpenStep:
    """A PPO step in progress: its state from one minibatch to the next."""

    step: int
    batch: PackedBatch  # with all inputs of the losses
    summary: dict[str, float]  # metrics from before the updates
    means: dict[str, list[float]] = field(default_factory=dict)  # one value per update
    num_minibatches: int = 0  # finished, skipped ones included
    is_done: bool = False  # stopped early

    def state_dict(self) -> dict[str, Any]:
        """All fields except `batch`, whose rows are saved as tensors."""
        return {name: value for name, value in vars(self).items() if name != "batch"}

    @property
    def position(self) -> str:
        """Name of the position in the step: after its last minibatch."""
        return f"update-{self.num_minibatches:04d}"

    def averages(self) -> dict[str, float]:
        """Metrics of the step, averaged over its updates, by log name."""
        values = dict(self.means)
        num_tokens = values.pop(NUM_TOKENS, None)
        return {
            n: fmean(x, None if n.endswith(MEANS_OVER_UPDATES) else num_tokens) for n, x in values.items()
        }


OPEN = "open"


class TrainerState(Stateful):
    """Checkpointed state: controllers, normalisers, counters, waiting rollouts, and a step in progress."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def _parts(self) -> dict[str, Any]:
        """Parts of the trainer in this run that have a state_dict, by their checkpoint names."""
        trainer = self.trainer
        parts = {
            "evaluation": trainer.evaluation,  # first: raises if its prompts are those of another run
            "rollout": trainer.rollout,
            "kl": trainer.kl_controller,
            "value_norm": trainer.value_normaliser,
            "scores": trainer.rollout.scores if trainer.rollout.scores.judges else None,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _batches(self) -> dict[str, PackedBatch]:
        trainer = self.trainer
        batches = {f"waiting{i}": batch for i, batch in enumerate(trainer.waiting)}
        return batches | ({OPEN: trainer.open_step.batch} if trainer.open_step else {})

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """The rows that this rank holds."""
        for name, batch in self._batches().items():
            for key, tensor in to_tensors(batch).items():
                yield TensorSlice(f"{name}:{distributed.rank()}:{key}", 0, tensor)

    def json_state(self) -> dict[str, Any]:
        """The state other than tensors."""
        trainer = self.trainer
        texts = trainer.losses.pretraining
        state: dict[str, Any] = {name: part.state_dict() for name, part in self._parts().items()}
        state["keys"] = {name: list(batch.data) for name, batch in self._batches().items()}
        state["num_ranks"] = distributed.world_size()
        state["num_prompts"] = trainer.prompts.num_steps
        state["losses"] = {"num_texts": texts.num_steps if texts else 0}
        if trainer.open_step:
            state[OPEN] = trainer.open_step.state_dict()
        return state

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Load the state, with rows from any number of ranks. Raises ValueError if the held-out prompts
        differ.
        """
        trainer = self.trainer
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        batches = {
            name: _read_rows(reader, name, keys, state["num_ranks"]) for name, keys in state["keys"].items()
        }
        is_open = OPEN in batches
        trainer.open_step = OpenStep(batch=batches.pop(OPEN), **state[OPEN]) if is_open else None
        trainer.waiting = deque(batches.values())
        trainer.prompts.num_steps = state["num_prompts"]
        if trainer.losses.pretraining:
            trainer.losses.pretraining.num_steps = state["losses"]["num_texts"]


def _read_rows(reader: TensorReader, name: str, keys: list[str], num_ranks: int) -> PackedBatch:
    """This rank's share of the rows that `num_ranks` ranks saved: equal numbers, groups whole."""
    parts = []
    size = reader.numel(f"{name}:0:ids")  # rows of each saving rank
    share = size * num_ranks // distributed.world_size()
    rows = range(distributed.rank() * share, (distributed.rank() + 1) * share)
    for saved in range(num_ranks):
        own_rows = [row - saved * size for row in rows if row // size == saved]
        if own_rows:
            names = ["ids", *(f"{key}:{part}" for key in keys for part in ("data", "lengths"))]
            tensors = {key: reader.read(f"{name}:{saved}:{key}") for key in names}
            parts.append(from_tensors(tensors, keys).select(own_rows))
    return PackedBatch.concat(parts)
