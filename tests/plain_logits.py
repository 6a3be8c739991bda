"""The logits of a plain forward pass and their log-probabilities: others are held to them."""

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


def plain_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    num_valid_tokens: int | None = None,
) -> torch.Tensor:
    """Return log softmax(logits / temperature) at `token_ids`, for logits (..., V) and ids (...)."""
    scaled = (logits / temperature)[..., :num_valid_tokens].log_softmax(-1)
    return scaled.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
