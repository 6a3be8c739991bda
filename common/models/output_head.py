"""Log-probabilities and entropies straight from hidden states: logits exist for one chunk at a time.

PURE: imports torch and pure files. Neither pass ever holds logits of all tokens: the forward pass keeps the
hidden states and two numbers a token, the backward pass makes each chunk's logits again.

# N scored tokens, H hidden size, V vocabulary, n tokens of a chunk
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from common.models.sampling import sampling_mask
from common.models.tensor_ops import token_entropy, token_logprobs

# Logits of one chunk. On a CPU they stay near the cache (16 MiB in fp32); on a GPU they fill the device.
_CPU_CHUNK_ELEMENTS = 2**22
_GPU_CHUNK_ELEMENTS = 2**27


@dataclass(frozen=True)
class LogitOptions:
    """How logits are made from hidden states, and which softmax is taken of them.

    The model's own: `multiplier` times the output weight's product, then cap tanh(x / cap) with a `cap`. The
    caller's: `temperature`, and `num_valid_tokens`, from where on ids are vocabulary padding.
    """

    multiplier: float = 1.0
    cap: float | None = None
    temperature: float = 1.0
    num_valid_tokens: int | None = None
    chunk_tokens: int | None = None  # tokens whose logits are held at a time; None: by device

    def transform(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what the model makes of its raw logits."""
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class Support(NamedTuple):
    """The tokens that could be sampled at each scored slot, one slot after the other."""

    token_ids: torch.Tensor  # (total,) int64
    offsets: torch.Tensor  # (N + 1,) int64, slot i has token_ids[offsets[i] : offsets[i + 1]]

    def mask(self, rows: slice, num_tokens: int) -> torch.Tensor:
        """Return (n, V) bool, True for the tokens of the slots in `rows`."""
        first, last = int(self.offsets[rows.start]), int(self.offsets[rows.stop])
        counts = self.offsets[rows.start + 1 : rows.stop + 1] - self.offsets[rows.start : rows.stop]
        slots = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
        mask = torch.zeros(len(counts), num_tokens, dtype=torch.bool, device=counts.device)
        mask[slots, self.token_ids[first:last]] = True
        return mask


@dataclass(frozen=True)
class Truncation:
    """How the sampler cut the distribution."""

    top_k: int = 0
    top_p: float = 1.0


class TokenScores(NamedTuple):
    """One entry for each scored token."""

    logprobs: torch.Tensor  # (N,) fp32
    entropies: torch.Tensor  # (N,) fp32, in nats; zeros where nobody asked


def token_scores(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    token_ids: torch.Tensor,
    options: LogitOptions,
    *,
    with_entropy: bool = False,
    support: Support | None = None,
) -> TokenScores:
    """Return log-probabilities of `token_ids` (N,), each predicted from its row of `hidden` (N, H).

    weight (V, H), bias (V,). Differentiable in hidden, weight and bias. With `support` the softmax is taken
    among those tokens, which must hold the scored one.
    """
    scores = _TokenScores.apply(hidden, weight, bias, token_ids, options, with_entropy, support)
    return TokenScores(*scores)


def summed_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    token_ids: torch.Tensor,
    options: LogitOptions,
) -> torch.Tensor:
    """Return the sum of `token_scores(...).logprobs`, a scalar in fp32.

    Every token has the same gradient, so it is made in the forward pass: a quarter less arithmetic than
    making the logits twice.
    """
    return _SummedLogprobs.apply(hidden, weight, bias, token_ids, options)


@torch.no_grad()
def sampling_support(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    token_ids: torch.Tensor,
    options: LogitOptions,
    truncation: Truncation,
) -> Support:
    """Return the tokens that the sampler could draw at each slot; the one that it drew, in any case."""
    found, counts = [], []
    for rows in _chunks(hidden, weight, options):
        logits = options.transform(F.linear(hidden[rows], weight, bias))
        is_kept = sampling_mask(
            logits,
            temperature=options.temperature,
            num_valid_tokens=options.num_valid_tokens,
            top_k=truncation.top_k,
            top_p=truncation.top_p,
        )
        is_kept.scatter_(1, token_ids[rows].unsqueeze(1), True)  # rounding may put it just outside
        found.append(is_kept.nonzero()[:, 1])
        counts.append(is_kept.sum(1))
    offsets = F.pad(torch.cat(counts).cumsum(0), (1, 0))
    return Support(torch.cat(found), offsets)


