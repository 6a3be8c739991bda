"""What a model is, counted on models that hold no memory: parameters, adapters, cuts, activations.

No weight is read or made. Parameters are those of the meta model, a tied weight once; activations are what
autograd saves, and the most that a pass holds, of one and of two layers run on fake tensors.

# N ranks, t tensor-parallel size
"""

import copy
import weakref
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from common.generation.reshard_plan import group_by_layers, plan_move
from common.generation.tp_plans import Cut, NoPlan, build_cuts, working_tp_sizes
from common.models.loading import DTYPES, set_dropout
from common.models.lora import LoraOptions, linear_module_names, lora_targets

FLASH = "triptych_counted"


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a model with or without adapters."""

    num_params: int  # adapters included
    num_trained: int
    num_adapter: int
    num_adapted: int  # of the matrices that adapters are merged into for generation


@dataclass(frozen=True)
class SwitchSizes:
    """Elements of one rank, the mean over ranks, when training weights become slices for generation."""

    from_gather_group: float  # received from ranks that hold the same slice
    from_all: float  # received
    new: int  # in new memory; what is a view of the trainer's costs nothing
    staged: int  # buffers of the largest group of layers that is moved at a time


class ModelSizes:
    """A transformers model without weights; `is_value_model`: the classifier of one label of `value_model`.

    Raises ValueError for a family without a score head.
    """

    def __init__(self, config: Any, is_value_model: bool = False, trust_remote_code: bool = False) -> None:
        self.config, self.is_value_model = copy.deepcopy(config), is_value_model
        if is_value_model:
            self.config.num_labels = 1
        self._options = {"trust_remote_code": trust_remote_code}
        auto_class = AutoModelForSequenceClassification if is_value_model else AutoModelForCausalLM
        with torch.device("meta"):
            self.model: nn.Module = auto_class.from_config(self.config, **self._options)
        if is_value_model and not isinstance(getattr(self.model, "score", None), nn.Linear):
            raise ValueError(f"{type(self.model).__name__} has no linear `score` head")
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        text = config.get_text_config()
        self.num_layers, self.hidden_size = text.num_hidden_layers, text.hidden_size
        self.num_heads = text.num_attention_heads
        self.head_dim = getattr(text, "head_dim", None) or self.hidden_size // self.num_heads

    @cached_property
    def num_params(self) -> int:
        """All parameters, tied ones once."""
        return sum(prod(shape) for shape in self.shapes.values())

    @cached_property
    def num_head(self) -> int:
        """What a scored token is multiplied with at the end, tied to the input embedding or not."""
        head = self.model.score if self.is_value_model else self.model.get_output_embeddings()
        return head.weight.numel()

    @cached_property
    def num_body(self) -> int:
        """Everything else: what every token is multiplied with."""
        is_tied = not self.is_value_model and (
            self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight
        )
        embedding = self.model.get_input_embeddings().weight.numel()  # of which a token reads one row
        return self.num_params - embedding - (0 if is_tied else self.num_head)

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the output head."""
        return 1 if self.is_value_model else self.model.get_output_embeddings().weight.shape[0]

    @cached_property
    def largest_module(self) -> int:
        """The parameters that ZeRO 3 cannot but gather together: those of one module."""
        modules = self.model.modules()
        return max(sum(p.numel() for p in m.parameters(recurse=False)) for m in modules)

    @cached_property
    def backbone_key(self) -> str:
        """A text that is equal for models with equal layers."""
        head = {"num_labels", "id2label", "label2id", "architectures", "_name_or_path"}
        return str({key: value for key, value in self.config.to_dict().items() if key not in head})

    @cached_property
    def tp_sizes(self) -> list[int]:
        """The tensor-parallel sizes that fit."""
        return [1] if self.is_value_model else working_tp_sizes(self.model)

    @lru_cache  # noqa: B019 - a few models live as long as the program
    def num_small(self, threshold: float) -> int:
        """The parameters that ZeRO 3 keeps whole everywhere: of tensors up to `threshold` elements."""
        return sum(prod(shape) for shape in self.shapes.values() if prod(shape) <= threshold)

    @lru_cache  # noqa: B019
    def counts(self, lora: LoraOptions) -> Counts:
        """Return the counts under the rules of `common.models.add_lora`."""
        if not lora.dim:
            return Counts(self.num_params, self.num_params, 0, 0)
        targets = self.adapted_modules(lora.module_name)
        weights = [self.model.get_submodule(name).weight for name in targets]
        num_adapter = sum(lora.dim * sum(weight.shape) for weight in weights)
        frozen = {f"{name}.{part}" for name in targets for part in ("weight", "bias")}
        others = sum(prod(shape) for name, shape in self.shapes.items() if name not in frozen)
        if lora.only_optimize_lora:
            others = self.num_head if self.is_value_model else 0
        num_adapted = sum(weight.numel() for weight in weights)
        return Counts(self.num_params + num_adapter, others + num_adapter, num_adapter, num_adapted)

    def adapted_modules(self, module_name: str) -> list[str]:
        """Return the linear layers that adapters would be put on; raise ValueError if there are none."""
        return lora_targets(linear_module_names(self.model), module_name)

    @lru_cache  # noqa: B019
    def cuts(self, tp_size: int) -> dict[str, Cut]:
        """Return where weights are cut, {} for a family without a plan: it generates with t = 1."""
        try:
            return build_cuts(self.model, tp_size)
        except NoPlan:
            return {}

    @lru_cache  # noqa: B019
    def switch_sizes(
        self, num_ranks: int, tp_size: int, is_sharded: bool, layers_per_group: int, lora: LoraOptions
    ) -> SwitchSizes:
        """Return what the hybrid engine moves and holds, by its own plan."""
        cuts = self.cuts(tp_size)
        tp_size = tp_size if cuts else 1
        moves = {
            name: plan_move(shape, cuts.get(name), num_ranks, tp_size, is_sharded)
            for name, shape in self.shapes.items()
        }
        for name in self.adapted_modules(lora.module_name) if lora.dim else ():
            # W + scaling B A is a new tensor, whatever W's slice was.
            move = moves[f"{name}.weight"]
            moves[f"{name}.weight"] = move._replace(new=move.slice)
        num_adapter = self.counts(lora).num_adapter
        from_all = num_adapter * (num_ranks - 1) / num_ranks if is_sharded else 0.0
        groups = group_by_layers(list(moves), layers_per_group)
        return SwitchSizes(
            from_gather_group=sum(move.from_gather_group for move in moves.values()),
            from_all=from_all + sum(move.from_all for move in moves.values()),
            new=sum(move.new for move in moves.values()),
            staged=max(sum(moves[name].staged for name in names) for names in groups),
        )


