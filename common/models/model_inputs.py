"""Sequences laid end to end, as a model reads them: padded rows, or one row without padding, for which
torch's variable-length attention stands under transformers' modules: no padding, no mask.

flash-attn's own kernel comes with transformers; torch's is for GPUs where flash-attn is not installed.

# S sequences, T tokens of the longest, total tokens of all, H query heads, D width of a head
"""

import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from common.data.packed_batch import pad_sequences, padded_slots, token_positions

VARLEN_ATTENTION = "triptych_varlen"
FLASH_ATTENTION = "flash_attention_2"


@dataclass(frozen=True)
class ModelInputs:
    """What a forward pass takes, and the slot of each token of the packed order in it.

    Padded: rows (S, T) with the padding on the right. There is no mask: a causal model's token never sees
    what stands behind it, and without one attention takes its fast path. Packed: one row (1, total), for
    models whose attention is told where sequences begin. Slots count rows end to end; they are on the CPU,
    where tokens are chosen by masks.
    """

    input_ids: torch.Tensor  # (S, T) or (1, total) int64
    position_ids: torch.Tensor  # the same shape, counted within each sequence
    token_slots: torch.Tensor  # (total,) int64 on the CPU
    last_slots: torch.Tensor  # (S,) int64 on the CPU, of each sequence's last token
    num_pairs: int  # of tokens that attention compares: the squared lengths, added up
    cu_seqlens: torch.Tensor | None = None  # (S + 1,) int32, packed only
    max_length: int = 0  # packed only

    @property
    def num_tokens(self) -> int:
        """The tokens without padding."""
        return len(self.token_slots)

    def model_arguments(self) -> dict[str, Any]:
        """The arguments of a transformers backbone, `position_ids` among them."""
        arguments = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "use_cache": False,
        }
        if self.cu_seqlens is not None:  # the names that transformers hands through to its attention
            arguments |= {f"cu_seq_lens_{x}": self.cu_seqlens for x in "qk"}
            arguments |= {f"max_length_{x}": self.max_length for x in "qk"}
        return arguments


def build_model_inputs(
    token_ids: torch.Tensor, lengths: torch.Tensor, *, is_packed: bool, device: torch.device | str = "cpu"
) -> ModelInputs:
    """Model inputs on `device` of sequences laid end to end: token_ids (total,) int64, lengths (S,) int64
    above 0, both on the CPU.
    """
    ends = lengths.cumsum(0)
    num_pairs = int(lengths.square().sum())
    if is_packed:
        return ModelInputs(
            token_ids.unsqueeze(0).to(device),
            token_positions(lengths).unsqueeze(0).to(device),
            torch.arange(len(token_ids)),
            ends - 1,
            num_pairs,
            cu_seqlens=torch.cat([ends.new_zeros(1), ends]).to(device, torch.int32),
            max_length=int(lengths.max()),
        )
    input_ids, _ = pad_sequences(token_ids, lengths)
    position_ids = torch.arange(input_ids.shape[1], device=device).expand(input_ids.shape)
    slots = padded_slots(lengths)
    return ModelInputs(input_ids.to(device), position_ids, slots, slots[ends - 1], num_pairs)


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
    return VARLEN_ATTENTION if is_packed and takes_any and not has_cap else None


def takes_packed(model: PreTrainedModel) -> bool:
    """Whether the model's attention is told where sequences begin, so that they may stand end to end."""
    if model.config._attn_implementation not in (VARLEN_ATTENTION, FLASH_ATTENTION):
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


AttentionInterface.register(VARLEN_ATTENTION, attend_packed)
AttentionMaskInterface.register(VARLEN_ATTENTION, mask_unless_packed)
