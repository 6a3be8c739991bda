"""Log-probabilities and entropies from hidden states, computed from one chunk of logits at a time.

PURE: imports torch and pure files. Neither pass ever holds logits of many tokens: the forward pass keeps the
hidden states, two numbers per token and the first few chunks' logits; the backward pass recomputes the
others.

# N scored tokens, H hidden size, V vocabulary, n tokens of a chunk
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from common.data.packed_batch import to_device
from common.models.sampling import sampling_mask

# Logits per chunk: near the cache size on a CPU (16 MiB in fp32), enough work for the device on a GPU. For
# bf16 four times as many on a CPU: each chunk's product is added to the weight's gradient by a separate pass.
CPU_CHUNK_ELEMENTS = 2**22
CPU_CHUNK_ELEMENTS_BF16 = 2**24
GPU_CHUNK_ELEMENTS = 2**26
# Logits kept for the backward pass: small batches recompute none.
CPU_KEPT_ELEMENTS = 2**24
GPU_KEPT_ELEMENTS = 2**26
_LOWEST = torch.finfo(torch.float32).min


def chunk_elements(*, is_cpu: bool, is_bf16: bool) -> int:
    """Logits of a chunk."""
    if not is_cpu:
        return GPU_CHUNK_ELEMENTS
    return CPU_CHUNK_ELEMENTS_BF16 if is_bf16 else CPU_CHUNK_ELEMENTS


@dataclass(frozen=True)
class LogitOptions:
    """How logits and their softmax are computed from hidden states.

    Of the model: `multiplier`, by which the head's output is scaled, then the soft cap cap tanh(x / cap). Of
    the caller: `temperature`, and `num_valid_tokens`, the first id of the vocabulary padding.
    """

    multiplier: float = 1.0
    cap: float | None = None
    temperature: float = 1.0
    num_valid_tokens: int | None = None

    def transform(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits after the model's scaling and soft cap."""
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


# Configuration fields that describe how a model transforms its head's output.
_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_FACTORS = ("logit_scale", "lm_head_multiplier")
_UNKNOWN = ("logits_scaling", "output_multiplier", "logits_mup_width_multiplier", "softcap")


def read_logit_transform(config: Any) -> LogitOptions:
    """Scaling factor and soft cap that a model of this configuration applies to its logits.

    Raises ValueError, naming the field, if the configuration changes logits in another way.
    """
    config = config.get_text_config()
    multiplier, cap = 1.0, None
    for name in (*_CAPS, *_FACTORS, *_UNKNOWN):
        value = getattr(config, name, None)
        if value in (None, 1):
            continue
        if name in _CAPS:
            cap = float(value)
        elif name in _FACTORS:
            multiplier = float(value)
        elif name == "logits_scaling" and config.model_type.startswith("granite"):
            multiplier = 1 / value
        else:
            raise ValueError(
                f"{config.model_type}: the configuration's {name} {value} changes the logits in an "
                "unsupported way; add it to common/models/output_head.py"
            )
    return LogitOptions(multiplier=multiplier, cap=cap)


class SamplingMask(NamedTuple):
    """The tokens that the sampler could sample at each scored slot, slot after slot."""

    token_ids: torch.Tensor  # (total,) int64
    counts: torch.Tensor  # (N,) int64 on the CPU, tokens of each slot

    def of_rows(self, rows: slice, num_tokens: int) -> torch.Tensor:
        """Mask (n, V) bool, True for the tokens of the slots in `rows`."""
        counts = self.counts[rows]
        device = self.token_ids.device
        first = int(self.counts[: rows.start].sum())
        token_ids = self.token_ids[first : first + int(counts.sum())].long()
        (slots,) = to_device([torch.arange(len(counts)).repeat_interleave(counts)], device)
        mask = torch.zeros(len(counts) * num_tokens, dtype=torch.bool, device=device)
        return mask.index_fill_(0, slots * num_tokens + token_ids, True).view(-1, num_tokens)


