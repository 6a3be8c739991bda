"""Log-probabilities and entropies straight from hidden states: logits exist for one chunk at a time.

PURE: imports torch and pure files. Neither pass ever holds logits of all tokens: the forward pass keeps the
hidden states and two numbers a token, the backward pass makes each chunk's logits again.

# N scored tokens, H hidden size, V vocabulary, n tokens of a chunk
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from common.models.sampling import sampling_mask

# Logits of one chunk. On a CPU they stay near the cache (16 MiB in fp32); on a GPU they fill the device.
CPU_CHUNK_ELEMENTS = 2**22
GPU_CHUNK_ELEMENTS = 2**26
_LOWEST = torch.finfo(torch.float32).min


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


# Fields of configurations that say what a model makes of its head's output.
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier")
_UNKNOWN = ("logits_scaling", "output_multiplier", "logits_mup_width_multiplier", "softcap")


def read_logit_transform(config: Any) -> LogitOptions:
    """Return what a model of this configuration makes of its head's output: a factor, and a cap.

    Raises ValueError, naming the field, where the configuration asks for another treatment of logits.
    """
    config = config.get_text_config()
    found = {name: getattr(config, name, None) for name in (*_CAPS, *_FACTORS, *_UNKNOWN)}
    found = {name: value for name, value in found.items() if value not in (None, 1)}
    multiplier, cap = 1.0, None
    for name, value in found.items():
        if name in _CAPS:
            cap = float(value)
        elif name in _FACTORS:
            multiplier = float(value)
        elif name == "logits_scaling" and config.model_type.startswith("granite"):
            multiplier = 1 / value
        else:
            raise ValueError(
                f"{config.model_type}: the configuration's {name} {value} treats logits in a way that is not "
                "known here; add it to common/models/output_head.py"
            )
    return LogitOptions(multiplier=multiplier, cap=cap)


class Support(NamedTuple):
    """The tokens that could be sampled at each scored slot, one slot after the other."""

    token_ids: torch.Tensor  # (total,) int64
    offsets: torch.Tensor  # (N + 1,) int64 on the CPU, slot i has token_ids[offsets[i] : offsets[i + 1]]

    def mask(self, rows: slice, num_tokens: int) -> torch.Tensor:
        """Return (n, V) bool, True for the tokens of the slots in `rows`."""
        offsets, device = self.offsets[rows.start : rows.stop + 1], self.token_ids.device
        slots = torch.repeat_interleave(torch.arange(len(offsets) - 1), offsets.diff()).to(device)
        mask = torch.zeros(len(offsets) - 1, num_tokens, dtype=torch.bool, device=device)
        mask[slots, self.token_ids[int(offsets[0]) : int(offsets[-1])].long()] = True
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
    return Support(torch.cat(found), offsets.cpu())


def token_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    num_valid_tokens: int | None = None,
) -> torch.Tensor:
    """Return log softmax(logits / temperature) at `token_ids`: fp32, of their shape, without gradient.

    logits (..., V), token_ids (...) int64; the numbers are those of `token_scores` to the bit.
    """
    options = LogitOptions(temperature=temperature, num_valid_tokens=num_valid_tokens)
    scores = _softmax_scores(logits.flatten(0, -2), token_ids.flatten(), options, with_entropy=False)
    return scores.logprobs.view(token_ids.shape)


class _SoftmaxScores(NamedTuple):
    logprobs: torch.Tensor  # (n,) fp32
    entropies: torch.Tensor | None  # (n,) fp32
    normalisers: torch.Tensor  # (n,) fp32, so that log p = (logit - normaliser) / temperature


@torch.no_grad()
def _softmax_scores(
    logits: torch.Tensor, token_ids: torch.Tensor, options: LogitOptions, *, with_entropy: bool
) -> _SoftmaxScores:
    """Return what softmax(logits / temperature) gives the tokens (n,), for logits (n, V) of any float dtype.

    Ids from `num_valid_tokens` on do not take part: their own log-probability is -inf.
    """
    valid, temperature = logits[:, : options.num_valid_tokens], options.temperature
    num_valid = valid.shape[1]
    largest = valid.amax(-1, keepdim=True)
    scaled = _scale(_upcast(valid).sub_(largest), temperature)
    weights = scaled.exp() if with_entropy else scaled.exp_()
    weight_sum = weights.sum(-1).double()
    chosen = valid.gather(-1, token_ids[:, None].clamp(max=num_valid - 1))
    # float64 for the last few numbers of a row only: fp32 would round each of the three steps.
    logprobs = ((chosen.double() - largest.double()) / temperature)[:, 0] - weight_sum.log()
    logprobs = logprobs.float().masked_fill_(token_ids >= num_valid, -torch.inf)
    normalisers = (largest[:, 0].double() + temperature * weight_sum.log()).float()
    entropies = None
    if with_entropy:
        # A logit of -inf has weight 0, and 0 * -inf would be NaN.
        mean_scaled = weights.mul_(scaled.clamp_(min=_LOWEST)).sum(-1).double() / weight_sum
        entropies = (weight_sum.log() - mean_scaled).float()
    return _SoftmaxScores(logprobs, entropies, normalisers)


def _softmax_gradient(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    scores: _SoftmaxScores,
    options: LogitOptions,
    grad_logprobs: torch.Tensor,
    grad_entropies: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient (n, V) of logits (n, V), in their dtype; 0 at ids that do not take part."""
    valid, temperature = logits[:, : options.num_valid_tokens], options.temperature
    num_valid = valid.shape[1]
    log_p = _scale(_upcast(valid).sub_(scores.normalisers[:, None]), temperature)
    # d logprob / d logit_j = ([j == id] - p_j) / temperature
    scale = grad_logprobs[:, None] / temperature
    at_chosen = torch.where(token_ids[:, None] < num_valid, scale, 0.0).to(log_p.dtype)
    p = log_p.exp_() if grad_entropies is None else log_p.clamp_(min=_LOWEST).exp()
    if grad_entropies is not None:
        # d H / d logit_j = -p_j (log p_j + H) / temperature
        log_p.add_(scores.entropies[:, None]).mul_(p).mul_(-grad_entropies[:, None] / temperature)
    gradient = p.mul_(-scale).scatter_add_(-1, token_ids[:, None].clamp(max=num_valid - 1), at_chosen)
    if grad_entropies is not None:
        gradient += log_p
        del log_p
    if num_valid == logits.shape[1]:
        return gradient.to(logits.dtype)
    return F.pad(gradient.to(logits.dtype), (0, logits.shape[1] - num_valid))


