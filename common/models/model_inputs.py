"""Sequences laid end to end, as a model reads them: padded rows, or one row without padding, for which
torch's variable-length attention stands under transformers' modules: no padding, no mask.

flash-attn's own kernel comes with transformers; torch's is for GPUs where flash-attn is not installed.

# S sequences, T tokens of the longest, total tokens of all, H query heads, D width of a head
"""

import functools
import inspect
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from common.data.packed_batch import pad_sequences, padded_slots, to_device, token_positions
from common.ranks import distributed

# Whether the pass that runs has packed sequences; None: it is none of ours.
IS_PACKED: ContextVar[bool | None] = ContextVar("IS_PACKED", default=None)
VARLEN_ATTENTION = "triptych_varlen"
FLASH_ATTENTION = "flash_attention_2"
KERNELS = (VARLEN_ATTENTION, FLASH_ATTENTION)
KERNELS_FROM = (8, 0)  # compute capability of Ampere
ATTENDS = {"full_attention", "sliding_attention", "chunked_attention"}  # kinds of layers without a state


@dataclass(frozen=True)
class ModelInputs:
    """What a forward pass takes, and the slot of each token of the packed order in it; built on the CPU.

    Padded: rows (S, T) with the padding on the right. There is no mask: a causal model's token never sees
    what stands behind it, and without one attention takes its fast path. Packed: one row (1, total), for
    models whose attention is told where sequences begin; a single row is both. Slots count rows end to end;
    they stay on the CPU, where tokens are chosen by masks.
    """

    input_ids: torch.Tensor  # (S, T) or (1, total) int64
    position_ids: torch.Tensor  # the same shape, counted within each sequence
    token_slots: torch.Tensor  # (total,) int64 on the CPU
    last_slots: torch.Tensor  # (S,) int64 on the CPU, of each sequence's last token
    num_pairs: int  # of tokens that attention compares: the squared lengths, added up
    cu_seqlens: torch.Tensor | None = None  # (S + 1,) int32, of one row only
    max_length: int = 0  # of one row only

    @property
    def num_tokens(self) -> int:
        """The tokens without padding."""
        return len(self.token_slots)

    def to(self, device: torch.device | str, *more: torch.Tensor) -> tuple[Any, ...]:
        """Return the inputs on a device, and `more` with them, by one copy."""
        names = [n for n in ("input_ids", "position_ids", "cu_seqlens") if getattr(self, n) is not None]
        moved = to_device([*(getattr(self, name) for name in names), *more], device)
        return replace(self, **dict(zip(names, moved, strict=False))), *moved[len(names) :]

    def model_arguments(self, *, with_starts: bool) -> dict[str, Any]:
        """The arguments of a transformers backbone: `position_ids` among them, and where sequences begin in
        a row, if its layers take that.
        """
        arguments = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "use_cache": False,
        }
        if with_starts and self.cu_seqlens is not None:  # as transformers hands them through to attention
            arguments |= {f"cu_seq_lens_{x}": self.cu_seqlens for x in "qk"}
            arguments |= {f"max_length_{x}": self.max_length for x in "qk"}
        return arguments


def build_model_inputs(token_ids: torch.Tensor, lengths: torch.Tensor, *, is_packed: bool) -> ModelInputs:
    """Model inputs of sequences laid end to end: token_ids (total,) int64, lengths (S,) int64 above 0, all on
    the CPU.
    """
    ends = lengths.cumsum(0)
    num_pairs = int(lengths.square().sum())
    if is_packed or len(lengths) == 1:
        return ModelInputs(
            token_ids.unsqueeze(0),
            token_positions(lengths).unsqueeze(0),
            torch.arange(len(token_ids)),
            ends - 1,
            num_pairs,
            cu_seqlens=torch.cat([ends.new_zeros(1), ends]).int(),
            max_length=int(lengths.max()),
        )
    input_ids, _ = pad_sequences(token_ids, lengths)
    position_ids = torch.arange(input_ids.shape[1]).expand(input_ids.shape)
    slots = padded_slots(lengths)
    return ModelInputs(input_ids, position_ids, slots, slots[ends - 1], num_pairs)


def choose_attention(model_class: Any, config: Any, dtype: str, *, is_packed: bool = False) -> str | None:
    """Return the attention to load a model with; None is transformers' choice, torch's own.

    Kernels need 16-bit weights and a GPU that has them; packed sequences are worth one of torch's where
    flash-attn is not. Says once for a kind of model that flash-attn is installed and not used.
    """
    if not distributed.has_gpu() or dtype not in ("bf16", "fp16"):
        return None
    has_kernels = torch.cuda.get_device_capability(distributed.device()) >= KERNELS_FROM
    if is_flash_attn_2_available():
        if has_kernels and _serves_flash(model_class, config):
            return FLASH_ATTENTION
        why = f"{config.model_type} cannot be computed by it" if has_kernels else "the GPU is too old for it"
        distributed.say_once(f"note: flash-attn is installed and not used: {why}")
    return VARLEN_ATTENTION if is_packed and has_kernels and takes_own_kernels(model_class, config) else None


def _serves_flash(model_class: Any, config: Any) -> bool:
    """Whether a class, None for remote code, computes with flash-attn what it computes without."""
    config, others = config.get_text_config(), getattr(model_class, "_compatible_flash_implementations", None)
    return (
        getattr(model_class, "_supports_flash_attn", False)
        and FLASH_ATTENTION in (others or [FLASH_ATTENTION])
        and not getattr(config, "alibi", False)  # Falcon's class says that it does, and raises
        and "local" not in getattr(config, "attention_layers", ())  # GPT-Neo's windows are left out there
        and not config.is_heterogeneous  # heads of 512 (Gemma 4), where 256 is the kernels' most
    )


def takes_own_kernels(model_class: Any, config: Any) -> bool:
    """Whether a class calls any attention that is registered, and needs nothing of it that sdpa lacks (caps
    of scores, sinks) or kernels do (values of a width of their own, heads wider than 256).
    """
    is_plain = getattr(model_class, "_supports_attention_backend", False) and model_class._supports_sdpa
    config = config.get_text_config()
    return is_plain and not hasattr(config, "v_head_dim") and not config.is_heterogeneous


def takes_packed(model: PreTrainedModel) -> bool:
    """Whether the model's layers are told where sequences begin, so that they may stand end to end."""
    # Classes with an attention of their own are not told, nor are recurrent layers.
    if model.config._attn_implementation not in KERNELS or not model._supports_attention_backend:
        return False
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if model._is_stateful or not ATTENDS.issuperset(kinds):
        return False
    return _hands_through(type(getattr(model, model.base_model_prefix)))


@functools.cache
def _hands_through(backbone_class: type) -> bool:
    parameters = inspect.signature(backbone_class.forward).parameters
    return "position_ids" in parameters and any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def plain_attention(model: PreTrainedModel) -> str:
    """Return torch's attention for the model's class."""
    return "sdpa" if model._supports_sdpa else "eager"


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


_find_packed_sequences = masking_utils.find_packed_sequence_indices


def _find_known_sequences(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Return the number of each token's sequence where rows hold several, else None. transformers would look
    at the positions whether they do: the host would wait in each pass.
    """
    is_packed = IS_PACKED.get()
    if is_packed is None:
        return _find_packed_sequences(position_ids)
    return (position_ids == 0).cumsum(-1) if is_packed else None


masking_utils.find_packed_sequence_indices = _find_known_sequences
AttentionInterface.register(VARLEN_ATTENTION, attend_packed)
AttentionMaskInterface.register(VARLEN_ATTENTION, mask_unless_packed)
