"""Losses on preference pairs, for reward models and policies, and on labelled responses; ranking metrics.
PURE.

Losses are unreduced, one number per pair, in fp32. Sequences start at column 0; columns after their lengths
are never read. Metrics are computed from the values of a whole evaluation, gathered from all ranks, and are
never means of means.

# N pairs, T tokens of prompt and answer, right-padded
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.models.tensor_ops import wilson_interval


def end_score_loss(
    chosen_scores: torch.Tensor, rejected_scores: torch.Tensor, margin: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """-log sigmoid(chosen - rejected - margin): (N,) fp32, finite for any finite scores.

    Scores (N,); margin a number or (N,). Bradley-Terry, arXiv:2203.02155 eq. 1; margin, arXiv:2307.09288 eq.
    2.
    """
    return -F.logsigmoid(chosen_scores.float() - rejected_scores.float() - margin)


def token_wise_loss(
    chosen_values: torch.Tensor,
    rejected_values: torch.Tensor,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
    divergence: torch.Tensor,
) -> torch.Tensor:
    """Mean of -log sigmoid(chosen - rejected) from the first difference to the end of the longer sequence:
    (N,) fp32, 0 for identical pairs.

    Values (N, T); lengths (N,) of prompt and response; divergence (N,) from `first_difference`. Beyond the
    end of the shorter sequence its last real value is used; DeepSpeed-Chat, the source of this loss, uses
    values at padding there.
    """
    positions = torch.arange(chosen_values.shape[1], device=chosen_values.device)  # (T,)
    differences = _hold_last(chosen_values, chosen_lengths) - _hold_last(rejected_values, rejected_lengths)
    longer = torch.maximum(chosen_lengths, rejected_lengths)
    counts = (positions >= divergence[:, None]) & (positions < longer[:, None])  # (N, T)
    num_compared = counts.sum(1)
    total = torch.where(counts, -F.logsigmoid(differences), 0.0).sum(1)
    return total / num_compared.clamp(min=1)


def first_difference(
    chosen_ids: torch.Tensor,
    rejected_ids: torch.Tensor,
    chosen_lengths: torch.Tensor,
    rejected_lengths: torch.Tensor,
) -> torch.Tensor:
    """First position that differs: (N,) int64; the common length if the two are identical.

    ids (N, T), lengths (N,). If one is a prefix of the other they differ at the end of the shorter one.
    """
    positions = torch.arange(chosen_ids.shape[1], device=chosen_ids.device)
    is_chosen = positions < chosen_lengths[:, None]
    is_rejected = positions < rejected_lengths[:, None]
    differs = (is_chosen != is_rejected) | (is_chosen & is_rejected & (chosen_ids != rejected_ids))
    longer = torch.maximum(chosen_lengths, rejected_lengths)
    return torch.where(differs, positions, longer[:, None]).amin(1)


def center_penalty(chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> torch.Tensor:
    """(chosen + rejected)^2: (N,) fp32. Keeps scores near 0; the loss of a pair does not depend on their sum.

    Eisenstein et al. 2023, arXiv:2312.09244.
    """
    return (chosen_scores.float() + rejected_scores.float()).square()


class PairLosses(NamedTuple):
    """Scores of the two responses of each pair, and the loss."""

    chosen: torch.Tensor  # (N,) fp32: score, or reward of DPO: beta (policy's - reference's logprob)
    rejected: torch.Tensor  # (N,) fp32
    loss: torch.Tensor  # (N,) fp32


def dpo_loss(
    chosen_logprobs: torch.Tensor,
    rejected_logprobs: torch.Tensor,
    reference_chosen_logprobs: torch.Tensor,
    reference_rejected_logprobs: torch.Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> PairLosses:
    """-(1 - e) log sigmoid(z) - e log sigmoid(-z) of each pair, where z is the difference of its rewards.

    The reward of a response is beta (log-probability under the policy - under the reference); all four (N,)
    fp32 are sums over the tokens of a response. Rafailov et al. 2023, arXiv:2305.18290 eq. 7; e, the assumed
    fraction of pairs with swapped labels, is the authors' conservative form.
    """
    sums = (chosen_logprobs, rejected_logprobs, reference_chosen_logprobs, reference_rejected_logprobs)
    # In bf16 a sum of -10.84 becomes -10.8125, and a margin is a difference of such sums.
    assert all(logprobs.dtype == torch.float32 for logprobs in sums)
    chosen_rewards = beta * (chosen_logprobs - reference_chosen_logprobs)
    rejected_rewards = beta * (rejected_logprobs - reference_rejected_logprobs)
    z = chosen_rewards - rejected_rewards
    loss = -(1 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)
    return PairLosses(chosen_rewards.detach(), rejected_rewards.detach(), loss)


def ipo_loss(
    chosen_logprobs: torch.Tensor,
    rejected_logprobs: torch.Tensor,
    reference_chosen_logprobs: torch.Tensor,
    reference_rejected_logprobs: torch.Tensor,
    *,
    beta: float,
) -> PairLosses:
    """(h - 1 / (2 beta))^2 of each pair, where h is the difference of its responses' log-ratios to the
    reference.

    All four (N,) fp32 are means over the tokens of a response. Azar et al. 2023, arXiv:2310.12036 eq. 17,
    where beta is tau and log-probabilities are sums. Means, as in TRL: a sum over a long response reaches the
    target 1 / (2 beta) with tiny changes per token, one over a short response does not.
    """
    chosen_ratios = chosen_logprobs - reference_chosen_logprobs
    rejected_ratios = rejected_logprobs - reference_rejected_logprobs
    loss = (chosen_ratios - rejected_ratios - 1 / (2 * beta)).square()
    return PairLosses(beta * chosen_ratios.detach(), beta * rejected_ratios.detach(), loss)


def kto_loss(
    log_ratios: torch.Tensor,
    labels: torch.Tensor,
    kl: torch.Tensor,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> torch.Tensor:
    """w (1 - sigmoid(beta (r - kl))) of each good response, w (1 - sigmoid(beta (kl - r))) of each bad one:
    (N,) fp32.

    log_ratios r (N,) fp32: log-probability under the policy minus under the reference, summed over the tokens
    of a response; labels (N,), 1 good and 0 bad; kl is a scalar without gradient, see `kto_baseline`.
    Ethayarajh et al. 2024, arXiv:2402.01306 eq. 8.
    """
    assert log_ratios.dtype == torch.float32 and not kl.requires_grad
    is_good = labels == 1
    gains = beta * torch.where(is_good, log_ratios - kl, kl - log_ratios)
    return torch.where(is_good, desirable_weight, undesirable_weight) * torch.sigmoid(-gains)


def kto_baseline(mismatched_log_ratios: torch.Tensor) -> torch.Tensor:
    """Estimate of the KL from the reference to the policy, from which KTO measures gains: fp32 scalar, at
    least 0.

    mismatched_log_ratios (N,): as in `kto_loss`, of responses that belong to other prompts; of all ranks.
    """
    return mismatched_log_ratios.double().mean().clamp(min=0).float()


@torch.no_grad()
def accuracy_figures(differences: torch.Tensor) -> dict[str, float]:
    """Fraction of pairs ranked correctly, its 95 % interval (Wilson), and the number of pairs.

    differences (N,): chosen minus rejected. Raises ValueError without pairs.
    """
    accuracy = float(wins(differences).mean().float())
    num_pairs = len(differences)
    rate = wilson_interval(accuracy * num_pairs, num_pairs)
    return {"accuracy": accuracy, "accuracy_low": rate.low, "accuracy_high": rate.high, "pairs": num_pairs}


@torch.no_grad()
def expected_calibration_error(score_differences: torch.Tensor, bins: int = 10) -> torch.Tensor:
    """Sum over bins of (fraction of pairs) |accuracy - mean confidence|: fp32 scalar in [0, 1].

    score_differences (N,): chosen minus rejected, the log odds that the chosen response is better. The
    confidence is the probability of the preferred response, in [0.5, 1], split into `bins` of equal width; a
    tie counts half. Guo et al. 2017, arXiv:1706.04599 eq. 3. Raises ValueError without pairs.
    """
    differences = score_differences.double()
    confidence = torch.sigmoid(differences.abs())
    bin_index = ((confidence - 0.5) * 2 * bins).long().clamp_(0, bins - 1)  # NaN falls into any bin
    # |sum of wins - sum of confidences| of a bin equals its count times |accuracy - mean confidence|.
    gaps = differences.new_zeros(bins).index_add_(0, bin_index, wins(differences) - confidence)
    return (gaps.abs().sum() / len(differences)).float()


@torch.no_grad()
def longer_share(differences: torch.Tensor, length_differences: torch.Tensor) -> torch.Tensor:
    """Fraction of pairs won by the longer response: fp32 scalar, 0.5 if no pair has a longer one.

    Both (N,), of the same two responses: the difference of their scores (or 1 if the first is preferred), and
    that of their lengths. A tie of scores counts half. The fraction by a model's scores minus that by
    people's choices measures the model's length bias relative to the annotators'.
    """
    unequal = length_differences != 0
    if not unequal.any():
        return torch.tensor(0.5)
    return wins(differences.double()[unequal] * length_differences.sign()[unequal]).mean().float()


def wins(differences: torch.Tensor) -> torch.Tensor:
    """1 for a pair ranked correctly, 0 for one ranked wrongly, 1/2 for a tie, NaN for NaN: (N,) fp64.

    differences (N,): chosen minus rejected. Raises ValueError without pairs.
    """
    if len(differences) == 0:
        raise ValueError("there are no pairs to evaluate; is the evaluation set empty?")
    differences = differences.double()
    return torch.where(differences.isnan(), torch.nan, (differences.sign() + 1) / 2)


def _hold_last(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Values (N, T) in fp32, with everything after a row's length replaced by its last real value."""
    positions = torch.arange(values.shape[1], device=values.device)
    return values.float().gather(1, torch.minimum(positions, lengths[:, None] - 1).clamp(min=0))
