"""Log-probabilities, entropy, masked means, whitening, the interval of a share. PURE: imports torch only.

Nothing here holds an fp32 copy of all logits, forward or backward: rows are upcast a chunk at a time into one
buffer, and what is kept for the backward pass is the logits as they came plus one number a row.

# N rows (all leading dimensions flattened), V vocabulary
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

# Elements of one upcast chunk. On a CPU the chunk stays in the cache (2 MiB), on a GPU it fills the device.
_CPU_CHUNK_ELEMENTS = 2**19
_GPU_CHUNK_ELEMENTS = 2**26
Z_95 = 1.959963984540054  # standard normal quantile at 0.975


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    num_valid_tokens: int | None = None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Return log softmax(logits / temperature) at `token_ids`: fp32, of their shape, differentiable.

    logits (..., V) of any float dtype, token_ids (...) int64 in [0, V) everywhere, padding included.
    `num_valid_tokens` leaves ids from there on out of the softmax (vocabulary padding): their own
    log-probability is -inf and their logits get a gradient of 0. `chunk_tokens` rows are upcast at a time
    (default: what suits the device).

    Raises ValueError for shapes that do not match, or an option out of its range.
    """
    if token_ids.shape != logits.shape[:-1]:
        raise ValueError(
            f"token_ids {tuple(token_ids.shape)} must have the leading shape of logits {tuple(logits.shape)}"
        )
    num_valid, chunk = _check_options(logits, temperature, num_valid_tokens, chunk_tokens)
    return _TokenLogprobs.apply(logits, token_ids, temperature, num_valid, chunk)


