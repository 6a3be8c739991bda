"""A model of a run on torch's meta device, where weights take no memory: its parameters, what the switch to
generation moves of it, and what its passes hold, traced on one and on two layers of fake tensors.
"""

import copy
import weakref
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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

from common.generation.reshard_plan import Route, TPLayout, group_by_layers, plan_weight
from common.generation.tp_plans import Cut, NoPlan, build_cuts
from common.models.loading import DTYPES, set_dropout
from common.models.lora import LoraOptions, add_lora, trained_weights

NO_ADAPTERS = LoraOptions()
WITHOUT_MASK = "triptych_without_mask"  # the name of an attention


class PlannedModel:
    """A model without weights: `plain` of transformers, and `module`, which has the adapters of `lora`.

    `is_value_model`: the classifier of one label that `value_model` is. Raises ValueError for a family
    without a score head, and where no linear layer would get an adapter.
    """

    def __init__(
        self,
        config: Any,
        is_value_model: bool = False,
        lora: LoraOptions = NO_ADAPTERS,
        trust_remote_code: bool = False,
    ) -> None:
        self.config, self.is_value_model = copy.deepcopy(config), is_value_model
        self.trust_remote_code = trust_remote_code
        if is_value_model:
            self.config.num_labels = 1
        auto_class = AutoModelForSequenceClassification if is_value_model else AutoModelForCausalLM
        with torch.device("meta"):
            self.plain = auto_class.from_config(self.config, trust_remote_code=trust_remote_code)
            if is_value_model and not isinstance(getattr(self.plain, "score", None), nn.Linear):
                raise ValueError(f"{type(self.plain).__name__} has no linear `score` head")
            self.module = add_lora(copy.deepcopy(self.plain), lora)
        text = config.get_text_config()
        self.num_layers, self.hidden_size = text.num_hidden_layers, text.hidden_size
        parameters = dict(self.module.named_parameters())
        self.sizes = [p.numel() for p in parameters.values()]
        self.num_params = sum(self.sizes)  # a tied weight once
        self.num_trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
        self.num_adapter = sum(p.numel() for name, p in parameters.items() if ".lora_" in name)
        modules = self.module.modules()
        self.head = self.plain.score if is_value_model else self.plain.get_output_embeddings()
        self.is_head_trained = not (lora.dim and lora.only_optimize_lora)
        # ZeRO 3 cannot but gather the parameters of one module together.
        self.largest_module = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in modules)

    def num_small(self, threshold: float) -> int:
        """The parameters that ZeRO 3 keeps whole everywhere: of tensors up to `threshold` elements."""
        return sum(size for size in self.sizes if size <= threshold)

    def find_cuts(self, tp_size: int) -> dict[str, Cut]:
        """Return where weights are cut, {} for a family without a plan: it generates with t = 1.

        Raises ValueError for a size that the model cannot be cut into.
        """
        try:
            return build_cuts(self.plain, tp_size)
        except NoPlan:
            return {}


@cache
def with_adapters(model: PlannedModel, lora: LoraOptions) -> PlannedModel:
    """Return the model with adapters, itself where `lora` asks for none."""
    if not lora.dim:
        return model
    return PlannedModel(model.config, model.is_value_model, lora, model.trust_remote_code)


# ---- the switch to generation ---------------------------------------------------------------------------


class Switch(NamedTuple):
    """What becomes of weights on a rank that begins to generate, in elements, the mean over ranks."""

    new: float  # of its slices: what is not the trainer's own memory
    from_gather_group: float  # received
    from_all: float  # received
    staged: float  # in what is sent and received, until the slices are made


@cache
def plan_switch(model: PlannedModel, num_ranks: int, tp_size: int, is_sharded: bool, at_once: int) -> Switch:
    """Return what the hybrid engine moves and holds, by its own plan: of all weights together, but `staged`,
    which is that of the largest group of `at_once` layers.
    """
    cuts = model.find_cuts(tp_size)
    tp_size = tp_size if cuts else 1
    switches = {}
    for name, weight in trained_weights(model.module).items():
        shape, is_merged = tuple(weight.parameter.shape), weight.lora_a is not None
        switches[name] = switch_weight(shape, cuts.get(name), num_ranks, tp_size, is_sharded, is_merged)
    total = Switch(*map(sum, zip(*switches.values(), strict=True)))
    adapters = model.num_adapter * (num_ranks - 1) / num_ranks if is_sharded else 0
    groups = group_by_layers(list(switches), at_once)
    staged = max(sum(switches[name].staged for name in group) for group in groups)
    return total._replace(from_all=total.from_all + adapters, staged=staged)


