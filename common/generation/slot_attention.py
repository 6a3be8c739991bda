"""flash-attn's key/value-cache kernel under transformers' modules, where it can be imported.

It reads of each slot only what is there and needs no mask, and grouped heads are not repeated. Passes over
prompts go to torch's attention.

# n rows, H query heads, L positions, D width of a head
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.models.varlen_attention import FLASH_ATTENTION
from common.models.varlen_attention import NAME as VARLEN

NAME = "triptych_slots"
_lengths: torch.Tensor | None = None  # (n,) int32 of the decode pass that is under way


def choose_slot_attention(source: PreTrainedModel, device: torch.device) -> str:
    """Return the name of the attention for generation with a module like `source`."""
    chosen = source.config._attn_implementation
    is_usable = (
        device.type == "cuda"
        and source.dtype in (torch.bfloat16, torch.float16)
        and importlib.util.find_spec("flash_attn") is not None
    )
    # Models of an attention of their own, and scores capped before the softmax, are torch's business.
    takes_any = getattr(source, "_supports_attention_backend", False)
    if is_usable and takes_any and getattr(source.config, "attn_logit_softcapping", None) is None:
        return NAME
    return "sdpa" if chosen in (FLASH_ATTENTION, VARLEN) else chosen


@contextmanager
def decoding(positions: torch.Tensor) -> Iterator[None]:
    """Say that the pass in the block adds one token to each slot, at these positions (n,) int64."""
    global _lengths
    _lengths = (positions + 1).to(torch.int32)
    try:
        yield
    finally:
        _lengths = None


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return (n, 1, H, D) for a query (n, H, 1, D) and keys and values (n, heads, L, D) of a `SlotCache`."""
    if _lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    from flash_attn import flash_attn_with_kvcache

    output = flash_attn_with_kvcache(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        # A pass may be rounded up to slots that nobody is in, whose lengths mean nothing.
        cache_seqlens=_lengths.clamp(max=key.shape[2]),
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
    )
    return output, None


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
