"""torch's variable-length attention under transformers' modules: sequences end to end, no padding, no mask.

flash-attn's own kernel comes with transformers; this one is for GPUs where flash-attn is not installed.

# S sequences, total tokens of all, H query heads, D width of a head
"""

import importlib.util
import inspect
from typing import Any

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "triptych_varlen"
FLASH_ATTENTION = "flash_attention_2"


def choose_attention(model_class: type, config: Any, dtype: str, *, is_packed: bool = False) -> str | None:
    """Return the attention to load a model with; None is transformers' choice, torch's own.

    Kernels need a GPU and 16-bit weights; packed sequences are worth one of torch's where flash-attn is not.
    """
    if not torch.cuda.is_available() or dtype not in ("bf16", "fp16"):
        return None
    if importlib.util.find_spec("flash_attn"):
        return FLASH_ATTENTION
    takes_any = getattr(model_class, "_supports_attention_backend", False)
    # Scores capped before the softmax are no business of torch's kernel.
    has_cap = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
    return NAME if is_packed and takes_any and not has_cap else None


def takes_packed(model: PreTrainedModel) -> bool:
    """Whether the model's attention is told where sequences begin, so that they may stand end to end."""
    if model.config._attn_implementation not in (NAME, FLASH_ATTENTION):
        return False
    backbone = getattr(model, model.base_model_prefix)
    parameters = inspect.signature(backbone.forward).parameters
    return "position_ids" in parameters and any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def attend_packed(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return (1, total, H, D) for query, key, value (1, heads, total, D); other passes go to torch's sdpa."""
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    output = varlen.varlen_attn(
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.unsqueeze(0), None


def mask_unless_packed(*, batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Any:
    """Return no mask for one row without padding that is no plain causal one: transformers has seen from the
    positions that it holds several sequences, and would make a mask of total x total.
    """
    is_packed = kwargs.get("attention_mask") is None and not kwargs.get("allow_is_causal_skip", True)
    if is_packed and batch_size == 1 and q_length == kv_length:
        return None
    return sdpa_mask(batch_size=batch_size, q_length=q_length, kv_length=kv_length, **kwargs)


AttentionInterface.register(NAME, attend_packed)
AttentionMaskInterface.register(NAME, mask_unless_packed)
