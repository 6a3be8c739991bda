"""The state in a checkpoint: slices of flat tensors in safetensors files, and JSON.

A slice is a contiguous part of a flat tensor and is independent of ranks and ZeRO stages. Each rank writes
the slices that it owns and reads those that it needs, so M ranks under one stage can read what N ranks saved
under another. DeepSpeed's own checkpoints are pickles and need a manual conversion for that.
"""

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from safetensors import safe_open
from torch import nn

from common.ranks import distributed
from common.ranks.deepspeed_internals import spread_weights
from common.ranks.zero3 import find_owned_runs, is_sharded, own_share

MOMENTS = ("exp_avg", "exp_avg_sq")
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
ALL = "*"
CHUNK_ELEMENTS = 2**26  # elements copied to the host at a time
SAFETENSORS_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"},
}


class TensorSlice(NamedTuple):
    """A slice of a flat tensor."""

    key: str
    start: int
    tensor: torch.Tensor  # (numel,) of any dtype, on any device


class TensorReader:
    """Reads slices from the files of all ranks, regardless of how they were split when written."""

    def __init__(self, files: Sequence[Path]) -> None:
        # key -> (start, end, file, name in the file), sorted
        self.index: dict[str, list[tuple[int, int, Any, str]]] = defaultdict(list)
        for file in (safe_open(path, "pt") for path in files):
            for name in file.keys():  # noqa: SIM118  (not a dictionary)
                key, start = name.rsplit("@", 1)
                end = int(start) + file.get_slice(name).get_shape()[0]
                self.index[key].append((int(start), end, file, name))
        for slices in self.index.values():
            slices.sort(key=lambda one: one[:2])

    def numel(self, key: str) -> int:
        """Length of a flat tensor; 0 if it does not exist."""
        return max((end for _, end, _, _ in self.index.get(key, ())), default=0)

    def read(self, key: str, start: int = 0, numel: int | None = None) -> torch.Tensor:
        """Elements start to start + numel (None: to the end) of a flat tensor.

        Raises ValueError if some are missing.
        """
        end = self.numel(key) if numel is None else start + numel
        parts = [  # adjacent slices too: they give an empty result its dtype
            file.get_slice(name)[max(start - first, 0) : min(end, last) - first]
            for first, last, file, name in self.index.get(key, ())
            if first <= end and start <= last
        ]
        if not parts or sum(map(len, parts)) != end - start:
            raise ValueError(f"it holds {self.numel(key)} elements of {key}, not the {end} that are needed")
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def write_slices(file: Path, slices: Iterable[TensorSlice]) -> None:
    """Write a rank's slices as safetensors; keys may be any text.

    Written chunk by chunk: safetensors' own `save_file` needs all of them in the host's memory.
    """
    header: dict[str, dict[str, Any]] = {}
    end = 0
    ordered = sorted(slices, key=lambda one: -one.tensor.itemsize)  # keeps all slices aligned
    for key, start, tensor in ordered:
        name = f"{key}@{start}"
        begin = end
        end = end + tensor.nbytes
        assert name not in header, f"two slices of {key} begin at {start}"
        facts = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = facts | {"data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for _, _, tensor in ordered:
            for chunk in tensor.detach().flatten().split(CHUNK_ELEMENTS):
                out.write(chunk.cpu().view(torch.uint8).numpy())


class Stateful:
    """An object that a checkpoint saves and loads. Every rank must call each method together."""

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Slices that this rank owns; none unless overridden."""
        return iter(())

    def json_state(self) -> dict[str, Any]:
        """State other than tensors, the same on every rank; {} unless overridden."""
        return {}

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Load the state; `state` is from `json_state`. Raises ValueError if it belongs to another run."""
        raise NotImplementedError


class Segment(NamedTuple):
    """Location of a part of a parameter in a tensor that this rank holds."""

    name: str  # name of the parameter
    size: int  # elements of the parameter
    start: int  # offset in the flat parameter
    numel: int
    owner: torch.Tensor  # key of the optimizer's state, or the saved tensor itself
    offset: int = 0  # offset in the flat owner
    saved: slice = slice(None)  # of it, what this rank saves: a share if all ranks hold it

    @classmethod
    def of_share(cls, name: str, parameter: nn.Parameter, owner: torch.Tensor, offset: int = 0) -> "Segment":
        """Segment of a parameter that `local_shard` returns, without the padding of ZeRO 3."""
        size = parameter.ds_numel if is_sharded(parameter) else parameter.numel()
        share = own_share(size)
        return cls(name, size, share.start, share.stop - share.start, owner, offset)

    def _part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        run = tensor.detach().view(-1)[self.offset : self.offset + self.numel]
        size = run.numel()
        assert size == self.numel, f"{self.name}: {self.numel} elements are owned, {size} are here"
        return run

    def save(self, key: str, tensor: torch.Tensor) -> Iterator[TensorSlice]:
        """This rank's slice of a tensor with the owner's shape, or nothing."""
        flat = self._part_of(tensor)[self.saved]
        if flat.numel():
            yield TensorSlice(key, self.start + (self.saved.start or 0), flat)

    def load(self, reader: TensorReader, key: str, tensor: torch.Tensor) -> None:
        """Fill the part of a tensor with the owner's shape.

        Raises ValueError if the saved parameter is missing or has another size.
        """
        if reader.numel(key) != self.size:
            raise ValueError(f"it holds {reader.numel(key)} elements of {key}, not {self.size}")
        self._part_of(tensor).copy_(reader.read(key, self.start, self.numel))


class EngineState(Stateful):
    """Weights, optimizer, schedule, loss scale and counters of a DeepSpeed engine, as part of a checkpoint.

    Weights and moments have the dtype of --optimizer_dtype, under the parameter's name.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.zero = engine.optimizer if engine.zero_optimization() else None
        self.stage = engine.zero_optimization_stage() if self.zero else 0
        self.adam = self.zero.optimizer if self.zero else engine.optimizer
        self.segments = list(self._segments())

    def _segments(self) -> Iterator[Segment]:
        names = {id(p): name for name, p in self.engine.module.named_parameters()}
        for p, start, numel, owner, offset in find_owned_runs(self.engine):
            size = p.ds_numel if is_sharded(p) else p.numel()
            saved = slice(None) if self.stage else own_share(numel)
            yield Segment(names[id(p)], size, start, numel, owner, offset, saved)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """The weights and moments that this rank owns."""
        for segment in self.segments:
            yield from segment.save(f"{segment.name}:weight", segment.owner)
            state = self.adam.state.get(segment.owner, {})
            for name in MOMENTS:
                if name in state:
                    yield from segment.save(f"{segment.name}:{name}", state[name])

    def json_state(self) -> dict[str, Any]:
        """State other than tensors, the same on every rank."""
        engine = self.engine
        scaler = vars(self.zero.loss_scaler) if engine.fp16_enabled() else {}
        return {
            "adam_steps": self._adam_steps(),
            "learning_rates": [float(group["lr"]) for group in self.adam.param_groups],
            "schedule": engine.lr_scheduler.state_dict(),
            "loss_scaler": {k: v for k, v in scaler.items() if isinstance(v, bool | int | float)},
            "counters": {name: getattr(engine, name) for name in COUNTERS},
        }

    def _adam_steps(self) -> dict[str, float]:
        """Number of AdamW updates of each parameter; under ZeRO, of `ALL` together."""
        steps = {
            segment.name: float(self.adam.state[segment.owner]["step"])
            for segment in self.segments
            if "step" in self.adam.state.get(segment.owner, {})
        }
        if self.stage == 0:
            return steps
        # A rank that holds no part of a small model gets the number from the others.
        return {ALL: distributed.max_float(max(steps.values(), default=0.0))}

    @torch.no_grad()
    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Load the state. Every rank must call this.

        Raises ValueError, with the engine half loaded, if a parameter is missing or has another size.
        """
        steps = state["adam_steps"]
        for segment in self.segments:
            segment.load(reader, f"{segment.name}:weight", segment.owner)
            step = steps.get(segment.name, steps.get(ALL, 0.0))
            if step:
                for name, moment in self._make_moments(segment.owner, step).items():
                    segment.load(reader, f"{segment.name}:{name}", moment)
        spread_weights(self.zero, self.stage)
        for group, rate in zip(self.adam.param_groups, state["learning_rates"], strict=True):
            group["lr"] = rate
        self.engine.lr_scheduler.load_state_dict(state["schedule"])
        if self.engine.fp16_enabled():
            vars(self.zero.loss_scaler).update(state["loss_scaler"])
        for name in COUNTERS:
            setattr(self.engine, name, state["counters"][name])

    def _make_moments(self, owner: torch.Tensor, step: float) -> dict[str, torch.Tensor]:
        """Moments of a tensor, created with their step as the optimizer's first step would."""
        state = self.adam.state[owner]
        if not state:
            # A fused AdamW keeps its step on the device of its tensors.
            state["step"] = torch.zeros((), dtype=torch.float32, device=owner.device)
            uses_muon = owner in getattr(self.adam, "matrices", ())  # Muon has no second moment
            for name in MOMENTS[:1] if uses_muon else MOMENTS:
                state[name] = torch.zeros_like(owner)
        state["step"].fill_(max(step, float(state["step"])))
        return {name: state[name] for name in MOMENTS if name in state}


@contextmanager
def kept_random_numbers() -> Iterator[None]:
    """Context that restores the random state of python, numpy and torch at its end."""
    states = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng([distributed.device()] if distributed.has_gpu() else []):
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


class RandomState(Stateful):
    """Random state of python, numpy and torch on every rank.

    With more ranks than were saved, ranks share the saved states; dropout then differs from that of an
    uninterrupted run.
    """

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """This rank's states as bytes."""
        rank = distributed.rank()
        (kind, keys, *rest) = numpy.random.get_state()
        python_states = {"python": random.getstate(), "numpy": [kind, keys.tolist(), *rest]}
        text = torch.frombuffer(bytearray(json.dumps(python_states).encode()), dtype=torch.uint8)
        yield TensorSlice(f"{rank}:python", 0, text)
        yield TensorSlice(f"{rank}:torch", 0, torch.get_rng_state())
        if distributed.has_gpu():
            yield TensorSlice(f"{rank}:cuda", 0, torch.cuda.get_rng_state())

    def json_state(self) -> dict[str, Any]:
        """Number of ranks."""
        return {"world_size": distributed.world_size()}

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Restore the random state of this rank."""
        rank = distributed.rank() % state["world_size"]
        python_states = json.loads(bytes(reader.read(f"{rank}:python").tolist()))
        version, internal, gauss = python_states["python"]
        random.setstate((version, tuple(internal), gauss))
        numpy.random.set_state(tuple(python_states["numpy"]))
        torch.set_rng_state(reader.read(f"{rank}:torch"))
        if distributed.has_gpu() and reader.numel(f"{rank}:cuda"):
            torch.cuda.set_rng_state(reader.read(f"{rank}:cuda"))
