"""A model of a run on torch's meta device, where weights take no memory: its parameters, what the switch to
generation moves of it, and what its passes hold, traced on one and on two layers of fake tensors.
"""

import copy
import weakref
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_
from transformers import PreTrainedModel

from common.generation.reshard_plan import Route, TPLayout, group_by_layers, plan_weight
from common.generation.tp_plans import Cut, NoPlan, build_cuts
from common.models.loading import DTYPES, plain_model, set_dropout
from common.models.lora import LoraOptions, add_lora, trained_weights


class PlannedModel:
    """A model without weights: `plain` of transformers, and `module`, which has the adapters of `lora`.

    Raises ValueError for a classifier without a `score` head, and where no linear layer would get an adapter.
    """

    def __init__(self, plain: PreTrainedModel, lora: LoraOptions | None = None) -> None:
        self.plain = self.module = plain
        if lora:
            with torch.device("meta"):
                self.module = add_lora(copy.deepcopy(plain), lora)
        text = plain.config.get_text_config()
        self.num_layers, self.hidden_size = text.num_hidden_layers, text.hidden_size
        self.num_params = sum(p.numel() for p in self.module.parameters())  # a tied weight once
        self.num_trained = sum(p.numel() for p in self.module.parameters() if p.requires_grad)
        self.is_value_model = isinstance(getattr(plain, "score", None), nn.Linear)
        adapted = plain_model(self.module)
        self.head = adapted.score if self.is_value_model else adapted.get_output_embeddings()
        if self.head is None:
            raise ValueError(f"{type(plain).__name__} has no linear `score` head")
        # ZeRO 3 cannot but gather the parameters of one module together.
        modules = self.module.modules()
        self.largest_module = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in modules)

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
    return PlannedModel(model.plain, lora) if lora.dim else model


# ---- the switch to generation ---------------------------------------------------------------------------


class Switch(NamedTuple):
    """What becomes of weights on the first rank as it begins to generate, in elements."""

    new: int  # of its slices: what is not the trainer's own memory
    from_gather_group: int  # received
    from_all: int  # received
    staged: int  # in what is sent and received, until the slices are made: most of `at_once` layers


@cache
def plan_switch(model: PlannedModel, num_ranks: int, tp_size: int, is_sharded: bool, at_once: int) -> Switch:
    """Return what the hybrid engine moves and holds, by its own plan.

    Not `is_sharded`: every rank has all weights whole, as under ZeRO 0 to 2.
    """
    cuts = model.find_cuts(tp_size)
    layout = TPLayout(num_ranks, tp_size if cuts else 1)
    weights = trained_weights(model.module)
    new = near = far = most_staged = 0
    for names in group_by_layers(list(weights), at_once):
        staged = 0
        for name in names:
            plan = plan_weight(tuple(weights[name].parameter.shape), cuts.get(name), layout)
            is_view = plan.cut is None or (plan.cut.dim == 0 and len(plan.cut.ranges[0]) == 1)
            if is_sharded:
                is_view, received = plan.is_view, plan.count_received()
                near += received if plan.route is Route.ROWS else 0
                far += received if plan.route is not Route.ROWS else 0
                if plan.route is Route.BLOCKS:
                    staged += 2 * received
                elif plan.route is Route.WHOLE and plan.cut is not None:
                    staged += num_ranks * plan.shard_size
            # W + scaling B A is a new tensor, whatever W's slice was.
            is_merged = weights[name].lora_a is not None
            new += 0 if is_view and not is_merged else prod(plan.local_shape)
        most_staged = max(most_staged, staged)
    return Switch(new, near, far, most_staged)


# ---- activations ----------------------------------------------------------------------------------------


class Activations(NamedTuple):
    """Bytes of one sequence of the length that was asked for."""

    saved_by_layer: int  # for the backward pass, without checkpointing
    saved_outside: int  # embeddings, the last norm, the mask
    backward_work: int  # most that the backward pass of a layer holds beside what was saved
    forward_peak: int  # most that a pass without gradients holds


@cache
def trace_activations(model: PlannedModel, dtype: str, length: int) -> Activations:
    """Return what a pass over one sequence of `length` tokens saves and holds, by running it on fake tensors.

    The attention is the family's own under torch, with a padding mask of length x length numbers a layer.
    """
    with FakeTensorMode():
        one, two = (_trace(model.plain, dtype, length, num_layers) for num_layers in (1, 2))
    by_layer = two.saved_by_layer - one.saved_by_layer
    return two._replace(saved_by_layer=by_layer, saved_outside=one.saved_by_layer - by_layer)


def _trace(plain: PreTrainedModel, dtype_name: str, length: int, num_layers: int) -> Activations:
    """Return what a model of a few layers holds, all that it saves as `saved_by_layer`."""
    config = copy.deepcopy(plain.config)
    dtype = DTYPES["bf16" if dtype_name == "fp16" else dtype_name]  # as wide
    config.num_hidden_layers, config.use_cache = num_layers, False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    set_dropout(config, 0.0)
    backbone = getattr(type(plain)._from_config(config, dtype=dtype).train(), plain.base_model_prefix)
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
    embedded = torch.zeros(1, length, width, dtype=dtype, requires_grad=True)
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
        weights = [*module.parameters(), *module.buffers()]
        self._known: dict[int, Any] = {weight.untyped_storage()._cdata: weight for weight in weights}

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
