"""PURE: what judgements of pairs amount to: win rates with Wilson intervals, Bradley-Terry ratings with
bootstrap intervals.

A tie, and "both bad", counts in a rating as half a win of each; a win rate is that of the decided pairs
alone.

# R resamples, K different outcomes, M models
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from common.models.tensor_ops import Rate, wilson_interval

ELO_PER_FACTOR_10 = 400.0  # a rating difference of 400 means odds of 10 to 1
MEAN_RATING = 1000.0
# Without it a model that never lost would be rated infinity: each has one draw against an average model.
PRIOR_DRAWS = 1.0
_SMALLEST_CHANGE = 1e-9  # of a log-strength
_LARGEST_STEP = 1.0  # Newton's own step may jump over the maximum
_MAX_ROUNDS = 200


class Outcome(NamedTuple):
    """One judgement: the two models, and the score of the first, 1, 0 or 0.5 for a tie."""

    first: str
    second: str
    score: float


class Duel(NamedTuple):
    """What the judgements of two models with one another came to."""

    first: str
    second: str
    first_wins: int
    second_wins: int
    ties: int
    first_rate: Rate  # of the decided ones


class Rating(NamedTuple):
    """A model's strength on the Elo scale, with the 95 % interval of a bootstrap over judgements."""

    model: str
    rating: float
    low: float
    high: float
    num_judgements: int


def duels(outcomes: Iterable[Outcome]) -> list[Duel]:
    """Return a row for each two models that met, by name; neither order of a pair counts apart."""
    counts: dict[tuple[str, str], list[int]] = {}
    for first, second, score in outcomes:
        if first > second:
            first, second, score = second, first, 1 - score
        wins = counts.setdefault((first, second), [0, 0, 0])
        wins[0 if score == 1 else 1 if score == 0 else 2] += 1
    return [
        Duel(first, second, won, lost, tied, wilson_interval(won, won + lost))
        for (first, second), (won, lost, tied) in sorted(counts.items())
    ]


def bradley_terry(counts: Mapping[Outcome, int], *, prior_draws: float = PRIOR_DRAWS) -> dict[str, float]:
    """Return each model's rating; `counts` tells how often each outcome was seen.

    `prior_draws` against an average model keep it finite; with 0 only differences of ratings mean something,
    and their mean is MEAN_RATING.
    """
    names = sorted({name for outcome in counts for name in outcome[:2]})
    weights = torch.tensor([[float(count) for count in counts.values()]], dtype=torch.float64)
    return dict(zip(names, _fit(names, list(counts), weights, prior_draws)[0].tolist(), strict=True))


def _fit(
    names: list[str], outcomes: list[Outcome], weights: torch.Tensor, prior_draws: float
) -> torch.Tensor:
    """Return ratings (R, M) fp64 for outcomes that were seen `weights` (R, K) times.

    The maximum of the likelihood in which i beats j with probability sigmoid(s_i - s_j) (R. A. Bradley and
    M. E. Terry 1952), by Newton's method on the log-strengths s.
    """
    place = {name: index for index, name in enumerate(names)}
    contrast = torch.zeros(len(outcomes), len(names), dtype=torch.float64)  # (K, M): s_i - s_j
    scores = torch.tensor([outcome.score for outcome in outcomes], dtype=torch.float64)
    for row, (first, second, _) in zip(contrast, outcomes, strict=True):
        row[place[first]], row[place[second]] = 1.0, -1.0
    strength = torch.zeros(len(weights), len(names), dtype=torch.float64)
    # Where only differences count, a step may have no part that moves all alike.
    anchor = torch.full((len(names), len(names)), 0.0 if prior_draws else 1.0, dtype=torch.float64)
    for _ in range(_MAX_ROUNDS):
        wins, against_average = torch.sigmoid(strength @ contrast.T), torch.sigmoid(strength)
        gradient = (weights * (scores - wins)) @ contrast + prior_draws * (0.5 - against_average)
        curvature = contrast.T @ ((weights * wins * (1 - wins)).unsqueeze(-1) * contrast) + anchor
        curvature += torch.diag_embed(prior_draws * against_average * (1 - against_average))
        step = torch.linalg.solve(curvature, gradient).clamp_(-_LARGEST_STEP, _LARGEST_STEP)
        strength += step
        if not step.numel() or step.abs().max() < _SMALLEST_CHANGE:
            break
    return MEAN_RATING + ELO_PER_FACTOR_10 / math.log(10.0) * strength


def ratings(outcomes: Sequence[Outcome], *, num_resamples: int = 200, seed: int = 0) -> list[Rating]:
    """Return the models' ratings, the strongest first, with percentiles of `num_resamples` resamples.

    A resample draws as many judgements as there are, with replacement; the same seed gives the same
    intervals.
    """
    if not outcomes:
        return []
    counts = Counter(outcomes)
    kinds, seen = list(counts), torch.tensor([float(count) for count in counts.values()])
    found = bradley_terry(counts)
    drawn = torch.multinomial(
        seen.repeat(num_resamples, 1),
        len(outcomes),
        replacement=True,
        generator=torch.Generator().manual_seed(seed),
    )  # (R, judgements): which outcome
    weights = torch.zeros(num_resamples, len(kinds), dtype=torch.float64)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    resampled = _fit(list(found), kinds, weights, PRIOR_DRAWS)
    number = Counter(name for outcome in outcomes for name in outcome[:2])
    rows = [
        Rating(name, rating, percentile(values, 0.025), percentile(values, 0.975), number[name])
        for (name, rating), values in zip(found.items(), resampled.T.tolist(), strict=True)
    ]
    return sorted(rows, key=lambda row: -row.rating)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies, interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