def _scale(x: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide in place, without a pass over the data for the usual temperature of 1."""
    return x if temperature == 1.0 else x.div_(temperature)


def _upcast(x: torch.Tensor) -> torch.Tensor:
    """Return a copy in fp32, of float64 in float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)


class _TokenScores(torch.autograd.Function):
    """Keeps inputs and two numbers a token; the backward pass makes each chunk's logits again."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, token_ids, options, with_entropy, support):
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies, normalisers = torch.zeros_like(logprobs), torch.empty_like(logprobs)
        for rows in _chunks(hidden, weight, options):
            logits = _among(options.transform(F.linear(hidden[rows], weight, bias)), support, rows)
            found = _softmax_scores(logits, token_ids[rows], options, with_entropy=with_entropy)
            logprobs[rows], normalisers[rows] = found.logprobs, found.normalisers
            if with_entropy:
                entropies[rows] = found.entropies
        ctx.save_for_backward(
            hidden, weight, bias, token_ids, logprobs, entropies, normalisers, *(support or ())
        )
        ctx.options = options
        ctx.set_materialize_grads(False)  # an entropy that is only reported costs nothing backwards
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, bias, token_ids, logprobs, entropies, normalisers, *rest = ctx.saved_tensors
        support = Support(*rest) if rest else None
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logprobs)
        for rows in _chunks(hidden, weight, ctx.options):
            leaf, logits = _differentiable_logits(hidden, weight, bias, ctx.options, support, rows)
            scores = _SoftmaxScores(logprobs[rows], entropies[rows], normalisers[rows])
            of_entropies = None if grad_entropies is None else grad_entropies[rows]
            of_logits = _softmax_gradient(
                logits.detach(), token_ids[rows], scores, ctx.options, grad_logprobs[rows], of_entropies
            )
            gradients.add(rows, _chain(leaf, logits, of_logits))
        return *gradients.result(), None, None, None, None


class _SummedLogprobs(torch.autograd.Function):
    """Makes the gradient of the sum while the logits are there; the backward pass scales it."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, token_ids, options):
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        needs = ctx.needs_input_grad[:3]
        gradients = _Gradients(hidden, weight, bias, needs) if any(needs) else None
        for rows in _chunks(hidden, weight, options):
            leaf, logits = _differentiable_logits(hidden, weight, bias, options, None, rows)
            scores = _softmax_scores(logits.detach(), token_ids[rows], options, with_entropy=False)
            total += scores.logprobs.double().sum()
            if gradients:
                ones = torch.ones_like(scores.logprobs)
                of_logits = _softmax_gradient(logits.detach(), token_ids[rows], scores, options, ones)
                gradients.add(rows, _chain(leaf, logits, of_logits))
        ctx.gradients = gradients.result() if gradients else None
        return total.float()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total):
        gradients, ctx.gradients = ctx.gradients, None  # they are as large as the weight: kept no longer
        scaled = [g if g is None else g.mul_(grad_total.to(g.dtype)) for g in gradients]
        return *scaled, None, None


def _differentiable_logits(hidden, weight, bias, options, support, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return raw logits (n, V), and what transform and support make of them, which autograd has followed."""
    leaf = F.linear(hidden[rows], weight, bias)
    if options.multiplier == 1.0 and options.cap is None and support is None:
        return leaf, leaf
    with torch.enable_grad():
        return leaf, _among(options.transform(leaf.requires_grad_()), support, rows)


def _chain(leaf: torch.Tensor, logits: torch.Tensor, of_logits: torch.Tensor) -> torch.Tensor:
    """Return the gradient of raw logits, from that of what was made of them."""
    return of_logits if logits is leaf else torch.autograd.grad(logits, leaf, of_logits)[0]


def _among(logits: torch.Tensor, support: Support | None, rows: slice) -> torch.Tensor:
    """Return logits of -inf outside the support."""
    if support is None:
        return logits
    return logits.masked_fill(~support.mask(rows, logits.shape[1]), -torch.inf)


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


def _chunks(hidden: torch.Tensor, weight: torch.Tensor, options: LogitOptions) -> Iterator[slice]:
    elements = CPU_CHUNK_ELEMENTS if hidden.device.type == "cpu" else GPU_CHUNK_ELEMENTS
    size = options.chunk_tokens or max(1, elements // len(weight))
    for first in range(0, len(hidden), size):
        yield slice(first, min(first + size, len(hidden)))
