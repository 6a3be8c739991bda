"""Sampling that is independent of the batch. PURE: imports torch only.

One uniform per (seed, sample id, position) comes from a counter-based hash, and selects a token through the
inverse of the cumulative probabilities in the order of the vocabulary. Probabilities are accumulated as
integers: their sums are exact in any order, so a row's token does not depend on the rows around it, and a
token of weight 0 occupies no part of the interval.

# B sequences, V vocabulary
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

# splitmix64: increment and finaliser. Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
# generators".
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_FIRST_MULTIPLIER = 0xBF58476D1CE4E5B9
_SECOND_MULTIPLIER = 0x94D049BB133111EB
_UNIFORM_BITS = 24  # resolution of fp32 everywhere in [0, 1)

_WEIGHT_ONE = 2.0**40  # integer weight of the likeliest token; a sum of 2^22 such weights fits into int64
_CPU_CHUNK_ELEMENTS = 2**17  # int64 weights per chunk, which stay in the cache
_BLOCK = 256  # tokens per block; the search finds the block by its sum, then the token
# Likeliest tokens searched for the nucleus first, if reading the result does not wait for the device.
_NUCLEUS_CANDIDATES = 4096
# The bits of a positive fp32, as an integer, increase with its value: integers for weights from 1 to
# _WEIGHT_ONE span 29 bits.
_BITS_OF_ONE, _BITS_OF_WEIGHT_ONE = 0x3F800000, 0x53800000
_LOW_BITS = 15


class Sample(NamedTuple):
    """A token for each row, its log-probability, and the probability that top_k and top_p kept."""

    token_ids: torch.Tensor  # (B,) int64
    logprobs: torch.Tensor  # (B,) fp32, log softmax(logits / temperature) of all valid tokens
    log_kept: torch.Tensor  # (B,) fp32, log of the probability that top_k and top_p kept; 0: all


def counter_uniform(
    seed: int | torch.Tensor, sample_ids: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """A uniform in [0, 1) for each (seed, sample id, position): fp32, a multiple of 2^-24.

    sample_ids and positions are int64 on one device and are broadcast; seed is any int (its low 64 bits
    count), or int64 like sample_ids. Three rounds of splitmix64 in wrapping int64 arithmetic: the same bits
    on every device and in every batch.
    """
    if isinstance(seed, int):
        seed = torch.full_like(sample_ids, _as_int64(seed))
    state = _mix(seed + _as_int64(_GOLDEN_GAMMA))
    for word in (sample_ids, positions):
        state = _mix(state + word * _as_int64(_GOLDEN_GAMMA))
    return _shift_right(state, 64 - _UNIFORM_BITS).float() * 2.0**-_UNIFORM_BITS


def sample_tokens(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    do_sample: bool = True,
    num_valid_tokens: int | None = None,
) -> Sample:
    """A token for each row, below `num_valid_tokens`, never one of probability 0.

    logits (B, V) of any float dtype, uniforms (B,) in [0, 1]. Temperature applies first, then `top_k` (0 =
    all), then `top_p` (1 = all) of the rest: the likeliest tokens up to and including the one that reaches
    it. Ties with the last token kept are kept too, because their order would differ between devices. A
    probability below 2^-40 of the likeliest counts as 0. `do_sample=False` returns the argmax, with the whole
    distribution's log-probability. Log-probabilities equal those of `token_scores` to the bit. A row with a
    NaN or without a finite logit gets an arbitrary valid token: its log-probability shows it.
    """
    logits = logits[:, :num_valid_tokens]
    log_kept = torch.zeros_like(uniforms)
    largest = logits.amax(-1, keepdim=True)
    weights = _integer_weights(logits, largest, temperature)
    weight_sum = weights.sum(-1).double() / _WEIGHT_ONE  # of the softmax; this division is exact
    if do_sample:
        if 0 < top_k < logits.shape[1] or top_p < 1.0:
            whole = weights.sum(-1, dtype=torch.float64)
            weights.masked_fill_(weights < _smallest_weight_kept(weights, top_k, top_p), 0.0)
            log_kept = (weights.sum(-1, dtype=torch.float64) / whole).log().float()
        token_ids = _invert_cumulative(weights, uniforms).clamp_(0, logits.shape[1] - 1)
    else:
        token_ids = logits.argmax(-1)
    chosen = logits.gather(-1, token_ids.unsqueeze(-1))
    # float64 for these few numbers per row only: fp32 would round each of the three steps.
    logprobs = (chosen.double() - largest.double()).squeeze(-1) / temperature - weight_sum.log()
    return Sample(token_ids, logprobs.float(), log_kept)


def sampling_mask(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    num_valid_tokens: int | None = None,
) -> torch.Tensor:
    """Mask (B, V) bool: True for the tokens among which `sample_tokens` samples with these options."""
    logits, num_tokens = logits[:, :num_valid_tokens], logits.shape[1]
    weights = _integer_weights(logits, logits.amax(-1, keepdim=True), temperature)
    is_kept = weights >= 1  # a smaller one counts as 0
    if 0 < top_k < weights.shape[1] or top_p < 1.0:
        is_kept &= weights >= _smallest_weight_kept(weights, top_k, top_p)
    return F.pad(is_kept, (0, num_tokens - weights.shape[1]))


def _integer_weights(logits: torch.Tensor, largest: torch.Tensor, temperature: float) -> torch.Tensor:
    """Weights (B, V) of the tokens as integers in fp32, from 0 to 2^40 for logit `largest`."""
    weights = (logits.to(torch.promote_types(logits.dtype, torch.float32)) - largest).float()
    if temperature != 1.0:
        weights.div_(temperature)
    return weights.exp_().mul_(_WEIGHT_ONE)


def _smallest_weight_kept(weights: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Threshold (B, 1): a token is kept if its weight is at least this."""
    largest = min(top_k, weights.shape[-1]) if top_k else weights.shape[-1]
    if top_k:
        threshold = weights.topk(largest).values[:, -1:]
        weights = weights.masked_fill(weights < threshold, 0.0)
    return _smallest_weight_in_nucleus(weights, top_p, largest) if top_p < 1.0 else threshold


