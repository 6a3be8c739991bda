"""A causal LM cut for tensor-parallel generation: each rank computes with its part of the weights.

Modules keep their places and parameters their names; those that must talk to other ranks change their class.
For inference: gradients do not pass through the sums over ranks.

# t ranks, V vocabulary, H hidden size
"""

import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from common.generation.tp_plans import Cut

HEAD_WIDTHS = ("head_dim", "head_size")  # what tells an attention from an MLP
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads")
KEY_VALUE_COUNTS = ("num_kv_heads", "num_key_value_heads")
QUERY_WIDTHS = ("embed_dim", "hidden_size", "split_size")  # of all query heads together


def cut_module(
    model: nn.Module, cuts: dict[str, Cut], tp_rank: int, tp_size: int, group: dist.ProcessGroup | None
) -> None:
    """Turn a whole transformers causal LM, real or on the meta device, into this rank's part, in place.

    cuts are those of `build_cuts(model, tp_size)`; group are the t ranks that compute together, None for all
    ranks. Afterwards every forward pass must be made by all of them with equal inputs, and gives all of them
    equal logits. Parameters may be replaced by others of their local shapes at any time.
    """
    if tp_size == 1:
        return
    cut_by_id: dict[int, Cut] = {}
    for name, parameter in model.named_parameters():
        if name in cuts:
            cut_by_id[id(parameter)] = cuts[name]
            # `data` is replaced, not the parameter: weights stay tied. A view would keep the whole in memory.
            part = cuts[name].take(parameter.data, tp_rank)
            parameter.data = part.clone(memory_format=torch.contiguous_format)
    head = model.get_output_embeddings()
    for module in model.modules():
        cut = cut_by_id.get(id(module._parameters.get("weight")))
        if cut is not None:
            connect(module, cut, tp_rank, group, is_head=module is head)
    num_heads = model.config.num_attention_heads
    for module in model.modules():
        has_cut = any(id(child._parameters.get("weight")) in cut_by_id for child in module.children())
        if has_cut and any(hasattr(module, name) for name in HEAD_WIDTHS):
            narrow_attention(module, num_heads, tp_rank, tp_size)


def connect(
    module: nn.Module, cut: Cut, tp_rank: int, group: dist.ProcessGroup | None, *, is_head: bool
) -> None:
    """Make a module with a cut weight say its local sizes and, where it must, talk to the other ranks."""
    rows, columns = module.weight.shape
    kind: type | None = None
    if isinstance(module, nn.Embedding):
        # Subclasses, such as Gemma 3's that scales what it finds, keep their own forward.
        kind = type(f"Cut{type(module).__name__}", (CutEmbedding, type(module)), {})
        module.num_embeddings, module.first_row = rows, tp_rank * rows
        module.padding_idx = None  # it only stops gradients, and may lie among another rank's rows
    elif isinstance(module, Conv1D):
        module.nx, module.nf = rows, columns
        kind = RowConv1D if cut.dim == 0 else None
    else:
        module.out_features, module.in_features = rows, columns
        kind = RowLinear if cut.dim == 1 else GatheredHead if is_head else None
    if kind is not None:
        module.__class__ = kind
        module.tp_group = group


class RowLinear(nn.Linear):
    """A Linear with this rank's inputs (..., H/t): the sum over ranks is the whole's output."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the whole outputs, the bias added once."""
        output = F.linear(hidden, self.weight)
        dist.all_reduce(output, group=self.tp_group)
        return output if self.bias is None else output + self.bias


class RowConv1D(Conv1D):
    """The same for the transposed Linear of GPT-2."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the whole outputs, the bias added once."""
        output = hidden @ self.weight
        dist.all_reduce(output, group=self.tp_group)
        return output + self.bias


class CutEmbedding(nn.Embedding):
    """An embedding with V/t rows: tokens of other ranks count as zeros, and the sum has them all."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the whole embeddings (..., H) of input_ids (...)."""
        rows = input_ids - self.first_row
        is_elsewhere = (rows < 0) | (rows >= self.num_embeddings)
        output = super().forward(rows.masked_fill(is_elsewhere, 0))
        output = output.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        dist.all_reduce(output, group=self.tp_group)
        return output


class GatheredHead(nn.Linear):
    """An output head with V/t rows: every rank gets the logits of all."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (..., V)."""
        part = super().forward(hidden).contiguous()
        parts = part.new_empty(dist.get_world_size(self.tp_group), *part.shape)
        dist.all_gather_into_tensor(parts.flatten(0, 1), part, group=self.tp_group)
        return parts.movedim(0, -2).flatten(-2)


def narrow_attention(module: nn.Module, num_heads: int, tp_rank: int, tp_size: int) -> None:
    """Make an attention count this rank's heads only; `num_heads` are the query heads of all ranks."""
    if hasattr(module, "num_key_value_groups"):
        num_kv_heads = num_heads // module.num_key_value_groups
        module.num_key_value_groups = num_heads // tp_size // max(num_kv_heads // tp_size, 1)
    for name in (*QUERY_COUNTS, *QUERY_WIDTHS, *KEY_VALUE_COUNTS):
        if hasattr(module, name):
            # Ranks share a key/value head where there are fewer heads than ranks.
            setattr(module, name, max(getattr(module, name) // tp_size, 1))
    if "alibi" in inspect.signature(module.forward).parameters:
        first, count = tp_rank * num_heads // tp_size, num_heads // tp_size
        module.register_forward_pre_hook(AlibiOfHeads(num_heads, first, count), with_kwargs=True)


class AlibiOfHeads:
    """A hook that hands an attention the position biases of its own heads: the model builds those of all."""

    def __init__(self, num_heads: int, first: int, count: int) -> None:
        self.num_heads, self.first, self.count = num_heads, first, count

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with `alibi`, and a mask that has it in it, narrowed to the rank's heads."""
        alibi, mask = kwargs.get("alibi"), kwargs.get("attention_mask")
        if alibi is None:
            return args, kwargs
        if alibi.ndim == 3:  # BLOOM: (B * heads, 1, keys)
            narrowed = self.narrow(alibi.unflatten(0, (-1, self.num_heads))).flatten(0, 1)
        else:  # Falcon: (B, heads, 1, keys)
            narrowed = self.narrow(alibi)
        if mask is not None and mask.shape[1] == self.num_heads:  # Falcon's masked alibi
            mask = self.narrow(mask)
        return args, kwargs | {"alibi": narrowed, "attention_mask": mask}

    def narrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's heads of a tensor (B, heads, ...)."""
        return tensor.narrow(1, self.first, self.count)
