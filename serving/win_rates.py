"""What judgements of pairs amount to: win rates with Wilson intervals, Bradley-Terry ratings with bootstrap
intervals.

A tie, and "both bad", counts in a rating as half a win of each; a win rate is that of the decided pairs
alone.

# R resamples, K different outcomes, M models
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

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
    counts: dict[tuple[str, str], Counter[float]] = {}
    for first, second, score in outcomes:
        if first > second:
            first, second, score = second, first, 1 - score
        counts.setdefault((first, second), Counter())[score] += 1
    return [
        Duel(first, second, of[1], of[0], of[0.5], wilson_interval(of[1], of[1] + of[0]))
        for (first, second), of in sorted(counts.items())
    ]


def bradley_terry(
    counts: Mapping[Outcome, int], weights: np.ndarray, prior_draws: float = PRIOR_DRAWS
) -> dict[str, np.ndarray]:
    """Return each model's rating (R,) where outcomes, the keys of `counts`, were seen `weights` (R, K) times.

    The maximum of the likelihood in which i beats j with probability sigmoid(s_i - s_j) (R. A. Bradley and
    M. E. Terry 1952), by Newton's method on the log-strengths s. `prior_draws` against an average model keep
    it finite; with 0 only differences of ratings mean something, and their mean is MEAN_RATING.
    """
    names = sorted({name for outcome in counts for name in outcome[:2]})
    # (K, M): 1 for the first, -1 for the second, so that a product with it is s_i - s_j
    contrast = np.array([[(o.first == n) - (o.second == n) for n in names] for o in counts], dtype=float)
    scores = np.array([outcome.score for outcome in counts])
    strength = np.zeros((len(weights), len(names)))
    # Where only differences count, a step may have no part that moves all alike.
    anchor = 0.0 if prior_draws else 1.0
    for _ in range(_MAX_ROUNDS):
        wins, against_average = _sigmoid(strength @ contrast.T), _sigmoid(strength)
        gradient = (weights * (scores - wins)) @ contrast + prior_draws * (0.5 - against_average)
        curvature = contrast.T @ ((weights * wins * (1 - wins))[..., None] * contrast) + anchor
        prior_curvature = prior_draws * against_average * (1 - against_average)
        curvature += prior_curvature[..., None] * np.eye(len(names))
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0].clip(-_LARGEST_STEP, _LARGEST_STEP)
        strength += step
        if np.abs(step).max() < _SMALLEST_CHANGE:
            break
    return dict(zip(names, MEAN_RATING + ELO_PER_FACTOR_10 / math.log(10.0) * strength.T, strict=True))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def ratings(outcomes: Sequence[Outcome], *, num_resamples: int = 200, seed: int = 0) -> list[Rating]:
    """Return the models' ratings, the strongest first, with percentiles of `num_resamples` resamples.

    A resample draws as many judgements as there are, with replacement; the same seed gives the same
    intervals.
    """
    if not outcomes:
        return []
    counts = Counter(outcomes)
    seen = np.array([list(counts.values())], dtype=float)
    generator = np.random.default_rng(seed)
    resamples = generator.multinomial(len(outcomes), seen[0] / len(outcomes), size=num_resamples)  # (R, K)
    rows = []
    for name, (rating, *others) in bradley_terry(counts, np.vstack([seen, resamples])).items():
        low, high = np.quantile(others, [0.025, 0.975]).tolist()
        rows.append(Rating(name, float(rating), low, high, sum(name in outcome[:2] for outcome in outcomes)))
    return sorted(rows, key=lambda row: -row.rating)
