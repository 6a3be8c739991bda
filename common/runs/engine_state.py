"""All that moves in a DeepSpeed engine, as slices of named flat tensors that do not know ranks or stages.

A slice is a run of a parameter's flat weight, or of an optimizer state of it, in fp32. A rank gives the
slices that it owns and asks for those that it needs, so what N ranks saved under one ZeRO stage can be read
by M under another. DeepSpeed's own checkpoints are pickles and need a conversion by hand for that.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from common.ranks import distributed
from common.ranks.zero3 import is_sharded
from common.runs.saved_state import Stateful, TensorReader, TensorSlice

MOMENTS = ("exp_avg", "exp_avg_sq")
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
ALL = "*"


class Segment(NamedTuple):
    """Where a run of a parameter lies in a tensor that the optimizer moves."""

    name: str  # of the parameter
    start: int  # in the flat parameter
    numel: int
    owner: torch.Tensor  # what the optimizer's state goes by
    offset: int  # in the flat owner

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the run of a tensor that has the owner's shape."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.numel]


def own_share(numel: int) -> tuple[int, int]:
    """Return (start, numel) of this rank's share of what all ranks hold alike."""
    size = -(-numel // distributed.world_size())
    start = min(distributed.rank() * size, numel)
    return start, min(size, numel - start)


def shard_range(parameter: nn.Parameter) -> tuple[int, int]:
    """Return (start, numel) of `local_shard` in the flat parameter, without its padding."""
    if not is_sharded(parameter):
        return 0, parameter.numel()
    size = parameter.ds_tensor.numel()
    start = min(distributed.rank() * size, parameter.ds_numel)
    return start, min(size, parameter.ds_numel - start)


class EngineState(Stateful):
    """Weights, optimizer, schedule, loss scale and counters of a trained engine: a part of a checkpoint."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        zero = engine.optimizer if engine.zero_optimization() else None
        self.stage = engine.zero_optimization_stage() if zero else 0
        self.zero = zero
        self.adam = zero.optimizer if zero else engine.optimizer
        names = {id(p): name for name, p in engine.module.named_parameters()}
        make = {0: self._plain_segments, 3: self._stage_3_segments}.get(self.stage, self._stage_1_2_segments)
        self.segments: list[Segment] = list(make(names))

    def _plain_segments(self, names: dict[int, str]) -> Iterator[Segment]:
        for group in self.adam.param_groups:
            for p in group["params"]:
                yield Segment(names[id(p)], 0, p.numel(), p, 0)

    def _stage_1_2_segments(self, names: dict[int, str]) -> Iterator[Segment]:
        for flat, group in zip(
            self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, strict=True
        ):
            for p in group:
                if p._hp_mapping is not None:  # a part of it lies in this rank's partition
                    source, home = p._hp_mapping.lp_fragment_address, p._hp_mapping.hp_fragment_address
                    yield Segment(names[id(p)], source.start, source.numel, flat, home.start)

    def _stage_3_segments(self, names: dict[int, str]) -> Iterator[Segment]:
        for group in self.zero.fp16_groups:
            for p in group:
                index, offset, _ = self.zero.grad_position[self.zero.get_param_id(p)]
                start, numel = shard_range(p)
                flat = self.zero.fp32_partitioned_groups_flat[index]
                yield Segment(names[id(p)], start, numel, flat, offset)

    # -----------------------------------------------------------------------------------------------------
    # Saving
    # -----------------------------------------------------------------------------------------------------

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Give the weights and moments that this rank owns."""
        for segment in self.segments:
            state = self.adam.state.get(segment.owner, {})
            named = {"weight": segment.owner} | {key: state[key] for key in MOMENTS if key in state}
            for key, tensor in named.items():
                flat, start = segment.of(tensor), segment.start
                if self.stage == 0:  # all ranks hold it
                    start, numel = own_share(segment.numel)
                    flat = flat[start : start + numel]
                if len(flat):
                    yield TensorSlice(f"{segment.name}:{key}", start, flat)

    def json_state(self) -> dict[str, Any]:
        """Return what is no tensor; the same on every rank."""
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
        """Return the updates that AdamW has made of each parameter, `ALL` where they are as many."""
        steps = {
            segment.name: float(self.adam.state[segment.owner]["step"])
            for segment in self.segments
            if "step" in self.adam.state.get(segment.owner, {})
        }
        if self.stage == 0 and (len(steps) < len(self.segments) or len(set(steps.values())) > 1):
            return steps
        # A rank may hold nothing of a small model: the others know.
        return {ALL: distributed.max_float(max(steps.values(), default=0.0))}

    # -----------------------------------------------------------------------------------------------------
    # Loading
    # -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Take what was saved. Every rank must call this.

        Raises ValueError, with the engine half loaded, when a parameter is missing or has another size.
        """
        steps = state["adam_steps"]
        for segment in self.segments:
            key = f"{segment.name}:weight"
            segment.of(segment.owner).copy_(reader.read(key, segment.start, segment.numel))
            step = steps.get(segment.name, steps.get(ALL, 0.0))
            if step:
                moments = self._state_of(segment.owner, step)
                for name in MOMENTS:
                    moment = reader.read(f"{segment.name}:{name}", segment.start, segment.numel)
                    segment.of(moments[name]).copy_(moment)
        self._spread_weights()
        for group, rate in zip(self.adam.param_groups, state["learning_rates"], strict=True):
            group["lr"] = rate
        self.engine.lr_scheduler.load_state_dict(state["schedule"])
        if self.engine.fp16_enabled():
            vars(self.zero.loss_scaler).update(state["loss_scaler"])
        for name in COUNTERS:
            setattr(self.engine, name, state["counters"][name])

    def _state_of(self, owner: torch.Tensor, step: float) -> dict[str, torch.Tensor]:
        """Return AdamW's state of a tensor, made as its first step would."""
        state = self.adam.state[owner]
        if not state:
            # A fused AdamW counts on the device of its tensors.
            state["step"] = torch.zeros((), dtype=torch.float32, device=owner.device)
            for name in MOMENTS:
                state[name] = torch.zeros_like(owner)
        state["step"].fill_(max(step, float(state["step"])))
        return state

    def _spread_weights(self) -> None:
        """Bring the loaded fp32 weights to where the model reads them."""
        if self.stage in (1, 2):
            self.zero.update_lp_params()
        elif self.stage == 3:
            self.zero._partition_all_parameters()
            for index in range(len(self.zero.fp16_groups)):
                self.zero._reassign_or_swap_out_partitioned_parameters(index)
            self.zero._post_step(set())


class ShardState(Stateful):
    """Tensors that a rank keeps for `local_shard`s of parameters (an average): a part of a checkpoint."""

    def __init__(self, parameters: dict[str, nn.Parameter], tensors: dict[str, torch.Tensor]) -> None:
        self.parameters, self.tensors = parameters, tensors

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Give what this rank owns of them."""
        for name, parameter in self.parameters.items():
            start, numel = shard_range(parameter)
            flat = self.tensors[name].view(-1)[:numel]
            if not is_sharded(parameter):
                start, numel = own_share(numel)
                flat = flat[start : start + numel]
            if numel:
                yield TensorSlice(name, start, flat)

    @torch.no_grad()
    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Take what was saved. Raises ValueError when a parameter is missing or has another size."""
        for name, parameter in self.parameters.items():
            start, numel = shard_range(parameter)
            self.tensors[name].view(-1)[:numel].copy_(reader.read(name, start, numel))