def token_entropy(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    num_valid_tokens: int | None = None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Return the entropy in nats of softmax(logits / temperature): fp32 (...), differentiable.

    logits (..., V); the options are those of `token_logprobs`.
    """
    num_valid, chunk = _check_options(logits, temperature, num_valid_tokens, chunk_tokens)
    return _TokenEntropy.apply(logits, temperature, num_valid, chunk)


def masked_sum(x: torch.Tensor, mask: torch.Tensor, dim: int | tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the sum of `x` where `mask` (same shape, True = counts), fp32 or better."""
    kept = torch.where(mask.bool(), _at_least_fp32(x), 0.0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(
    x: torch.Tensor, mask: torch.Tensor, dim: int | tuple[int, ...] | None = None, empty: float = 0.0
) -> torch.Tensor:
    """Return the mean of `x` where `mask` (same shape, True = counts), or `empty` where none does."""
    total = masked_sum(x, mask, dim)
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return torch.where(count > 0, total / count.clamp(min=1), empty)


def whiten(
    x: torch.Tensor,
    mask: torch.Tensor,
    *,
    keep_mean: bool = False,
    reduce_sum: Callable[[torch.Tensor], torch.Tensor] | None = None,
    eps: float = 1e-8,
) -> torch.Tensor:
    """Return (x - mean) / sqrt(variance + eps) where `mask`, elsewhere 0: fp32, the shape of x.

    mask (same shape) True = counts. `keep_mean` adds the mean back. `reduce_sum` adds a float64 vector up
    over ranks; with it every rank must call this, a rank without a single counting entry too. The variance
    divides by the count. Constant entries give exactly 0.
    """
    reduce_sum = reduce_sum or (lambda total: total)
    mask = mask.bool()
    # float64 and two passes: E[x^2] - E[x]^2 goes negative for constant entries, and in fp32 the mean of
    # equal numbers is not that number, a difference that 1 / sqrt(eps) blows up.
    kept = torch.where(mask, x.double(), 0.0)
    count, total = reduce_sum(torch.stack([mask.sum().double(), kept.sum()])).unbind()
    mean = total / count.clamp(min=1)
    centred = torch.where(mask, kept - mean, 0.0)
    (squares,) = reduce_sum(centred.square().sum().reshape(1)).unbind()
    whitened = centred * torch.rsqrt(squares / count.clamp(min=1) + eps)
    if keep_mean:
        whitened = torch.where(mask, whitened + mean, 0.0)
    return whitened.float()


@torch.no_grad()
def correlation(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return Pearson's correlation of x and y (N,): fp32 scalar in [-1, 1], 0 where either is constant."""
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    spread = (x.square().sum() * y.square().sum()).sqrt()
    return torch.where(spread > 0, (x * y).sum() / spread, 0.0).clamp(-1, 1).float()


class Rate(NamedTuple):
    """A share with its 95 % interval; None where nothing was counted."""

    value: float | None
    low: float
    high: float


def wilson_interval(wins: float, total: int) -> Rate:
    """Return wins / total with the interval of E. B. Wilson 1927, which stays within 0 and 1."""
    if not total:
        return Rate(None, 0.0, 1.0)
    share, z2 = wins / total, Z_95**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z_95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return Rate(share, max(centre - half, 0.0), min(centre + half, 1.0))


class _TokenLogprobs(torch.autograd.Function):
    """Saves logits as they came and one fp32 normaliser a row; recomputes the softmax chunk by chunk."""

    @staticmethod
    def forward(ctx, logits, token_ids, temperature, num_valid, chunk):
        ids = token_ids.reshape(-1)
        logprobs = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
        normalisers = torch.empty_like(logprobs)
        for rows, block, buffer in _upcast_chunks(logits, num_valid, chunk):
            largest = buffer.amax(-1, keepdim=True)
            log_sum = _scale(buffer.sub_(largest), temperature).exp_().sum(-1).double().log()
            chosen = block.gather(-1, ids[rows, None].clamp(max=num_valid - 1))
            # float64 for the last few numbers of a row only: fp32 would round each of the three steps.
            logprobs[rows] = ((chosen.double() - largest.double()) / temperature)[:, 0] - log_sum
            normalisers[rows] = largest[:, 0].double() + temperature * log_sum
        logprobs.masked_fill_(ids >= num_valid, -torch.inf)
        ctx.save_for_backward(logits, ids, normalisers)
        ctx.options = (temperature, num_valid, chunk)
        return logprobs.reshape(token_ids.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs):
        logits, ids, normalisers = ctx.saved_tensors
        temperature, num_valid, chunk = ctx.options
        # d logprob / d logit_j = ([j == id] - p_j) / temperature
        scale = grad_logprobs.reshape(-1, 1) / temperature
        at_chosen = torch.where(ids[:, None] < num_valid, scale, 0.0)
        grad_logits, grad_rows = _empty_gradient(logits, num_valid)
        for rows, _, buffer in _upcast_chunks(logits, num_valid, chunk):
            gradient = _scale(buffer.sub_(normalisers[rows, None]), temperature).exp_().mul_(-scale[rows])
            gradient.scatter_add_(
                -1, ids[rows, None].clamp(max=num_valid - 1), at_chosen[rows].to(buffer.dtype)
            )
            grad_rows[rows, :num_valid] = gradient
        return grad_logits, None, None, None, None


class _TokenEntropy(torch.autograd.Function):
    """H = log sum_j e^z_j - sum_j p_j z_j with z the scaled logits; kept like the log-probabilities."""

    @staticmethod
    def forward(ctx, logits, temperature, num_valid, chunk):
        entropies = torch.empty(logits.shape[:-1].numel(), dtype=torch.float32, device=logits.device)
        normalisers = torch.empty_like(entropies)
        for rows, _, buffer in _upcast_chunks(logits, num_valid, chunk):
            largest = buffer.amax(-1, keepdim=True)
            scaled = _scale(buffer.sub_(largest), temperature)
            weights = scaled.exp()
            weight_sum = weights.sum(-1).double()
            # A logit of -inf has weight 0, and 0 * -inf would be NaN.
            mean_scaled = weights.mul_(scaled.clamp_(min=_LOWEST)).sum(-1).double() / weight_sum
            entropies[rows] = weight_sum.log() - mean_scaled
            normalisers[rows] = largest[:, 0].double() + temperature * weight_sum.log()
        ctx.save_for_backward(logits, normalisers, entropies)
        ctx.options = (temperature, num_valid, chunk)
        return entropies.reshape(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_entropies):
        logits, normalisers, entropies = ctx.saved_tensors
        temperature, num_valid, chunk = ctx.options
        # d H / d logit_j = -p_j (log p_j + H) / temperature
        scale = -grad_entropies.reshape(-1, 1) / temperature
        grad_logits, grad_rows = _empty_gradient(logits, num_valid)
        for rows, _, buffer in _upcast_chunks(logits, num_valid, chunk):
            log_p = _scale(buffer.sub_(normalisers[rows, None]), temperature).clamp_(min=_LOWEST)
            gradient = log_p.exp().mul_(log_p.add_(entropies[rows, None])).mul_(scale[rows])
            grad_rows[rows, :num_valid] = gradient
        return grad_logits, None, None, None


_LOWEST = torch.finfo(torch.float32).min


def _check_options(
    logits: torch.Tensor, temperature: float, num_valid_tokens: int | None, chunk_tokens: int | None
) -> tuple[int, int]:
    """Return (ids that take part in the softmax, rows of one chunk); raise ValueError out of range."""
    vocabulary = logits.shape[-1]
    num_valid = vocabulary if num_valid_tokens is None else num_valid_tokens
    if not temperature > 0:
        raise ValueError(f"temperature {temperature} must be above 0")
    if not 0 < num_valid <= vocabulary:
        raise ValueError(f"num_valid_tokens {num_valid} must be between 1 and the vocabulary, {vocabulary}")
    if chunk_tokens is None:
        elements = _CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
        chunk_tokens = max(1, elements // num_valid)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens} must be at least 1")
    return num_valid, chunk_tokens


def _upcast_chunks(
    logits: torch.Tensor, num_valid: int, chunk: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield (rows, their logits (n, num_valid) as they came, the same upcast in a buffer used again)."""
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    buffer = None
    start = 0
    for part in _views_as_rows(logits):
        for block in part[:, :num_valid].split(chunk):
            if buffer is None or len(buffer) < len(block):
                buffer = torch.empty(block.shape, dtype=dtype, device=logits.device)
            upcast = buffer[: len(block)].copy_(block)
            yield slice(start, start + len(block)), block, upcast
            start += len(block)


def _views_as_rows(logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield (n, V) views that cover all rows in order: logits[:, :-1] has no single one and is not copied."""
    try:
        yield logits.view(-1, logits.shape[-1])
    except RuntimeError:
        for part in logits.unbind(0):
            yield from _views_as_rows(part)


def _empty_gradient(logits: torch.Tensor, num_valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a gradient for `logits` in its dtype, and its (N, V) view; 0 at ids that do not take part."""
    gradient = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    rows = gradient.view(-1, logits.shape[-1])
    rows[:, num_valid:] = 0
    return gradient, rows


def _scale(x: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide in place, without a pass over the data for the usual temperature of 1."""
    return x if temperature == 1.0 else x.div_(temperature)


def _at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