def _smallest_weight_in_nucleus(weights: torch.Tensor, top_p: float, largest: int) -> torch.Tensor:
    """The weight (B, 1) at which the descending weights first sum to `top_p` of their total."""
    masses = weights.long()
    target = top_p * masses.sum(-1, keepdim=True).double()
    num_candidates = min(largest, _NUCLEUS_CANDIDATES)
    if num_candidates == largest or weights.device.type == "cpu":
        ordered = weights.topk(num_candidates).values  # (B, num_candidates), descending
        integers = ordered.long()
        is_kept = (integers.cumsum(-1) - integers).double() < target
        if num_candidates == largest or not is_kept[:, -1].any():
            num_kept = is_kept.sum(-1, keepdim=True).clamp(min=1)  # 0 only in a row of NaN
            return ordered.gather(-1, num_kept - 1)
    return _find_weight_by_digits(weights, masses, target)


def _find_weight_by_digits(weights: torch.Tensor, masses: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The weight (B, 1) at which the descending weights first sum to `target` (B, 1).

    Nothing is sorted and nothing waits for the device: among all fp32 numbers the high digit of the weight is
    found first, from the masses that share one, then the low digit. Overwrites `masses`.
    """

    def find(digits: torch.Tensor, before: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
        """The digit (B, 1), and the mass of all smaller ones on top of `before`."""
        sums = masses.new_zeros(len(masses), 1 << _LOW_BITS).scatter_add_(1, digits.long(), masses)
        upto = sums.cumsum(-1).add_(before)
        digit = (upto[:, :-1] < target).sum(-1, keepdim=True)
        return digit, (upto - sums).gather(1, digit)

    offsets = (_BITS_OF_WEIGHT_ONE - weights.view(torch.int32)).clamp_(0, _BITS_OF_WEIGHT_ONE - _BITS_OF_ONE)
    high_digits = offsets >> _LOW_BITS
    high, before = find(high_digits, 0)
    masses.masked_fill_(high_digits != high.int(), 0)
    low, _ = find(offsets & ((1 << _LOW_BITS) - 1), before)
    return (_BITS_OF_WEIGHT_ONE - ((high << _LOW_BITS) | low)).int().view(torch.float32)


def _invert_cumulative(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """For each row the first token whose cumulative weight exceeds uniform * total: (B,) int64."""
    num_tokens = weights.shape[-1]
    cumulated = _block_sums(weights).cumsum(-1)  # (B, blocks)
    total = cumulated[:, -1:]
    # Rounding in float64 can raise the product to the total, at which no token would be found.
    target = (uniforms.unsqueeze(-1).double() * total.double()).long().minimum(total - 1).clamp_(min=0)
    block = torch.searchsorted(cumulated, target, right=True).clamp_(max=cumulated.shape[-1] - 1)  # (B, 1)
    tokens = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)  # (B, _BLOCK)
    inside = weights.gather(-1, tokens.clamp(max=num_tokens - 1)).masked_fill_(tokens >= num_tokens, 0.0)
    inside = inside.long().cumsum(-1)
    mass_before = cumulated.gather(-1, block) - inside[:, -1:]
    return (block * _BLOCK + torch.searchsorted(inside, target - mass_before, right=True)).squeeze(-1)


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sums of the integer weights of each _BLOCK tokens: (B, V / _BLOCK rounded up) int64."""
    padding = -weights.shape[-1] % _BLOCK
    rows = _CPU_CHUNK_ELEMENTS // weights.shape[-1] if weights.device.type == "cpu" else len(weights)
    return torch.cat(
        [
            (F.pad(part, (0, padding)) if padding else part).long().unflatten(-1, (-1, _BLOCK)).sum(-1)
            for part in weights.split(max(1, rows))
        ]
    )


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _as_int64(_FIRST_MULTIPLIER)
    x = (x ^ _shift_right(x, 27)) * _as_int64(_SECOND_MULTIPLIER)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift: int64's own shift copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(value: int) -> int:
    """The int64 with the low 64 bits of `value`."""
    low = value & (2**64 - 1)
    return low - 2**64 if low >= 2**63 else low
