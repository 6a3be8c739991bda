"""A second module of a model's structure, for generation: weights are lent to it and taken back.

It has no hooks of DeepSpeed, no adapters and no gradient checkpointing, and its own copy of the
configuration, so nothing that generation wants touches the module that is trained.
"""

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

# From here on torch's own product is as fast: what is below is a step of decoding.
_FEW_ROWS = 256


class InferenceModule:
    """An empty transformers module; `lend` gives it a weight, `take_back` all of them.

    `cut` may change the module before it gets any weight, to hold one rank's part of them.
    """

    def __init__(
        self,
        source: PreTrainedModel,
        device: torch.device,
        cut: Callable[[PreTrainedModel], None] = lambda module: None,
    ) -> None:
        config = copy.deepcopy(source.config)
        config.use_cache = True
        if config._attn_implementation == "flash_attention_2":
            config._attn_implementation = "sdpa"  # flash-attn takes none of the masks of slots
        with init_empty_weights(include_buffers=False):
            self.module: PreTrainedModel = type(source)(config)
        self.module.tie_weights()  # each empty weight is an object of its own
        cut(self.module)
        self.module.eval().requires_grad_(False)
        buffers = dict(source.named_buffers())
        for prefix, module in self.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffers.get(f"{prefix}.{name}".lstrip("."), buffer).to(device))
        self._owners = _find_owners(self.module)
        for module in self.module.modules():
            if type(module) is nn.Linear:
                module.__class__ = _DecodeLinear

    def lend(self, name: str, weight: torch.Tensor) -> None:
        """Put a weight in its place, and in those that are tied to it; nothing is copied."""
        parameter = nn.Parameter(weight, requires_grad=False)
        for module, attribute in self._owners[name]:
            module._parameters[attribute] = parameter

    def take_back(self) -> None:
        """Leave no weight behind."""
        for owners in self._owners.values():
            for module, attribute in owners:
                parameter = module._parameters[attribute]
                module._parameters[attribute] = nn.Parameter(parameter.to("meta"), requires_grad=False)


class _DecodeLinear(nn.Linear):
    """A linear layer that on a CPU multiplies a few rows as `(W x^T)^T`.

    MKL reads a row-major weight from the left up to twice as fast as its transpose from the right.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        num_rows = x.numel() // x.shape[-1]
        if x.device.type != "cpu" or x.dtype != torch.float32 or not 1 < num_rows <= _FEW_ROWS:
            return F.linear(x, self.weight, self.bias)
        rows = torch.mm(self.weight, x.reshape(num_rows, -1).t()).t()
        rows = rows if self.bias is None else rows + self.bias
        return rows.unflatten(0, x.shape[:-1])


def _find_owners(root: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return {parameter name: every (module, attribute) that holds it}; tied weights have several."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in root.modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, attribute))
    return {name: owners[id(parameter)] for name, parameter in root.named_parameters()}


def share_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a module for generation that holds the weights of `model` itself."""
    inference = InferenceModule(model, next(model.parameters()).device)
    for name, parameter in model.named_parameters():
        inference.lend(name, parameter.data)
    return inference.module
