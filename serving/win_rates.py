"""What judgements of pairs amount to: win rates with Wilson intervals, Bradley-Terry ratings with bootstrap
intervals.

A tie, and "both bad", counts in a rating as half a win of each; a win rate is that of the decided pairs
alone.

# R resamples, K different outcomes, M models
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from common.models.tensor_ops import wilson_interval

ELO_PER_FACTOR_10 = 400.0  # a rating difference of 400 means odds of 10 to 1
MEAN_RATING = 1000.0
# Without it a model that never lost would be rated infinity: each has one draw against an average model.
PRIOR_DRAWS = 1.0
_SMALLEST_CHANGE = 1e-9  # of a log-strength
_LARGEST_STEP = 1.0  # Newton's own step may jump over the maximum
_MAX_ROUNDS = 200
_NUM_RESAMPLES = 200


class Outcome(NamedTuple):
    """One judgement: the two models, and the score of the first, 1, 0 or 0.5 for a tie."""

    first: str
    second: str
    score: float


def duels(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return a row for each two models that met, by name; neither order of a pair counts apart.

    `first_rate` is the first one's share of the decided ones, with Wilson's interval.
    """
    counts: dict[tuple[str, str], Counter[float]] = {}
    for first, second, score in outcomes:
        if first > second:
            first, second, score = second, first, 1 - score
        counts.setdefault((first, second), Counter())[score] += 1
    rows = []
    for (first, second), of in sorted(counts.items()):
        row = {"first": first, "second": second, "first_wins": of[1], "second_wins": of[0], "ties": of[0.5]}
        rows.append(row | {"first_rate": wilson_interval(of[1], of[1] + of[0])._asdict()})
    return rows


def bradley_terry(counts: Mapping[Outcome, int], weights: np.ndarray) -> dict[str, np.ndarray]:
    """Return each model's rating (R,) where outcomes, the keys of `counts`, were seen `weights` (R, K) times.

    The maximum of the likelihood in which i beats j with probability sigmoid(s_i - s_j) (R. A. Bradley and
    M. E. Terry 1952), by Newton's method on the log-strengths s.
    """
    names = sorted({name for outcome in counts for name in outcome[:2]})
    # (K, M): 1 for the first, -1 for the second, so that a product with it is s_i - s_j
    contrast = np.array([[(o.first == n) - (o.second == n) for n in names] for o in counts], dtype=float)
    scores = np.array([outcome.score for outcome in counts])
    # The draws against an average model, of strength 0, are rows like any other.
    contrast = np.vstack([contrast, np.eye(len(names))])
    scores = np.append(scores, np.full(len(names), 0.5))
    weights = np.hstack([weights, np.full((len(weights), len(names)), PRIOR_DRAWS)])
    strength = np.zeros((len(weights), len(names)))
    for _ in range(_MAX_ROUNDS):
        wins = 0.5 * (1 + np.tanh(0.5 * strength @ contrast.T))  # (R, K + M), a sigmoid
        gradient = (weights * (scores - wins)) @ contrast
        curvature = contrast.T @ ((weights * wins * (1 - wins))[..., None] * contrast)
        step = np.linalg.solve(curvature, gradient[..., None])[..., 0].clip(-_LARGEST_STEP, _LARGEST_STEP)
        strength += step
        if np.abs(step).max() < _SMALLEST_CHANGE:
            break
    return dict(zip(names, MEAN_RATING + ELO_PER_FACTOR_10 / math.log(10.0) * strength.T, strict=True))


def ratings(outcomes: Sequence[Outcome], *, seed: int = 0) -> list[dict[str, Any]]:
    """Return a row for each model, the strongest first: its rating on the Elo scale, with percentiles `low`
    and `high` (95 %) of resamples.

    A resample draws as many judgements as there are, with replacement; the same seed gives the same
    intervals.
    """
    if not outcomes:
        return []
    counts = Counter(outcomes)
    seen = np.array([list(counts.values())], dtype=float)
    generator = np.random.default_rng(seed)
    resamples = generator.multinomial(len(outcomes), seen[0] / len(outcomes), size=_NUM_RESAMPLES)  # (R, K)
    rows = []
    for name, (rating, *others) in bradley_terry(counts, np.vstack([seen, resamples])).items():
        low, high = np.quantile(others, [0.025, 0.975]).tolist()
        num_judgements = sum(name in outcome[:2] for outcome in outcomes)
        row = {"model": name, "rating": float(rating), "low": low, "high": high}
        rows.append(row | {"num_judgements": num_judgements})
    return sorted(rows, key=lambda row: -row["rating"])
