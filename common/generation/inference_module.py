"""A second module of a model's structure, for generation: weights are lent to it and taken back.

It has no hooks of DeepSpeed, no adapters and no gradient checkpointing, and its own copy of the
configuration, so nothing that generation wants touches the module that is trained.
"""

import copy

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

from common.generation.slot_attention import choose_slot_attention


class InferenceModule:
    """An empty transformers module; `lend` gives it a weight, `take_back` takes all of them back."""

    def __init__(self, source: PreTrainedModel, device: torch.device) -> None:
        config = copy.deepcopy(source.config)
        config.use_cache = True
        config._attn_implementation = choose_slot_attention(source, device)
        with init_empty_weights(include_buffers=False):
            self.module: PreTrainedModel = type(source)(config)
        self.module.tie_weights()  # each empty weight is an object of its own
        self.module.eval().requires_grad_(False)
        buffers = dict(source.named_buffers())
        for prefix, module in self.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffers.get(f"{prefix}.{name}".lstrip("."), buffer).to(device))
        self._owners = _find_owners(self.module)

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