class _TokenScores(torch.autograd.Function):
    """Keeps inputs only; the backward pass makes each chunk's logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, token_ids, options, with_entropy, support):
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        for rows in _chunks(hidden, weight, options):
            logits = F.linear(hidden[rows], weight, bias)
            found = _score_chunk(logits, rows, token_ids, options, with_entropy, support)
            logprobs[rows] = found[0]
            if with_entropy:
                entropies[rows] = found[1]
        ctx.save_for_backward(hidden, weight, bias, token_ids, *(support or ()))
        ctx.options = options
        ctx.set_materialize_grads(False)  # an entropy that is only reported costs nothing backwards
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, bias, token_ids, *rest = ctx.saved_tensors
        support = Support(*rest) if rest else None
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        with_entropy = grad_entropies is not None
        if grad_logprobs is None:
            grad_logprobs = hidden.new_zeros(len(hidden), dtype=torch.float32)
        for rows in _chunks(hidden, weight, ctx.options):
            logits = F.linear(hidden[rows], weight, bias)
            with torch.enable_grad():
                leaf = logits.requires_grad_()
                found = _score_chunk(leaf, rows, token_ids, ctx.options, with_entropy, support)
            upstream = [grad_logprobs[rows], *([grad_entropies[rows]] if with_entropy else [])]
            gradients.add(rows, torch.autograd.grad(found, leaf, upstream)[0])
        return *gradients.result(), None, None, None, None


class _SummedLogprobs(torch.autograd.Function):
    """Makes the gradient of the sum while the logits are there; the backward pass scales it."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, token_ids, options):
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        needs = ctx.needs_input_grad[:3]
        gradients = _Gradients(hidden, weight, bias, needs) if any(needs) else None
        for rows in _chunks(hidden, weight, options):
            logits = F.linear(hidden[rows], weight, bias)
            with torch.set_grad_enabled(gradients is not None):
                leaf = logits.requires_grad_() if gradients else logits
                (logprobs,) = _score_chunk(leaf, rows, token_ids, options, False, None)
            total += logprobs.detach().double().sum()
            if gradients:
                gradients.add(rows, torch.autograd.grad(logprobs, leaf, torch.ones_like(logprobs))[0])
        ctx.gradients = gradients.result() if gradients else None
        return total.float()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total):
        gradients, ctx.gradients = ctx.gradients, None  # they are as large as the weight: kept no longer
        scaled = [g if g is None else g.mul_(grad_total.to(g.dtype)) for g in gradients]
        return *scaled, None, None


class _Gradients:
    """Gradients of hidden, weight and bias, added up chunk by chunk; the weight's in fp32 or better."""

    def __init__(self, hidden, weight, bias, needs) -> None:
        self.hidden, self.weight = hidden, weight
        self.dtypes = hidden.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype
        summed = torch.float64 if weight.dtype == torch.float64 else torch.float32
        device = weight.device
        self.of_hidden = torch.empty_like(hidden) if needs[0] else None
        self.of_weight = torch.zeros(weight.shape, dtype=summed, device=device) if needs[1] else None
        self.of_bias = torch.zeros(len(weight), dtype=summed, device=device) if needs[2] else None

    def add(self, rows: slice, of_logits: torch.Tensor) -> None:
        if self.of_hidden is not None:
            torch.mm(of_logits, self.weight, out=self.of_hidden[rows])
        if self.of_weight is not None:
            if of_logits.dtype == self.of_weight.dtype:
                self.of_weight.addmm_(of_logits.t(), self.hidden[rows])
            else:
                self.of_weight += of_logits.t() @ self.hidden[rows]
        if self.of_bias is not None:
            self.of_bias += of_logits.sum(0, dtype=self.of_bias.dtype)

    def result(self) -> list[torch.Tensor | None]:
        found = (self.of_hidden, self.of_weight, self.of_bias)
        return [g if g is None else g.to(dtype) for g, dtype in zip(found, self.dtypes, strict=True)]


def _score_chunk(
    logits: torch.Tensor,
    rows: slice,
    token_ids: torch.Tensor,
    options: LogitOptions,
    with_entropy: bool,
    support: Support | None,
) -> tuple[torch.Tensor, ...]:
    """Return (logprobs,) or (logprobs, entropies), each (n,), of raw logits (n, V)."""
    logits = options.transform(logits)
    if support is not None:
        logits = logits.masked_fill(~support.mask(rows, logits.shape[1]), -torch.inf)
    more = {"temperature": options.temperature, "num_valid_tokens": options.num_valid_tokens}
    logprobs = token_logprobs(logits, token_ids[rows], **more)
    return (logprobs, token_entropy(logits, **more)) if with_entropy else (logprobs,)


def _chunks(hidden: torch.Tensor, weight: torch.Tensor, options: LogitOptions) -> Iterator[slice]:
    elements = _CPU_CHUNK_ELEMENTS if hidden.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
    size = options.chunk_tokens or max(1, elements // len(weight))
    for first in range(0, len(hidden), size):
        yield slice(first, min(first + size, len(hidden)))
