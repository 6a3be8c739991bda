"""How well a reward model ranks pairs. PURE: imports torch and pure files.

Each metric takes the scores of a whole evaluation, gathered from all ranks: none of them is a mean of means.

# N pairs
"""

import torch

from common.models.tensor_ops import wilson_interval


@torch.no_grad()
def pair_accuracy(chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> torch.Tensor:
    """Return the share of pairs ranked rightly: fp32 scalar. A tie counts half: it says nothing either way.

    Scores (N,). Raises ValueError without pairs.
    """
    differences = chosen_scores.double() - rejected_scores.double()
    return _wins(differences).mean().float()


def accuracy_figures(chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> dict[str, float]:
    """Return `pair_accuracy` with the ends of its 95 % interval (Wilson's) and the number of pairs.

    Scores (N,). Raises ValueError without pairs.
    """
    accuracy, num_pairs = float(pair_accuracy(chosen_scores, rejected_scores)), len(chosen_scores)
    rate = wilson_interval(accuracy * num_pairs, num_pairs)
    return {"accuracy": accuracy, "accuracy_low": rate.low, "accuracy_high": rate.high, "pairs": num_pairs}


@torch.no_grad()
def expected_calibration_error(score_differences: torch.Tensor, bins: int = 10) -> torch.Tensor:
    """Return sum over bins of (share of pairs) |accuracy - mean confidence|: fp32 scalar in [0, 1].

    score_differences (N,): chosen minus rejected, the log odds that the chosen answer is better. The
    confidence is the probability of the answer it prefers, in [0.5, 1], cut into `bins` of equal width; a tie
    counts half. Guo et al. 2017, arXiv:1706.04599 eq. 3. Raises ValueError without pairs.
    """
    differences = score_differences.double()
    wins = _wins(differences)
    confidence = torch.sigmoid(differences.abs())
    bin_index = ((confidence - 0.5) * 2 * bins).long().clamp_(max=bins - 1)
    # |sum of wins - sum of confidences| of a bin is its count times |accuracy - mean confidence|.
    gaps = differences.new_zeros(bins).index_add_(0, bin_index, wins - confidence)
    return (gaps.abs().sum() / len(differences)).float()


@torch.no_grad()
def longer_share(differences: torch.Tensor, length_differences: torch.Tensor) -> torch.Tensor:
    """Return the share of pairs that are won by the longer answer: fp32 scalar, 0.5 where none is longer.

    Both (N,), of the same two answers: the difference of their scores (or 1 where the first is preferred),
    and that of their lengths. A tie of scores counts half. The share by a model's scores above that by
    people's choices tells how much more than people the model likes length.
    """
    unequal = length_differences != 0
    if not unequal.any():
        return torch.tensor(0.5)
    return _wins(differences.double()[unequal] * length_differences.sign()[unequal]).mean().float()


def _wins(differences: torch.Tensor) -> torch.Tensor:
    if len(differences) == 0:
        raise ValueError("there are no pairs to measure; is the evaluation set empty?")
    return (differences.sign() + 1) / 2
