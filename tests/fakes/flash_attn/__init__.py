"""A stand-in for flash-attn 2.8: its functions in plain torch, with the argument checks of the real ones.

What it computes in is fp32; nothing is read by the host, so a captured graph may hold it. Where the kernels
would read or leave rubbish (a length that is given too small), there is NaN.

# S sequences, T positions, N tokens of all sequences, H heads, D their width
"""

from typing import Any

import torch

__version__ = "2.8.3"
Window = tuple[int, int]


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise RuntimeError(message)


def check_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Raise RuntimeError as the kernels do: (..., H, D) each, fewer key/value heads allowed."""
    _check(torch.cuda.get_device_capability() >= (8, 0), "FlashAttention only supports Ampere GPUs or newer.")
    _check(query.is_cuda and key.is_cuda and value.is_cuda, "Input tensor must be on CUDA device")
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    _check(is_half, "FlashAttention only support fp16 and bf16 data type")
    _check(query.dtype == key.dtype == value.dtype, "query and key must have the same dtype")
    is_contiguous = all(x.stride(-1) == 1 for x in (query, key, value))
    _check(is_contiguous, "Input tensor must have contiguous last dimension")
    heads, width = query.shape[-2:]
    _check(width <= 256, "FlashAttention forward only supports head dimension at most 256")
    _check(key.shape == value.shape and key.shape[-1] == width, "key and value must have shape (..., H, D)")
    _check(heads % key.shape[-2] == 0, "Number of heads in key/value must divide number of heads in query")


def check_starts(starts: torch.Tensor) -> None:
    """Raise RuntimeError unless (S + 1,) are what the kernels take."""
    _check(starts.dtype == torch.int32, "cu_seqlens must have dtype int32")
    _check(starts.is_cuda and starts.is_contiguous(), "cu_seqlens must be contiguous, on CUDA device")
    _check(len(starts) > 1, "batch size must be positive")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None,
    cap: float,
) -> torch.Tensor:
    """Return (S, T, H, D) for a query of that shape; mask (S or 1, T, keys), True where one is seen."""
    group = query.shape[2] // key.shape[2]
    q, k, v = (x.float().transpose(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = cap * (scores / cap).tanh() if cap else scores
    weights = scores.masked_fill(~mask.unsqueeze(1), -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).to(query.dtype)


def _sees(queries: torch.Tensor, keys: torch.Tensor, causal: bool, window: Window) -> torch.Tensor:
    """Return which keys are seen, both by their positions: (..., T, 1) and (..., 1, keys)."""
    left, right = window[0], 0 if causal else window[1]
    distance = queries - keys
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        seen = seen & (distance <= left)
    return seen & (distance >= -right) if right >= 0 else seen


def flash_attn_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Any = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return (S, T, H, D)."""
    check_heads(q, k, v)
    _check(len(q) == len(k) and not dropout_p and alibi_slopes is None, "not what this stand-in can do")
    ends = k.shape[1] - q.shape[1]  # the last query stands at the last key
    queries = torch.arange(q.shape[1], device=q.device).unsqueeze(1) + ends
    keys = torch.arange(k.shape[1], device=q.device).unsqueeze(0)
    return attend(q, k, v, _sees(queries, keys, causal, window_size).unsqueeze(0), softmax_scale, softcap)


def flash_attn_varlen_func(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Return (N, H, D), sequences end to end; the last query of a sequence stands at its last key."""
    check_heads(q, k, v)
    check_starts(cu_seqlens_q)
    check_starts(cu_seqlens_k)
    _check(len(cu_seqlens_q) == len(cu_seqlens_k), "cu_seqlens_k must have shape (batch_size + 1)")
    _check(not dropout_p and alibi_slopes is None, "not what this stand-in can do")

    def find(starts: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each token's sequence, and how far it stands before that one's end."""
        tokens = torch.arange(num_tokens, dtype=torch.int32, device=q.device)
        sequence = torch.searchsorted(starts[1:].contiguous(), tokens, right=True)
        return sequence, starts[sequence + 1] - tokens

    (sequence, left), (key_sequence, key_left) = find(cu_seqlens_q, len(q)), find(cu_seqlens_k, len(k))
    same = sequence.unsqueeze(1) == key_sequence.unsqueeze(0)
    seen = same & _sees(-left.unsqueeze(1), -key_left.unsqueeze(0), causal, window_size)
    found = attend(q[None], k[None], v[None], seen.unsqueeze(0), softmax_scale, softcap)[0]
    lengths, key_lengths = cu_seqlens_q.diff()[sequence], cu_seqlens_k.diff()[sequence]
    is_left_out = (lengths > int(max_seqlen_q)) | (key_lengths > int(max_seqlen_k))
    return found.masked_fill(is_left_out[:, None, None], torch.nan)


def flash_attn_with_kvcache(*_: Any, **__: Any) -> torch.Tensor:
    """Nothing of this project calls it; transformers imports it with the others."""
    raise AssertionError("decode passes use torch's kernel")
