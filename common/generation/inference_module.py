"""A second module with a model's structure, for generation; weights are attached to it and detached again.

It has no DeepSpeed hooks, no adapters and no gradient checkpointing, and its own copy of the
configuration, so generation never changes the trained module. `cut_module` turns it into one rank's part of
the model: modules and parameters keep their names, and forward passes that need other ranks are wrapped.
Gradients do not pass through the sums over ranks.

# t ranks, V vocabulary, H hidden size
"""

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from common.generation.kv_cache import choose_attention
from common.generation.products import InputGroups, linear, use_adapter, use_onednn, use_packed_weight
from common.generation.tp_plans import Cut
from common.models.lora import TrainedWeight

HEAD_WIDTHS = ("head_dim", "head_size")  # attributes that distinguish attention from an MLP
# Attributes of an attention module: numbers of heads, and the width of all query heads together.
COUNTS = ("num_heads", "num_attention_heads", "n_heads", "num_kv_heads", "num_key_value_heads")
WIDTHS = ("embed_dim", "hidden_size", "split_size")


class InferenceModule:
    """A transformers module without weights; `attach` gives it a weight, `detach` removes all of them.

    Captured graphs read weights at fixed addresses, so slices can keep their memory to be refilled. On a CPU
    oneDNN multiplies the weights of `nn.Linear`, with `by_onednn`. Of the weights `unmerged`, adapters are
    computed beside them, and those in 4 bits stay packed.
    """

    def __init__(
        self,
        source: PreTrainedModel,
        device: torch.device,
        *,
        by_onednn: bool = True,
        unmerged: Mapping[str, TrainedWeight] | None = None,
    ) -> None:
        config = copy.deepcopy(source.config)
        config.use_cache = True
        config._attn_implementation = choose_attention(source)
        with init_empty_weights(include_buffers=False):
            self.module: PreTrainedModel = type(source)(config)
        self.module.tie_weights()  # empty initialization has untied them
        self.module.eval().requires_grad_(False)
        if device.type == "cpu" and by_onednn:
            for module in self.module.modules():
                use_onednn(module)
        buffers = dict(source.named_buffers())
        for prefix, module in self.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffers.get(f"{prefix}.{name}".lstrip("."), buffer).to(device))
        owners: dict[int, list[tuple[nn.Module, str]]] = {}  # several for a tied weight
        for module in self.module.modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((module, attribute))
        self._owners = {name: owners[id(p)] for name, p in self.module.named_parameters()}
        self._slices: dict[str, torch.Tensor] = {}  # weights outside the trainer's memory
        self._adapted: dict[str, nn.Module] = {}
        groups = InputGroups(self.module)
        for name, weight in (unmerged or {}).items():
            [(module, _)] = self._owners[name]
            if weight.packing:
                module.packing = weight.packing
                use_packed_weight(module)
            if weight.lora_a is not None:
                self._adapted[name] = module
                use_adapter(module, groups)

    def attach(self, name: str, weight: torch.Tensor, *, is_shared: bool = True) -> None:
        """Make a tensor the weight of this name and of those tied to it. `is_shared`: its memory is the
        trainer's; if not, and a slice of this name was kept, it is copied into that slice.
        """
        if not is_shared:
            kept = self._slices.setdefault(name, weight)
            weight = kept if kept is weight else kept.copy_(weight)
        parameter = nn.Parameter(weight, requires_grad=False)
        for module, attribute in self._owners[name]:
            module._parameters[attribute] = parameter

    def attach_adapter(self, name: str, weight: TrainedWeight, *, is_shared: bool = True) -> None:
        """Compute the adapter of `weight` beside the weight of this name; `is_shared` as in `attach`."""
        self._adapted[name].adapter.attach(weight.lora_a, weight.lora_b, weight.scaling, is_shared=is_shared)

    def detach(self, *, keep_slices: bool = False) -> None:
        """Remove all weights; with `keep_slices` the slices' memory stays, for the next `attach`."""
        for module in self._adapted.values():
            module.adapter.detach(keep_slices=keep_slices)
        if not keep_slices:
            self._slices.clear()
        for owners in self._owners.values():
            for module, attribute in owners:
                parameter = module._parameters[attribute]
                module._parameters[attribute] = nn.Parameter(parameter.to("meta"), requires_grad=False)


def share_weights(model: PreTrainedModel, *, by_onednn: bool = True) -> PreTrainedModel:
    """A module for generation that holds the weights of `model` itself; without `by_onednn` its products are
    rounded as the model's own on a CPU.
    """
    inference = InferenceModule(model, next(model.parameters()).device, by_onednn=by_onednn)
    for name, parameter in model.named_parameters():
        inference.attach(name, parameter.data)
    return inference.module


