"""What a model is, counted on models that hold no memory: parameters, adapters, cuts, activations.

No weight is read or made. Parameters are those of the meta model, a tied weight once; activations are what
autograd saves, and the most that a pass holds, of one and of two layers run on fake tensors.
"""

import copy
import weakref
from dataclasses import dataclass
from functools import cache
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

from common.generation.reshard_plan import Move, group_by_layers, plan_move
from common.generation.tp_plans import Cut, NoPlan, build_cuts
from common.models.loading import DTYPES, set_dropout
from common.models.lora import LoraOptions, linear_module_names, lora_targets

FLASH = "triptych_counted"


class ModelSizes:
    """A transformers model without weights; `is_value_model`: the classifier of one label of `value_model`.

    Raises ValueError for a family without a score head.
    """

    def __init__(self, config: Any, is_value_model: bool = False, trust_remote_code: bool = False) -> None:
        self.config, self.is_value_model = copy.deepcopy(config), is_value_model
        if is_value_model:
            self.config.num_labels = 1
        self.options = {"trust_remote_code": trust_remote_code}
        auto_class = AutoModelForSequenceClassification if is_value_model else AutoModelForCausalLM
        with torch.device("meta"):
            self.model: nn.Module = auto_class.from_config(self.config, **self.options)
        if is_value_model and not isinstance(getattr(self.model, "score", None), nn.Linear):
            raise ValueError(f"{type(self.model).__name__} has no linear `score` head")
        text = config.get_text_config()
        self.num_layers, self.hidden_size = text.num_hidden_layers, text.hidden_size
        self.shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        self.num_params = sum(map(prod, self.shapes.values()))
        head = (self.model.score if is_value_model else self.model.get_output_embeddings()).weight
        self.vocabulary = head.shape[0]  # 1 of a value model
        self.num_head = head.numel()
        # ZeRO 3 cannot but gather the parameters of one module together.
        modules = self.model.modules()
        self.largest_module = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in modules)

    def num_small(self, threshold: float) -> int:
        """The parameters that ZeRO 3 keeps whole everywhere: of tensors up to `threshold` elements."""
        return sum(size for size in map(prod, self.shapes.values()) if size <= threshold)


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of a model with or without adapters."""

    num_params: int  # adapters included
    num_trained: int
    num_adapter: int


@cache
def count_parameters(model: ModelSizes, lora: LoraOptions) -> Counts:
    """Return the counts under the rules of `common.models.lora.add_lora`.

    Raises ValueError where no linear layer would get an adapter.
    """
    if not lora.dim:
        return Counts(model.num_params, model.num_params, 0)
    targets = adapted_modules(model, lora)
    weights = [model.shapes[f"{name}.weight"] for name in targets]
    num_adapter = sum(lora.dim * sum(shape) for shape in weights)
    frozen = {f"{name}.{part}" for name in targets for part in ("weight", "bias")}
    others = sum(prod(shape) for name, shape in model.shapes.items() if name not in frozen)
    if lora.only_optimize_lora:
        others = model.num_head if model.is_value_model else 0
    return Counts(model.num_params + num_adapter, others + num_adapter, num_adapter)


def adapted_modules(model: ModelSizes, lora: LoraOptions) -> list[str]:
    """Return the linear layers that adapters are put on."""
    return lora_targets(linear_module_names(model.model), lora.module_name) if lora.dim else []


# ---- the switch to generation ---------------------------------------------------------------------------


@cache
def find_cuts(model: ModelSizes, tp_size: int) -> dict[str, Cut]:
    """Return where weights are cut, {} for a family without a plan: it generates with t = 1."""
    try:
        return build_cuts(model.model, tp_size)
    except NoPlan:
        return {}


@cache
def switch_sizes(
    model: ModelSizes,
    num_ranks: int,
    tp_size: int,
    is_sharded: bool,
    layers_at_once: int,
    lora: LoraOptions,
) -> Move:
    """Return what the hybrid engine moves and holds, by its own plan: of all weights together.

    `staged` is that of the largest group of layers that is moved at a time.
    """
    cuts = find_cuts(model, tp_size)
    moves = {
        name: plan_move(shape, cuts.get(name), num_ranks, tp_size if cuts else 1, is_sharded)
        for name, shape in model.shapes.items()
    }
    for name in adapted_modules(model, lora):
        # W + scaling B A is a new tensor, whatever W's slice was.
        move = moves[f"{name}.weight"]
        moves[f"{name}.weight"] = move._replace(new=move.slice)
    num_adapter = count_parameters(model, lora).num_adapter
    from_all = num_adapter * (num_ranks - 1) / num_ranks if is_sharded else 0.0
    groups = group_by_layers(list(moves), layers_at_once)
    return Move(
        slice=sum(move.slice for move in moves.values()),
        new=sum(move.new for move in moves.values()),
        from_gather_group=sum(move.from_gather_group for move in moves.values()),
        from_all=from_all + sum(move.from_all for move in moves.values()),
        staged=max(sum(moves[name].staged for name in names) for names in groups),
    )


# ---- activations ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Activations:
    """Bytes of one sequence of the length that was asked for."""

    saved_by_layer: float  # for the backward pass, without checkpointing
    saved_outside: float  # embeddings, the last norm, the mask
    backward_work: float  # most that the backward pass of a layer holds beside what was saved
    forward_peak: float  # most that a pass without gradients holds


@cache
def trace_activations(model: ModelSizes, dtype: str, length: int, *, is_flash: bool) -> Activations:
    """Return what a pass over one sequence of `length` tokens saves and holds, by running it on fake tensors.

    The attention is the family's own under torch: with a padding mask of length x length numbers a layer, or
    (`is_flash`, where the family takes it) flash-attn's, which keeps no mask and no weights.
    """
    with FakeTensorMode():
        one, two = (_trace(model, dtype, length, is_flash, n) for n in (1, 2))
    by_layer = two.saved_by_layer - one.saved_by_layer
    outside = one.saved_by_layer - by_layer
    return Activations(by_layer, outside, two.backward_work, two.forward_peak)


def _trace(model: ModelSizes, dtype: str, length: int, is_flash: bool, num_layers: int) -> Activations:
    """Return what a model of a few layers holds, all that it saves as `saved_by_layer`."""
    dtype = "bf16" if dtype == "fp16" else dtype  # as wide
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.use_cache = num_layers, False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    set_dropout(config, 0.0)
    takes_any = getattr(type(model.model), "_supports_attention_backend", False)
    attention = {"attn_implementation": FLASH} if is_flash and takes_any else {}
    lm = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], **attention, **model.options).train()
    backbone = getattr(lm, lm.base_model_prefix)
    ids = torch.zeros(1, length, dtype=torch.int64)
    mask = {} if attention else {"attention_mask": torch.ones(1, length, dtype=torch.int64)}
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
        return Activations(saved, 0, live.peak - before, forward_peak)


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
