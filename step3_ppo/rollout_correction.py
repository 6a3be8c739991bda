"""Importance-sampling correction for a sampler that differs from the policy before the updates.

The sampler is a different policy if its rollouts are stale and, by rounding, if its computation differs from
the trainer's. The denominator of the loss's ratio is then the trainer's policy before the updates (prox), and
the loss is weighted by prox / sampler: decoupled PPO, arXiv:2505.24298.

# B sequences, R response; mask (B, R) bool, tokens that count
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from common.data.packed_batch import PackedBatch
from step3_ppo.arguments import PPOArguments
from step3_ppo.ppo_math import MAX_LOG_RATIO
from step3_ppo.rollout_batch import spread_over_tokens, tokens, with_tokens

EDGES = (0.5, 0.8, 1.25, 2.0)  # of the histogram of the weights
BINS = (
    f"weights_below_{EDGES[0]:g}",
    *(f"weights_{low:g}_to_{high:g}" for low, high in itertools.pairwise(EDGES)),
    f"weights_from_{EDGES[-1]:g}",
)


@dataclass(frozen=True)
class Correction:
    """Form of the importance weights, and the treatment of those outside the bounds.

    `level`: "token", "sequence" (product over a response's tokens) or "geometric" (their geometric mean).
    `action`: "truncate" to the bounds, "mask" to 0, or "reject": 0 outside, 1 inside.
    """

    level: str
    action: str
    lower: float
    upper: float


FORMS = {
    "tis": Correction("token", "truncate", 0.0, 2.0),
    "mis": Correction("token", "mask", 0.0, 2.0),
    "seq_tis": Correction("sequence", "truncate", 0.0, 2.0),
    "seq_mis": Correction("sequence", "mask", 0.0, 2.0),
    "geo_rs": Correction("geometric", "reject", 0.999, 1.001),
}


def find_correction(args: PPOArguments) -> Correction | None:
    """The form of --rollout_correction with the bounds of the flags; None for none."""
    form = FORMS.get(args.rollout_correction)
    if form is None or not args.correction_high:
        return form
    return replace(form, lower=args.correction_low, upper=args.correction_high)


class Weights(NamedTuple):
    """Importance weights, fp32: of each token (B, R) or each response (B,)."""

    weights: torch.Tensor  # factors of the losses; 0 if nothing counts
    raw: torch.Tensor  # before the bounds
    is_outside: torch.Tensor  # bool, truncated or masked
    is_counted: torch.Tensor  # bool, has a token that counts


@torch.no_grad()
def correction_weights(
    prox_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, correction: Correction
) -> Weights:
    """Importance weights prox / sampler in the form of the correction; inputs (B, R).

    NaN is propagated so that the loss exposes it. Masked tokens still count in the mean of the loss. TIS: Yao
    et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; masks: AReaL,
    arXiv:2505.24298; with two bounds IcePop, arXiv:2510.18855.
    """
    log_weights = torch.where(mask, prox_logprobs.double() - rollout_logprobs.double(), 0.0)
    is_counted = mask
    if correction.level != "token":
        sums = log_weights.sum(1)
        lengths = mask.sum(1)
        log_weights = sums / lengths.clamp(min=1) if correction.level == "geometric" else sums
        is_counted = lengths > 0
    raw = log_weights.clamp(max=MAX_LOG_RATIO).exp().float()
    is_outside = is_counted & ((raw < correction.lower) | (raw > correction.upper))
    if correction.action == "truncate":
        weights = raw.clamp(correction.lower, correction.upper)
    else:
        weights = torch.where(is_outside, 0.0, 0 * raw + 1 if correction.action == "reject" else raw)
    return Weights(torch.where(is_counted, weights, 0.0), raw, is_outside, is_counted)


def prox_share(batch: PackedBatch, step: int) -> torch.Tensor:
    """Position of prox between the log-probabilities at rollout (0) and now (1), fp32 per response token.

    A token sampled d steps ago is at d / (d + 1): the step's own updates are the rest of the way (AReaL's
    prox_approx_method loglinear).
    """
    age = (step - 1 - batch.data["versions"]).float()
    return age / (age + 1)


@torch.no_grad()
def weigh_tokens(
    batch: PackedBatch, prox_logprobs: torch.Tensor, correction: Correction
) -> tuple[PackedBatch, Weights]:
    """The batch with `prox_logprobs` (one per response token) and correction_weights, and the weights."""
    batch = batch.with_key("prox_logprobs", prox_logprobs, like="response_ids")
    prox, sampled, mask = (tokens(batch, key) for key in ("prox_logprobs", "rollout_logprobs", "loss_mask"))
    made = correction_weights(prox, sampled, mask, correction)
    weights = made.weights if correction.level == "token" else spread_over_tokens(made.weights, batch)
    return with_tokens(batch, correction_weights=weights), made


def mean_weights(made: Weights) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Sum and count of the raw weights and of those outside the bounds, by log name."""
    num = made.is_counted.sum()
    return {
        "correction/weight_mean": (torch.where(made.is_counted, made.raw, 0.0).sum(), num),
        "correction/capped_fraction": (made.is_outside.sum(), num),
    }


@torch.no_grad()
def summarise_weights(
    made: Weights,
    reduce_sum: Callable[[torch.Tensor], torch.Tensor],
    max_float: Callable[[float], float],
) -> dict[str, float]:
    """Statistics of the weights of all ranks, over tokens or over responses, by log name.

    weight_mean, weight_max and the fractions between `EDGES` (a histogram) are of the raw weights;
    capped_fraction is the fraction that was truncated or masked; effective_fraction is the effective sample
    size of the weights in the loss, (sum w)^2 / sum w^2, divided by n. Every rank must call this.
    """
    raw, weights = (x[made.is_counted].double() for x in (made.raw, made.weights))
    bins = torch.bucketize(raw, torch.tensor(EDGES, dtype=torch.float64), right=True)
    histogram = torch.bincount(bins, minlength=len(EDGES) + 1).double()
    own = [raw.sum(), weights.sum(), weights.square().sum(), made.is_outside.double().sum()]
    sums = reduce_sum(torch.cat([torch.stack(own), histogram])).tolist()
    raw_sum, weight_sum, squares, num_outside = sums[: len(own)]
    num = max(sum(sums[len(own) :]), 1.0)
    shares = {f"correction/{name}": x / num for name, x in zip(BINS, sums[len(own) :], strict=True)}
    return shares | {
        "correction/weight_mean": raw_sum / num,
        "correction/weight_max": max_float(float(raw.max()) if len(raw) else 0.0),
        "correction/capped_fraction": num_outside / num,
        "correction/effective_fraction": weight_sum**2 / (num * squares) if squares else 0.0,
    }