@dataclass(frozen=True)
class Activations:
    """Bytes of one sequence of the length that was asked for."""

    saved_by_layer: float  # for the backward pass, without checkpointing
    saved_outside: float  # embeddings, the last norm, the mask
    backward_work: float  # most that the backward pass of a layer holds beside what was saved
    forward_peak: float  # most that a pass without gradients holds


_TRACED: dict[tuple[str, str, int, bool], Activations] = {}


def trace_activations(model: ModelSizes, dtype: str, length: int, *, is_flash: bool) -> Activations:
    """Return what a pass over one sequence of `length` tokens saves and holds, by running it on fake tensors.

    The attention is the family's own under torch: with a padding mask of length x length numbers a layer, or
    (`is_flash`, where the family takes it) flash-attn's, which keeps no mask and no weights.
    """
    dtype = "bf16" if dtype == "fp16" else dtype  # as wide
    key = (model.backbone_key, dtype, length, is_flash)
    if key not in _TRACED:
        with FakeTensorMode():
            (one, _), (two, peaks) = (_trace(model, dtype, length, is_flash, n) for n in (1, 2))
        by_layer = two - one
        _TRACED[key] = Activations(by_layer, one - by_layer, peaks[1], peaks[0])
    return _TRACED[key]


def _trace(
    model: ModelSizes, dtype: str, length: int, is_flash: bool, num_layers: int
) -> tuple[int, tuple[int, int]]:
    """Return (bytes saved, (peak of a pass without gradients, work of the backward pass)) of a few layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.use_cache = num_layers, False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    set_dropout(config, 0.0)
    takes_any = getattr(type(model.model), "_supports_attention_backend", False)
    more = {"attn_implementation": FLASH} if is_flash and takes_any else {}
    lm = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], **more, **model._options).train()
    backbone = getattr(lm, lm.base_model_prefix)
    ids = torch.zeros(1, length, dtype=torch.int64)
    mask = {} if more else {"attention_mask": torch.ones(1, length, dtype=torch.int64)}
    if num_layers == 1:  # only what is saved
        with LiveBytes(backbone) as live:
            hidden = backbone(input_ids=ids, **mask)[0]
            return live.now, (0, 0)
    with LiveBytes(backbone) as live, torch.no_grad():
        backbone(input_ids=ids, **mask)
        forward_peak = live.peak
    with LiveBytes(backbone) as live:
        hidden = backbone(input_ids=ids, **mask)[0]
        saved = live.now
    del hidden
    backbone.requires_grad_(False)  # the gradients of weights are counted with the optimizer's
    width = backbone.get_input_embeddings().weight.shape[1]
    embedded = torch.zeros(1, length, width, dtype=DTYPES[dtype], requires_grad=True)
    with LiveBytes(backbone) as live:
        hidden = backbone(inputs_embeds=embedded, **mask)[0]
        before = live.peak = live.now
        hidden.backward(hidden.detach())
        return saved, (forward_peak, live.peak - before)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that are still there; weights do not count."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {p.untyped_storage()._cdata: p for p in module.parameters()}
        self._known |= {b.untyped_storage()._cdata: b for b in module.buffers()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and take note of what is new."""
        result = function(*args, **(kwargs or {}))
        tree_map_(self._note, result)
        return result

    def _note(self, value: Any) -> None:
        if not isinstance(value, torch.Tensor) or value.device.type == "meta":
            return
        storage = value.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return

        def forget(_: Any) -> None:
            self.now -= num_bytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, forget)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)


class _CountedFlash(torch.autograd.Function):
    """Saves what flash-attn saves: query, key, value, output, and one fp32 number a query and head."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
        normalisers = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, normalisers)
        return output

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def _attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
    return _CountedFlash.apply(query, key, value), None


AttentionInterface.register(FLASH, _attend)
AttentionMaskInterface.register(FLASH, lambda **_: None)
