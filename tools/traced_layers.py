"""What a model's layers hold, move and launch in a pass, traced on fake tensors: nothing is computed."""

import copy
import weakref
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from common.models.attention import backbone_of
from common.models.loading import DTYPES, set_dropout
from tools.planned_model import PlannedModel

PRODUCTS = ("mm", "scaled_dot_product", "convolution")  # parts of the names of operations that multiply
NO_KERNELS = ("empty", "_unsafe_view")  # of operations that start nothing on a device


class Moved(NamedTuple):
    """Operations of a pass that start a kernel, and the bytes that those without a product read and write."""

    launches: int
    num_bytes: int


class Activations(NamedTuple):
    """A pass over one sequence of the traced length. Held, in bytes:"""

    saved_by_layer: int  # for the backward pass, without checkpointing
    saved_outside: int  # embeddings, the last norm
    backward_work: int  # peak of a layer's backward pass, without saved tensors
    forward_peak: int  # peak of a pass without gradients
    forward: Moved  # by a layer without gradients
    training: Moved  # by a layer forward and backward, without the gradients of weights


@cache
def trace_activations(model: PlannedModel, dtype: str, length: int) -> Activations:
    """Activations of a pass over one sequence of `length` tokens.

    The attention is the family's own under torch, without a mask, as `build_model_inputs` makes none.
    """
    # transformers would build a mask: fake positions do not show that nothing is packed.
    whole = mock.patch("transformers.masking_utils.find_packed_sequence_indices", lambda positions: None)
    # Fake tensors do not support grouped matrix products in fp32.
    grouped = mock.patch("transformers.integrations.moe._can_use_grouped_mm", lambda *_: dtype != "fp32")
    with FakeTensorMode(), whole, grouped:
        one, two = (_trace(model.plain, dtype, length, num_layers) for num_layers in (1, 2))
    by_layer = two.saved_by_layer - one.saved_by_layer
    return two._replace(
        saved_by_layer=by_layer,
        saved_outside=one.saved_by_layer - by_layer,
        forward=_difference(two.forward, one.forward),
        training=_difference(two.training, one.training),
    )


def _difference(two: Moved, one: Moved) -> Moved:
    return Moved(two.launches - one.launches, two.num_bytes - one.num_bytes)


def _trace(plain: PreTrainedModel, dtype_name: str, length: int, num_layers: int) -> Activations:
    """Activations of a model of a few layers; everything that it saves counts as `saved_by_layer`."""
    config = copy.deepcopy(plain.config)
    dtype = DTYPES["bf16" if dtype_name == "fp16" else dtype_name]  # fp16 is as large as bf16
    config.num_hidden_layers = num_layers
    config.use_cache = False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    set_dropout(config, 0.0)
    backbone = backbone_of(type(plain)._from_config(config, dtype=dtype).train())
    ids = torch.zeros(1, length, dtype=torch.int64)
    with LiveBytes(backbone) as live:
        with torch.no_grad():
            backbone(input_ids=ids)
        forward_peak = live.peak
        forward = live.moved
        hidden = backbone(input_ids=ids)[0]
        saved = live.now
    del hidden
    backbone.requires_grad_(False)  # gradients of weights are counted by the plans
    width = backbone.get_input_embeddings().weight.shape[1]
    embedded = torch.zeros(1, length, width, dtype=dtype, requires_grad=True)
    with LiveBytes(backbone) as live:
        hidden = backbone(inputs_embeds=embedded)[0]
        before = live.peak = live.now
        hidden.backward(hidden.detach())
        return Activations(saved, 0, live.peak - before, forward_peak, forward, live.moved)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages created by operations and still alive, without weights, and what the
    operations move.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.moved = Moved(0, 0)
        weights = [*module.parameters(), *module.buffers()]
        self._known: dict[int, Any] = {weight.untyped_storage()._cdata: weight for weight in weights}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count new storages."""
        result = function(*args, **(kwargs or {}))
        results = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        for value in results:
            self._note(value)
        name = str(function)
        is_view = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        if results and not is_view and not any(part in name for part in NO_KERNELS):
            given = [] if any(part in name for part in PRODUCTS) else [*tree_leaves(args), *results]
            moved = sum(t.numel() * t.element_size() for t in given if isinstance(t, torch.Tensor))
            self.moved = Moved(self.moved.launches + 1, self.moved.num_bytes + moved)
        return result

    def _note(self, value: Any) -> None:
        if value.device.type == "meta":
            return
        storage = value.untyped_storage()
        key = storage._cdata
        num_bytes = storage.nbytes()
        if key in self._known:
            return

        def forget(_: Any) -> None:
            self.now -= num_bytes
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, forget)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
