"""Attention over packed sequences (end to end in one row, without padding), under transformers' modules.

On a GPU flash-attn's kernel, or torch's if flash-attn is not installed; on a CPU torch's sdpa, segment by
segment. A segment is a sequence, or the prefix shared by several, or the rest of one of those after the
prefix: it then attends to the prefix's keys and its own.

# P segments, total tokens of all, keys: of all segments end to end, H heads of queries or of keys, D their
# width
"""

import functools
import inspect
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils
from transformers.integrations.flash_attention import flash_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

from common.models import exact
from common.models.transformers_internals import (
    TRANSFORMERS,
    attention_of,
    is_stateful,
    takes_any_attention,
    takes_flash,
    takes_sdpa,
)
from common.ranks import distributed
from common.ranks.deepspeed_internals import require_version

# Whether the running pass is packed; None: the pass is not ours.
IS_PACKED: ContextVar[bool | None] = ContextVar("IS_PACKED", default=None)
VARLEN_ATTENTION = "triptych_varlen"
FLASH_ATTENTION = "flash_attention_2"
KERNELS = (VARLEN_ATTENTION, FLASH_ATTENTION)
KERNELS_FROM = (8, 0)  # compute capability of Ampere
# The kernel of torch's varlen_attn without its custom operator, which costs the host 0.2 ms per call.
varlen_kernel = torch.ops.aten._flash_attention_forward
ATTENDS = {"full_attention", "sliding_attention"}  # layer types without a recurrent state
# Names of attention's output projections, and of query projections that are not fused with keys or values.
PROJECTIONS = {"q_proj", "o_proj", "out_proj", "dense", "c_proj", "Wo"}


