"""The logits that a plain forward pass gives: what generation and training are compared with."""

from typing import Any

import torch
from torch import nn

from common.models.loading import build_position_ids, forward_accepts


def compute_logits(
    engine: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, *, num_last: int = 0
) -> torch.Tensor:
    """Return logits (B, T, V) of a causal LM or its engine; with `num_last` only the last so many positions.

    Positions are always passed where the model takes them, so left padding changes nothing.
    """
    model = getattr(engine, "module", engine)
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if forward_accepts(model, "position_ids"):
        inputs["position_ids"] = build_position_ids(attention_mask)
    if num_last and forward_accepts(model, "logits_to_keep"):
        inputs["logits_to_keep"] = num_last
    logits = engine(**inputs).logits
    return logits[:, -num_last:] if num_last else logits
