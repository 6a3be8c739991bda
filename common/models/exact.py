"""Products and attention whose result for a token does not depend on what is computed beside it: --exact.

Every product has ROWS rows, and attention has ROWS queries over a fixed number of keys; zeros fill up the
rest. A kernel then always gets the same shapes, and each row of its result depends on that row's inputs only.
This makes sampler and trainer equal to the bit, for any number of slots and ranks. Prompts of unequal lengths
are not padded into one pass: padding would shift their keys, and sums over shifted keys are rounded
differently.

# n sequences, T queries, S keys, L keys that are computed, H heads of queries or of keys, D their width
"""

import torch
import torch.nn.functional as F
from transformers.pytorch_utils import Conv1D

ROWS = 32
_plain_linear = F.linear
_plain_conv1d = Conv1D.forward
_num_keys = 0  # 0: off


def is_on() -> bool:
    """Whether this process computes so."""
    return _num_keys > 0


def use(max_length: int) -> None:
    """Compute so from now on, for sequences of at most `max_length` tokens; 0: as usual again."""
    global _num_keys
    _num_keys = -(-max_length // ROWS) * ROWS
    F.linear = linear if max_length else _plain_linear
    Conv1D.forward = _forward_of_conv1d if max_length else _plain_conv1d


def linear(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As `F.linear`, ROWS rows at a time."""
    parts = [
        _plain_linear(F.pad(rows, (0, 0, 0, ROWS - len(rows))), weight, bias)[: len(rows)]
        for rows in hidden.reshape(-1, hidden.shape[-1]).split(ROWS)
    ]
    return torch.cat(parts).unflatten(0, hidden.shape[:-1])


def _forward_of_conv1d(module: Conv1D, hidden: torch.Tensor) -> torch.Tensor:
    return linear(hidden, module.weight.T, module.bias)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_seen: torch.Tensor,
    scaling: float | None = None,
) -> torch.Tensor:
    """Attention output (n, T, H, D) for query (n, H, T, D), key and value (n, heads, S, D), and is_seen
    (n or 1, 1, T, S) bool.

    Asserts that S is at most the length of `use`.
    """
    room = _num_keys - key.shape[2]
    assert room >= 0, f"{key.shape[2]} keys, but --exact was set up for {_num_keys}"
    group = query.shape[1] // key.shape[1]
    key, value = (F.pad(x, (0, 0, 0, room)).repeat_interleave(group, 1).contiguous() for x in (key, value))
    scaling = query.shape[3] ** -0.5 if scaling is None else scaling
    outputs = []
    for queries, seen in zip(query.split(ROWS, 2), F.pad(is_seen, (0, room)).split(ROWS, 2), strict=True):
        num_queries = queries.shape[2]
        missing = ROWS - num_queries
        scores = F.pad(queries, (0, 0, 0, missing)) @ key.transpose(2, 3) * scaling
        seen = F.pad(seen, (0, 0, 0, missing))
        seen = seen | ~seen.any(-1, keepdim=True)  # padding sees no key: its softmax would be NaN
        weights = scores.float().masked_fill(~seen, -torch.inf).softmax(-1).to(value.dtype)
        outputs.append((weights @ value)[:, :, :num_queries])
    return torch.cat(outputs, 2).transpose(1, 2)


def seen_keys(
    mask: torch.Tensor | None,
    num_queries: int,
    num_keys: int,
    device: torch.device,
    window: int | None = None,
) -> torch.Tensor:
    """Which keys a query sees (n or 1, 1, T, S) bool: by transformers' mask, bool or additive, else all up to
    its own, which is the last query's last key, within the window.
    """
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask == 0
    own = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    back = own - torch.arange(num_keys, device=device)
    return ((back >= 0) & (back < (window or num_keys)))[None, None]