@dataclass(frozen=True)
class Packing:
    """Boundaries of the segments of one row, and the keys that each attends to.

    `used_slots` are the slots whose last hidden states are used, without duplicates; the last layer may skip
    the others.
    """

    lengths: list[int]  # (P,) tokens of each segment
    key_lengths: list[int]  # (P,) keys that its last token attends to, itself included
    starts: torch.Tensor  # (P + 1,) int32
    key_starts: torch.Tensor  # (P + 1,) int32, into the keys
    key_slots: torch.Tensor | None = None  # (keys,) int64; None: each segment attends only to itself
    used_slots: torch.Tensor | None = None  # None: all
    masks: dict[Any, torch.Tensor | None] = field(default_factory=dict)  # by lengths, window and dtype

    def keys_of(self, states: torch.Tensor) -> torch.Tensor:
        """Keys or values (1, H, keys, D) for states (1, H, total, D)."""
        return states if self.key_slots is None else states.index_select(2, self.key_slots)

    @functools.cached_property
    def used_rows(self) -> list[torch.Tensor]:
        """Rows of each segment whose last hidden states are used."""
        starts = self.starts.long()
        edges = torch.searchsorted(self.used_slots, starts).tolist()
        return [self.used_slots[a:b] - start for a, b, start in zip(edges, edges[1:], starts, strict=False)]

    def mask_of(
        self,
        length: int,
        key_length: int,
        window: int | None,
        dtype: torch.dtype,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Additive mask of a segment's tokens, or of those at `rows`: (length, key_length), 0 and -inf; None
        means the plain causal mask.

        One tensor serves all segments and layers; sdpa would keep a copy of a boolean mask for each.
        """
        if rows is None and length == key_length and (window is None or window >= length):
            return None
        name = length, key_length, window, dtype
        if rows is None and name in self.masks:
            return self.masks[name]
        rows_seen = torch.arange(length, device=self.starts.device) if rows is None else rows
        own = (rows_seen + key_length - length).unsqueeze(1)
        back = own - torch.arange(key_length, device=own.device)  # distance from key to token
        is_seen = (back >= 0) & (back < (window or key_length))
        mask = torch.zeros(is_seen.shape, dtype=dtype, device=own.device).masked_fill_(~is_seen, -torch.inf)
        if rows is None:
            self.masks[name] = mask
        return mask


# ---------------------------------------------------------------------------------------------------------
# Choice of a model's attention
# ---------------------------------------------------------------------------------------------------------


def choose_attention(model_class: Any, config: Any, dtype: str) -> str | None:
    """Name of the attention to load a model with; None selects transformers' default, torch's own.

    The GPU kernels need 16-bit weights and a recent GPU. Prints once per model type if flash-attn is
    installed and not used.
    """
    install()
    takes_own = takes_own_kernels(model_class, config)
    if exact.is_on():
        if not takes_own:
            raise ValueError(
                f"--exact does not support the attention of {config.model_type}; leave the flag out"
            )
        return VARLEN_ATTENTION
    if not distributed.has_gpu():
        return VARLEN_ATTENTION if takes_own else None
    if dtype not in ("bf16", "fp16"):
        return None
    has_kernels = torch.cuda.get_device_capability(distributed.device()) >= KERNELS_FROM
    if is_flash_attn_2_available():
        if has_kernels and _supports_flash(model_class, config):
            return FLASH_ATTENTION
        why = f"it does not support {config.model_type}" if has_kernels else "the GPU is too old for it"
        distributed.print_once(f"note: flash-attn is installed and not used: {why}")
    return VARLEN_ATTENTION if has_kernels and takes_own else None


def _supports_flash(model_class: Any, config: Any) -> bool:
    """Whether a class (None: remote code) computes the same with flash-attn as without it."""
    config = config.get_text_config()
    return (
        takes_flash(model_class, FLASH_ATTENTION)
        and not getattr(config, "alibi", False)  # Falcon's class claims support, but raises
        and "local" not in getattr(config, "attention_layers", ())  # GPT-Neo's flash-attn ignores windows
        and not config.is_heterogeneous  # Gemma 4 has heads of 512; the kernels' limit is 256
    )


def takes_own_kernels(model_class: Any, config: Any) -> bool:
    """Whether a class calls any registered attention, and needs nothing that sdpa lacks (soft caps, sinks) or
    that the kernels lack (values of another width than keys, heads wider than 256).
    """
    is_plain = takes_any_attention(model_class) and takes_sdpa(model_class)
    config = config.get_text_config()
    return is_plain and not hasattr(config, "v_head_dim") and not config.is_heterogeneous


def backbone_name(model: PreTrainedModel) -> str:
    """Name of the attribute that holds everything before the head; Llama 4's text model names one that it
    does not have.
    """
    return model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"


def backbone_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model before its head."""
    return getattr(model, backbone_name(model))


def takes_packed(model: PreTrainedModel) -> bool:
    """Whether every layer of the model receives the boundaries of sequences, so that rows can be packed."""
    if not getattr(model, "packs_rows", True):  # as measured by family_probe.py
        return False
    # Custom attention classes and recurrent layers do not receive the boundaries.
    if attention_of(model) not in KERNELS or not takes_any_attention(model):
        return False
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if is_stateful(model) or not ATTENDS.issuperset(kinds):
        return False
    return _accepts_packing(type(backbone_of(model)))


@functools.cache
def _accepts_packing(backbone_class: type) -> bool:
    """Whether the backbone takes positions, and passes other arguments on to its layers."""
    parameters = inspect.signature(backbone_class.forward).parameters
    return "position_ids" in parameters and any(p.kind == p.VAR_KEYWORD for p in parameters.values())


def plain_attention(model: PreTrainedModel) -> str:
    """Name of torch's attention for the model's class."""
    return "sdpa" if takes_sdpa(model) else "eager"


# ---------------------------------------------------------------------------------------------------------
# Attention functions, as transformers calls them
# ---------------------------------------------------------------------------------------------------------


def attend_packed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention output (1, total, H, D) for query, key, value (1, H, total, D); without `packing` that of
    torch's sdpa.
    """
    if exact.is_on():
        return _attend_exactly(query, key, value, attention_mask, packing, scaling, sliding_window), None
    if packing is None:
        options = {"scaling": scaling, "dropout": dropout, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    dtype = query.dtype
    if dtype == torch.bfloat16 and not query.is_cuda:  # the backward pass takes up to twice as long in bf16
        query, key, value = (x.float() for x in (query, key, value))
    key, value = packing.keys_of(key), packing.keys_of(value)
    if query.is_cuda and not dropout:  # dropout is left to sdpa
        states = (x[0].transpose(0, 1) for x in (query, key, value))
        longest = max(packing.lengths), max(packing.key_lengths)
        output = run_kernel(*states, packing.starts, packing.key_starts, *longest, scaling, sliding_window)
        return output.unsqueeze(0), None
    options = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
    # Segment by segment; a narrowed last layer computes only `packing.used_slots`.
    used = packing.used_slots if narrowed_modules(module) else None
    rows = [None] * len(packing.lengths) if used is None else packing.used_rows
    counts = packing.lengths if used is None else list(map(len, rows))
    queries = query if used is None else query.index_select(2, used)
    states = (x.split(packing.key_lengths, 2) for x in (key, value))
    outputs = []
    for own, length, q, k, v in zip(rows, packing.lengths, queries.split(counts, 2), *states, strict=True):
        if q.shape[2]:
            mask = packing.mask_of(length, k.shape[2], sliding_window, q.dtype, own)
            causal = mask is None
            outputs.append(
                F.scaled_dot_product_attention(q, k, v, mask, dropout_p=dropout, is_causal=causal, **options)
            )
    output = torch.cat(outputs, 2)
    if used is not None:
        output = torch.zeros_like(query).index_copy(2, used, output)
    return output.to(dtype).transpose(1, 2).contiguous(), None


def _attend_exactly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    packing: Packing | None,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """As `attend_packed`, independent of the other rows."""
    if packing is None:
        seen = exact.seen_keys(mask, query.shape[2], key.shape[2], query.device, window)
        return exact.attend(query, key, value, seen, scaling)
    states = (packing.keys_of(x).split(packing.key_lengths, 2) for x in (key, value))
    segments = zip(query.split(packing.lengths, 2), *states, strict=True)
    outputs = [
        exact.attend(q, k, v, exact.seen_keys(None, q.shape[2], k.shape[2], q.device, window), scaling)
        for q, k, v in segments
        if q.shape[2]
    ]
    return torch.cat(outputs, 1)


def run_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest: int,
    longest_key: int,
    scaling: float | None,
    window: int | None,
    used: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention output (total, H, D) for segments end to end: query (total, H, D), key and value
    (keys, H, D), starts and key_starts (P + 1,) int32.

    used (P,) int32: keys that count of each segment; its only query is the last.
    """
    left, right = (-1, -1) if window is None else (window - 1, 0)
    output, *_ = varlen_kernel(
        query, key, value, starts, key_starts, longest, longest_key,
        dropout_p=0.0,
        is_causal=window is None and used is None,  # else the kernel does not split keys of grouped heads
        return_debug_mask=False,
        scale=scaling,
        window_size_left=left,
        window_size_right=right,
        seqused_k=used,
    )  # fmt: skip
    return output


def attend_flash(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """flash-attn through transformers; its causal mask is aligned to the end of the keys (bottom right)."""
    if packing is not None:
        key, value = packing.keys_of(key), packing.keys_of(value)
        kwargs |= {"cu_seq_lens_q": packing.starts, "max_length_q": max(packing.lengths)}
        kwargs |= {"cu_seq_lens_k": packing.key_starts, "max_length_k": max(packing.key_lengths)}
    return flash_attention_forward(module, query, key, value, attention_mask, **kwargs)


def mask_unless_packed(**kwargs: Any) -> torch.Tensor | None:
    """sdpa's mask; None for packed sequences, for which it would be total x total."""
    return None if IS_PACKED.get() else sdpa_mask(**kwargs)


_find_packed_sequences = masking_utils.find_packed_sequence_indices


def _find_unknown_sequences(position_ids: torch.Tensor) -> torch.Tensor | None:
    """None in our passes, which pass the boundaries themselves: if transformers searched the positions, the
    host would wait for the device in each pass.
    """
    return _find_packed_sequences(position_ids) if IS_PACKED.get() is None else None


@functools.cache
def install() -> None:
    """Register these functions with transformers, for the whole process. Raises ValueError for an untested
    version.
    """
    require_version("transformers", TRANSFORMERS)
    masking_utils.find_packed_sequence_indices = _find_unknown_sequences
    AttentionInterface.register(VARLEN_ATTENTION, attend_packed)
    AttentionInterface.register(FLASH_ATTENTION, attend_flash)
    AttentionMaskInterface.register(VARLEN_ATTENTION, mask_unless_packed)


# ---------------------------------------------------------------------------------------------------------
# Last layer: only the slots that are used
# ---------------------------------------------------------------------------------------------------------


class Narrowing:
    """Restricts modules of the last layer to `Packing.used_slots`; the others get zeros.

    On a CPU the attention itself is restricted too (see `attend_packed`). A recomputation of activations has
    the same restriction.
    """

    def __init__(self, layer: nn.Module, attention: nn.Module, modules: list[nn.Module]) -> None:
        self.modules = modules
        self.slots = None
        attention.narrowing = self
        layer.register_forward_pre_hook(self._forget)
        attention.register_forward_pre_hook(self._begin, with_kwargs=True)
        for module in modules:
            module.register_forward_pre_hook(self._narrow)
            module.register_forward_hook(self._widen)

    def _forget(self, *_: Any) -> None:
        self.slots = None

    def _begin(self, attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        packing = kwargs.get("packing")
        self.slots = packing and packing.used_slots

    def _narrow(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if self.slots is None:
            return None
        self.num_slots = args[0].shape[-2]
        return args[0].index_select(-2, self.slots), *args[1:]

    def _widen(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self.slots is None:
            return None
        zeros = output.new_zeros(*output.shape[:-2], self.num_slots, output.shape[-1])
        return zeros.index_copy(-2, self.slots, output)


def narrowed_modules(attention: nn.Module) -> list[nn.Module]:
    """Modules that compute only `Packing.used_slots`, around such an attention module; else empty."""
    return attention.narrowing.modules if hasattr(attention, "narrowing") else []


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Layers of the transformers model in `model`, in order; empty if they cannot be identified."""
    plain = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
    num_layers = plain.config.get_text_config().num_hidden_layers
    stacks = [m for m in plain.modules() if isinstance(m, nn.ModuleList) and len(m) == num_layers]
    return list(stacks[0]) if len(stacks) == 1 else []


def narrow_last_layer(model: PreTrainedModel) -> None:
    """Restrict the last layer of packed passes, except its keys and values, to the slots that are used."""
    layers = decoder_layers(model)
    if not takes_packed(model) or not layers:
        return
    layer = layers[-1]
    attentions = [(name, m) for name, m in layer.named_children() if hasattr(m, "layer_idx")]
    if len(attentions) != 1:
        return
    name, attention = attentions[0]
    children = dict(layer.named_children())
    later = [children[other] for other in list(children)[list(children).index(name) + 1 :]]
    wide = [m for m in later if any(p.dim() > 1 for p in m.parameters())]
    projections = [m for name, m in attention.named_children() if name in PROJECTIONS]
    Narrowing(layer, attention, [*projections, *wide])
