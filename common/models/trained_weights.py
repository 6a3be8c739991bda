"""A trained model's weights under the names of plain transformers, adapters merged on request.

# O output rows, I input columns, r rank of an adapter
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from common.models.loading import plain_model


class TrainedWeight(NamedTuple):
    """A weight and, where LoRA adapts it, the factors and the scaling of its adapter."""

    parameter: torch.Tensor
    lora_a: torch.Tensor | None = None  # (r, I)
    lora_b: torch.Tensor | None = None  # (O, r)
    scaling: float = 0.0
    is_stored_transposed: bool = False  # GPT-2's Conv1D keeps (I, O)

    def tensors(self) -> list[torch.Tensor]:
        """Return the weight and, if it has an adapter, the adapter's factors A and B."""
        return [self.parameter] if self.lora_a is None else [self.parameter, self.lora_a, self.lora_b]

    def replace_tensors(self, tensors: list[torch.Tensor]) -> "TrainedWeight":
        """Return the same with others in the place of `tensors()`, such as gathered ones."""
        return self._replace(**dict(zip(("parameter", "lora_a", "lora_b"), tensors, strict=False)))

    def merged(
        self, take: Callable[[torch.Tensor, int], torch.Tensor] = lambda factor, dim: factor
    ) -> torch.Tensor:
        """Return weight + scaling B A in the weight's dtype, added in fp32; without adapter itself.

        Nothing is edited. Where the weight is a part of the whole one, `take(factor, dim)` must return the
        same part along dimension `dim` (of the weight as it is stored) of a factor that has that dimension.
        """
        if self.lora_a is None:
            return self.parameter
        left, right = self.lora_b.float(), self.lora_a.float()
        if self.is_stored_transposed:
            left, right = right.T, left.T
        delta = self.scaling * (take(left, 0) @ take(right, 1))
        return (self.parameter.float() + delta).to(self.parameter.dtype)


def trained_weights(model: nn.Module) -> dict[str, TrainedWeight]:
    """Return {plain name: weight} of a transformers model or its PEFT wrapper; tied weights appear once."""
    plain = plain_model(model)
    layers = {name: module for name, module in plain.named_modules() if isinstance(module, LoraLayer)}
    weights = {}
    for name, parameter in plain.named_parameters():
        if ".lora_" in name:
            continue
        layer = layers.get(name.removesuffix(".base_layer.weight")) if ".base_layer.weight" in name else None
        weights[name.replace(".base_layer.", ".")] = TrainedWeight(parameter, *_adapter_of(layer))
    return weights


def _adapter_of(layer: Any) -> tuple[Any, ...]:
    if layer is None:
        return ()
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return a, b, layer.scaling["default"], bool(getattr(layer, "fan_in_fan_out", False))