class OutputHead(NamedTuple):
    """Hidden states of N tokens and the output weights, and quantities computed from their logits by chunk.

    All results except `kept_tokens` are differentiable in hidden, weight and bias.
    """

    hidden: torch.Tensor  # (N, H)
    weight: torch.Tensor  # (V, H)
    bias: torch.Tensor | None  # (V,)
    options: LogitOptions

    def logprobs(
        self, token_ids: torch.Tensor, *, with_entropy: bool = False, mask: SamplingMask | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities (N,) of `token_ids` (N,) and entropies (N,) in nats, both fp32; entropies are
        zeros unless `with_entropy`.

        With `mask` the softmax is over its tokens only, which must include the scored one.
        """
        return _TokenScores.apply(*self, token_ids, with_entropy, mask)

    def nll_sum(self, token_ids: torch.Tensor, *, temperature: float | None = None) -> torch.Tensor:
        """Negative log-likelihood of `token_ids` (N,), summed, fp32 scalar; `temperature` replaces the
        options'.

        All tokens have the same upstream gradient, so the gradient is computed in the forward pass: a quarter
        less arithmetic than computing the logits twice.
        """
        options = replace(self.options, temperature=temperature or self.options.temperature)
        return -_SummedLogprobs.of(self._replace(options=options), token_ids)

    @torch.no_grad()
    def kept_tokens(
        self, token_ids: torch.Tensor, *, top_k: int, top_p: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fields of a SamplingMask: the tokens kept by top_k and top_p at each slot, and the sampled
        token.
        """
        kept, counts = [], []
        for rows in self.chunks():
            is_kept = sampling_mask(
                self.options.transform(self.raw_logits(rows)),
                temperature=self.options.temperature,
                num_valid_tokens=self.options.num_valid_tokens,
                top_k=top_k,
                top_p=top_p,
            )
            is_kept.scatter_(1, token_ids[rows].unsqueeze(1), True)  # rounding may exclude it
            kept.append(is_kept.nonzero()[:, 1])
            counts.append(is_kept.sum(1))
        return torch.cat(kept), torch.cat(counts).cpu()

    def raw_logits(self, rows: slice) -> torch.Tensor:
        """Logits (n, V) before the model's scaling and soft cap."""
        return F.linear(self.hidden[rows], self.weight, self.bias)

    def differentiable_logits(
        self, rows: slice, mask: SamplingMask | None = None, raw: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw logits (n, V), computed if not given, and those after transform and mask, recorded by
        autograd.
        """
        raw = self.raw_logits(rows) if raw is None else raw
        if self.options.multiplier == 1.0 and self.options.cap is None and mask is None:
            return raw, raw
        with torch.enable_grad():
            return raw, _masked(self.options.transform(raw.requires_grad_()), mask, rows)

    def chunks(self, *, at_once: int = 1, num_tokens: int = 0) -> Iterator[slice]:
        """Yield the rows of each chunk of logits; `at_once` chunks share the memory of one. `num_tokens`: a
        vocabulary larger than V.
        """
        is_cpu = self.hidden.device.type == "cpu"
        elements = chunk_elements(is_cpu=is_cpu, is_bf16=self.weight.dtype == torch.bfloat16)
        size = max(1, elements // (at_once * max(num_tokens, len(self.weight))))
        for first in range(0, len(self.hidden), size):
            yield slice(first, min(first + size, len(self.hidden)))


def hidden_states(head: OutputHead, token_ids: torch.Tensor) -> torch.Tensor:
    """The hidden states (N, H) themselves, for use as `compute` of a PolicyModel."""
    return head.hidden


@torch.no_grad()
def _softmax_scores(
    logits: torch.Tensor, token_ids: torch.Tensor, options: LogitOptions, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Log-probabilities of the tokens (n,), entropies (n,) if requested, and normalisers (n,), all fp32: log
    p = (logit - normaliser) / temperature, for logits (n, V) of any float dtype.

    Ids from `num_valid_tokens` on are excluded: their own log-probability is -inf.
    """
    valid = logits[:, : options.num_valid_tokens]
    temperature = options.temperature
    num_valid = valid.shape[1]
    largest = valid.amax(-1, keepdim=True)
    scaled = _centred(valid, largest, temperature)
    weights = scaled.exp() if with_entropy else scaled.exp_()
    weight_sum = weights.sum(-1).double()
    chosen = valid.gather(-1, token_ids[:, None].clamp(max=num_valid - 1))
    # float64 for these few numbers per row only: fp32 would round each of the three steps.
    logprobs = ((chosen.double() - largest.double()) / temperature)[:, 0] - weight_sum.log()
    logprobs = logprobs.float().masked_fill_(token_ids >= num_valid, -torch.inf)
    normalisers = (largest[:, 0].double() + temperature * weight_sum.log()).float()
    entropies = None
    if with_entropy:
        # A logit of -inf has weight 0, and 0 * -inf would be NaN.
        mean_scaled = weights.mul_(scaled.clamp_(min=_LOWEST)).sum(-1).double() / weight_sum
        entropies = (weight_sum.log() - mean_scaled).float()
    return logprobs, entropies, normalisers


def _softmax_gradient(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    normalisers: torch.Tensor,
    options: LogitOptions,
    grad_logprobs: torch.Tensor,
    entropy_terms: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Gradient (n, V) of logits (n, V), in their dtype; 0 at excluded ids.

    `entropy_terms`: (entropies (n,), their gradients (n,)).
    """
    valid = logits[:, : options.num_valid_tokens]
    temperature = options.temperature
    num_valid = valid.shape[1]
    log_p = _centred(valid, normalisers[:, None], temperature)
    # d logprob / d logit_j = ([j == id] - p_j) / temperature
    scale = grad_logprobs[:, None] / temperature
    at_chosen = torch.where(token_ids[:, None] < num_valid, scale, 0.0).to(log_p.dtype)
    p = log_p.exp_() if entropy_terms is None else log_p.clamp_(min=_LOWEST).exp()
    if entropy_terms is not None:
        entropies, grad_entropies = entropy_terms
        # d H / d logit_j = -p_j (log p_j + H) / temperature
        log_p.add_(entropies[:, None]).mul_(p).mul_(-grad_entropies[:, None] / temperature)
    gradient = p.mul_(-scale).scatter_add_(-1, token_ids[:, None].clamp(max=num_valid - 1), at_chosen)
    if entropy_terms is not None:
        gradient += log_p
        del log_p
    gradient = gradient.to(logits.dtype)
    num_padding = logits.shape[1] - num_valid
    return F.pad(gradient, (0, num_padding)) if num_padding else gradient


def _centred(logits: torch.Tensor, centres: torch.Tensor, temperature: float) -> torch.Tensor:
    """(logits - centres) / temperature in new memory, fp32; float64 for float64."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True).sub_(centres)
    return x if temperature == 1.0 else x.div_(temperature)  # the default 1 needs no pass over the data


class _TokenScores(torch.autograd.Function):
    """Keeps the inputs, two numbers per token and as many logits as allowed; the backward pass recomputes the
    other logits.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, options, *request):
        head = OutputHead(hidden, weight, bias, options)
        token_ids, with_entropy, mask = request
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.zeros_like(logprobs)
        normalisers = torch.empty_like(logprobs)
        room = CPU_KEPT_ELEMENTS if hidden.device.type == "cpu" else GPU_KEPT_ELEMENTS
        ctx.kept = {}  # first row of a chunk -> its logits
        for rows in head.chunks():
            raw = head.raw_logits(rows)
            room -= raw.numel()
            if room >= 0 and any(ctx.needs_input_grad[:3]):
                ctx.kept[rows.start] = raw
            logits = _masked(options.transform(raw), mask, rows)
            scores = _softmax_scores(logits, token_ids[rows], options, with_entropy=with_entropy)
            logprobs[rows], chunk_entropies, normalisers[rows] = scores
            if with_entropy:
                entropies[rows] = chunk_entropies
        ctx.save_for_backward(hidden, weight, bias, token_ids, entropies, normalisers, *(mask or ()))
        ctx.options = options
        ctx.set_materialize_grads(False)  # entropies without gradient cost nothing in the backward pass
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropies):
        hidden, weight, bias, token_ids, entropies, normalisers, *rest = ctx.saved_tensors
        head = OutputHead(hidden, weight, bias, ctx.options)
        mask = SamplingMask(*rest) if rest else None
        gradients = HeadGradients(head, ctx.needs_input_grad)
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(normalisers)
        for rows in head.chunks():
            raw, logits = head.differentiable_logits(rows, mask, ctx.kept.pop(rows.start, None))
            entropy_terms = None if grad_entropies is None else (entropies[rows], grad_entropies[rows])
            scored = logits.detach(), token_ids[rows], normalisers[rows]
            grad_logits = _softmax_gradient(*scored, ctx.options, grad_logprobs[rows], entropy_terms)
            gradients.add(rows, raw, logits, grad_logits)
        return *gradients.result(hidden.dtype), None, None, None, None


class SummedOverTokens(torch.autograd.Function):
    """A weighted sum over tokens whose gradient the forward pass computes and the backward pass scales. A
    subclass's `forward` takes the fields of an OutputHead first, and passes its HeadGradients to `keep`.
    """

    @classmethod
    def of(cls, head: OutputHead, *more: Any) -> Any:
        """Like `apply`, but skips the gradient if none is needed."""
        if not torch.is_grad_enabled():
            head = OutputHead(*(x if x is None else x.detach() for x in head[:3]), head.options)
        return cls.apply(*head, *more)

    @staticmethod
    def keep(ctx, gradients: "HeadGradients | None", dtype: torch.dtype) -> None:
        """Keep the gradients for the backward pass, which returns them in the dtype of the inputs."""
        ctx.dtype = dtype
        # fp16 overflows above 65504: a sum over many tokens may exceed it before it is scaled down.
        kept = torch.float32 if dtype == torch.float16 else dtype
        ctx.gradients = gradients.result(kept) if gradients else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total, *_):
        """Gradients of hidden, weight and bias, and None for all other inputs."""
        gradients = ctx.gradients
        ctx.gradients = None  # freed: as large as the weight
        scaled = [g if g is None else g.mul_(grad_total.to(g.dtype)).to(ctx.dtype) for g in gradients]
        return *scaled, *[None] * (len(ctx.needs_input_grad) - len(scaled))


class _SummedLogprobs(SummedOverTokens):
    @staticmethod
    def forward(ctx, hidden, weight, bias, options, token_ids):
        head = OutputHead(hidden, weight, bias, options)
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        gradients = HeadGradients(head, ctx.needs_input_grad) if any(ctx.needs_input_grad[:3]) else None
        for rows in head.chunks():
            raw, logits = head.differentiable_logits(rows)
            scored = logits.detach(), token_ids[rows]
            logprobs, _, normalisers = _softmax_scores(*scored, options, with_entropy=False)
            total += logprobs.double().sum()
            if gradients:
                ones = torch.ones_like(logprobs)
                gradients.add(rows, raw, logits, _softmax_gradient(*scored, normalisers, options, ones))
        _SummedLogprobs.keep(ctx, gradients, hidden.dtype)
        return total.float()


def _masked(logits: torch.Tensor, mask: SamplingMask | None, rows: slice) -> torch.Tensor:
    """Logits with -inf outside the mask."""
    if mask is None:
        return logits
    return logits.masked_fill(~mask.of_rows(rows, logits.shape[1]), -torch.inf)


class HeadGradients:
    """Gradients of hidden, weight and bias, accumulated by chunk; the weight's in fp32 or better."""

    def __init__(self, head: OutputHead, needs: Sequence[bool]) -> None:
        """`needs`: whether each of the three, in this order, is needed."""
        self.head = head
        summed = torch.promote_types(head.weight.dtype, torch.float32)
        self.grad_hidden = torch.empty_like(head.hidden) if needs[0] else None
        self.grad_weight = torch.zeros_like(head.weight, dtype=summed) if needs[1] else None
        self.grad_bias = torch.zeros_like(head.bias, dtype=summed) if needs[2] else None

    def add(self, rows: slice, raw: torch.Tensor, logits: torch.Tensor, grad_logits: torch.Tensor) -> None:
        """Add a chunk's gradients: `grad_logits` is the gradient of `logits`, the transformed and masked
        `raw`.
        """
        if logits is not raw:
            (grad_logits,) = torch.autograd.grad(logits, raw, grad_logits)
        hidden, weight, *_ = self.head
        if self.grad_hidden is not None:
            torch.mm(grad_logits, weight, out=self.grad_hidden[rows])
        if self.grad_weight is not None and grad_logits.dtype == torch.bfloat16:
            self.grad_weight += grad_logits.t() @ hidden[rows]
        elif self.grad_weight is not None:  # in fp16 even a single chunk's product may exceed 65504
            summed = self.grad_weight.dtype
            self.grad_weight.addmm_(grad_logits.t().to(summed), hidden[rows].to(summed))
        if self.grad_bias is not None:
            self.grad_bias += grad_logits.sum(0, dtype=self.grad_bias.dtype)

    def result(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """The three gradients in a dtype; None for those that are not needed."""
        return [g if g is None else g.to(dtype) for g in (self.grad_hidden, self.grad_weight, self.grad_bias)]