def cut_module(
    model: nn.Module, cuts: dict[str, Cut], tp_rank: int, tp_size: int, group: dist.ProcessGroup | None
) -> None:
    """Turn a whole transformers causal LM, real or on the meta device, into this rank's part, in place.

    cuts: from `build_cuts(model, tp_size)`; group: the t ranks that compute together, None for all ranks.
    Afterwards all of them must run every forward pass with equal inputs, and get equal logits.
    Parameters may be replaced by others of their local shapes at any time.
    """
    if tp_size == 1:
        return
    parameters = dict(model.named_parameters())
    cut_by_id = {id(parameters[name]): cut for name, cut in cuts.items()}
    for name, parameter in parameters.items():
        if name in cuts:
            # Replacing `data`, not the parameter, keeps weights tied. A view would keep the whole in memory.
            part = cuts[name].take(parameter.data, tp_rank)
            parameter.data = part.clone(memory_format=torch.contiguous_format)
    head = model.get_output_embeddings()
    for module in model.modules():
        cut = cut_by_id.get(id(module._parameters.get("weight")))
        if cut is not None:
            _connect(module, cut, tp_rank, group, is_head=module is head)
    num_heads = model.config.num_attention_heads
    for module in model.modules():
        has_cut = any(id(child._parameters.get("weight")) in cut_by_id for child in module.children())
        if has_cut and any(hasattr(module, name) for name in HEAD_WIDTHS):
            _set_local_heads(module, num_heads, tp_rank, tp_size)


def _connect(
    module: nn.Module, cut: Cut, tp_rank: int, group: dist.ProcessGroup | None, *, is_head: bool
) -> None:
    """Set the local sizes of a module with a sliced weight and, if needed, connect it to the other ranks."""
    rows, columns = module.weight.shape
    if isinstance(module, nn.Embedding):
        module.num_embeddings = rows
        module.padding_idx = None  # only affects gradients, and the row may be on another rank
        _sum_embeddings(module, tp_rank * rows, group)
    elif isinstance(module, Conv1D):
        module.nx, module.nf = rows, columns
        if cut.dim == 0:
            _sum_outputs(module, group)
    else:
        module.out_features, module.in_features = rows, columns
        if cut.dim == 1:
            _sum_outputs(module, group)
        elif is_head:
            _gather_logits(module, group)


def _sum_outputs(module: nn.Linear | Conv1D, group: dist.ProcessGroup | None) -> None:
    """Make a Linear with this rank's inputs (..., H/t) return the output summed over ranks, with the bias
    added once.
    """

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        is_transposed = isinstance(module, Conv1D)
        output = hidden @ module.weight if is_transposed else linear(hidden, module.weight)
        if hasattr(module, "adapter"):
            output = module.adapter.add(output, hidden)
        dist.all_reduce(output, group=group)
        return output if module.bias is None else output + module.bias

    module.forward = forward


def _sum_embeddings(module: nn.Embedding, first_row: int, group: dist.ProcessGroup | None) -> None:
    """Make an embedding with V/t rows return all tokens' embeddings (..., H): the sum over ranks, each with
    zeros for tokens of other ranks.

    Subclasses, such as Gemma 3's with its scaling, keep their own forward pass inside.
    """
    look_up = module.forward

    def forward(input_ids: torch.Tensor) -> torch.Tensor:
        rows = input_ids - first_row
        is_elsewhere = (rows < 0) | (rows >= module.num_embeddings)
        output = look_up(rows.masked_fill(is_elsewhere, 0))
        output = output.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        dist.all_reduce(output, group=group)
        return output

    module.forward = forward


def _gather_logits(module: nn.Linear, group: dist.ProcessGroup | None) -> None:
    """Make an output head with V/t rows return the logits (..., V) of all ranks."""
    compute = module.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        part = compute(hidden).contiguous()
        parts = part.new_empty(dist.get_world_size(group), *part.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), part, group=group)
        return parts.movedim(0, -2).flatten(-2)

    module.forward = forward


def _set_local_heads(module: nn.Module, num_heads: int, tp_rank: int, tp_size: int) -> None:
    """Set an attention's head counts and widths to this rank's; `num_heads`: query heads of all ranks."""
    if hasattr(module, "num_key_value_groups"):
        num_kv_heads = num_heads // module.num_key_value_groups
        module.num_key_value_groups = num_heads // tp_size // max(num_kv_heads // tp_size, 1)
    for name in (*COUNTS, *WIDTHS):
        if hasattr(module, name):
            # Ranks share a key/value head if there are fewer heads than ranks.
            setattr(module, name, max(getattr(module, name) // tp_size, 1))
    if "alibi" in inspect.signature(module.forward).parameters:
        heads = slice(tp_rank * num_heads // tp_size, (tp_rank + 1) * num_heads // tp_size)
        module.register_forward_pre_hook(partial(_select_alibi, num_heads, heads), with_kwargs=True)


def _select_alibi(
    num_heads: int, heads: slice, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass an attention the ALiBi biases of this rank's heads: the model builds those of all heads."""
    alibi, mask = kwargs.get("alibi"), kwargs.get("attention_mask")
    if alibi is None:
        return args, kwargs
    if alibi.ndim == 3:  # BLOOM: (B * heads, 1, keys)
        alibi = alibi.unflatten(0, (-1, num_heads))[:, heads].flatten(0, 1)
    else:  # Falcon: (B, heads, 1, keys)
        alibi = alibi[:, heads]
    if mask is not None and mask.shape[1] == num_heads:  # Falcon's masked alibi
        mask = mask[:, heads]
    return args, kwargs | {"alibi": alibi, "attention_mask": mask}