@cache
def switch_weight(
    shape: tuple[int, ...],
    cut: Cut | None,
    num_ranks: int,
    tp_size: int,
    is_sharded: bool = True,
    is_merged: bool = False,
) -> Switch:
    """Return what becomes of one weight: the counts of all ranks' plans.

    Not `is_sharded`: every rank has the whole weight, as under ZeRO 0 to 2. `is_merged`: W + scaling B A is a
    new tensor, whatever W's slice was.
    """
    plans = [plan_weight(shape, cut, TPLayout(num_ranks, tp_size, rank)) for rank in range(num_ranks)]
    plan, received, staged = plans[0], 0.0, 0.0
    is_view = plan.cut is None or (plan.cut.dim == 0 and len(plan.cut.ranges[0]) == 1)
    if is_sharded:
        is_view, received = plan.is_view, sum(plan.count_received() for plan in plans) / num_ranks
        if plan.route is Route.BLOCKS:
            staged = round(2 * received)
        elif plan.route is Route.WHOLE and plan.cut is not None and not is_view:
            staged = num_ranks * plan.shard_size
    is_near = plan.route is Route.ROWS
    return Switch(
        new=0 if is_view and not is_merged else prod(plan.local_shape),
        from_gather_group=received if is_near else 0.0,
        from_all=0.0 if is_near else received,
        staged=staged,
    )


# ---- activations ----------------------------------------------------------------------------------------


class Activations(NamedTuple):
    """Bytes of one sequence of the length that was asked for."""

    saved_by_layer: int  # for the backward pass, without checkpointing
    saved_outside: int  # embeddings, the last norm, the mask
    backward_work: int  # most that the backward pass of a layer holds beside what was saved
    forward_peak: int  # most that a pass without gradients holds


@cache
def trace_activations(model: PlannedModel, dtype: str, length: int, is_flash: bool) -> Activations:
    """Return what a pass over one sequence of `length` tokens saves and holds, by running it on fake tensors.

    The attention is the family's own under torch: with a padding mask of length x length numbers a layer, or
    (`is_flash`, where the family takes it) without one, which holds what flash-attn does: query, key, value,
    output, and one fp32 number a query and head.
    """
    with FakeTensorMode():
        one, two = (_trace(model, dtype, length, is_flash, num_layers) for num_layers in (1, 2))
    by_layer = two.saved_by_layer - one.saved_by_layer
    return two._replace(saved_by_layer=by_layer, saved_outside=one.saved_by_layer - by_layer)


def _trace(model: PlannedModel, dtype: str, length: int, is_flash: bool, num_layers: int) -> Activations:
    """Return what a model of a few layers holds, all that it saves as `saved_by_layer`."""
    torch_dtype = DTYPES["bf16" if dtype == "fp16" else dtype]  # as wide
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.use_cache = num_layers, False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    set_dropout(config, 0.0)
    options = {"dtype": torch_dtype, "trust_remote_code": model.trust_remote_code}
    if is_flash and getattr(type(model.plain), "_supports_attention_backend", False):
        options["attn_implementation"] = WITHOUT_MASK
    lm = AutoModelForCausalLM.from_config(config, **options).train()
    backbone = getattr(lm, lm.base_model_prefix)
    ids = torch.zeros(1, length, dtype=torch.int64)
    mask = torch.ones_like(ids)
    with LiveBytes(backbone) as live, torch.no_grad():
        backbone(input_ids=ids, attention_mask=mask)
        forward_peak = live.peak
    with LiveBytes(backbone) as live:
        hidden = backbone(input_ids=ids, attention_mask=mask)[0]
        saved = live.now
    del hidden
    backbone.requires_grad_(False)  # the gradients of weights are counted with the optimizer's
    width = backbone.get_input_embeddings().weight.shape[1]
    embedded = torch.zeros(1, length, width, dtype=torch_dtype, requires_grad=True)
    with LiveBytes(backbone) as live:
        hidden = backbone(inputs_embeds=embedded, attention_mask=mask)[0]
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


def _attend_without_mask(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return found.transpose(1, 2).contiguous(), None


AttentionInterface.register(WITHOUT_MASK, _attend_without_mask)
AttentionMaskInterface.register(WITHOUT_MASK, lambda **_: None)
