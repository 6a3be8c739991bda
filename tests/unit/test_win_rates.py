"""Win rates and ratings by hand, and the wrong forms that must differ."""

import math

import numpy
import pytest

from serving import win_rates
from serving.win_rates import Outcome, duels, ratings, wilson_interval

A_WINS, B_WINS, TIE = Outcome("a", "b", 1.0), Outcome("a", "b", 0.0), Outcome("a", "b", 0.5)


MANY = 10**7


def bradley_terry(counts: dict[Outcome, int]) -> dict[str, float]:
    found = win_rates.bradley_terry(counts, numpy.array([list(counts.values())], dtype=float))
    return {name: float(rating) for name, [rating] in found.items()}


def test_wilson_by_hand():
    """8 of 10, z = 1.96: centre (0.8 + 0.19208) / 1.38415, half 1.96 / 1.38415 x sqrt(0.016 + 0.0096037)."""
    rate = wilson_interval(8, 10)
    assert rate.value == 0.8
    assert rate.low == pytest.approx(0.4901625, abs=1e-5) and rate.high == pytest.approx(0.9433178, abs=1e-5)
    normal = 0.8 + 1.96 * math.sqrt(0.8 * 0.2 / 10)
    assert normal > 1 > rate.high, "the plain normal interval leaves the unit interval"


@pytest.mark.parametrize(
    ("wins", "total", "low", "high"), [(0, 10, 0.0, 0.27753), (10, 10, 0.72247, 1.0), (1, 1, 0.20655, 1.0)]
)
def test_wilson_at_the_ends(wins, total, low, high):
    rate = wilson_interval(wins, total)
    assert wilson_interval(0, 0) == (None, 0.0, 1.0), "nothing counted is no share"
    assert (rate.low, rate.high) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_a_pair_counts_in_either_order_and_ties_are_not_decided():
    [row] = duels([A_WINS, Outcome("b", "a", 0.0), Outcome("b", "a", 1.0), TIE, Outcome("b", "a", 0.5)])
    rate = wilson_interval(2, 3)._asdict()
    expected = {"first": "a", "second": "b", "first_wins": 2, "second_wins": 1, "ties": 2, "first_rate": rate}
    assert row == expected
    rows = duels([Outcome("c", "a", 1), A_WINS])
    assert [(row["first"], row["second"]) for row in rows] == [("a", "b"), ("a", "c")]


def test_three_to_one_is_191_points():
    """p_a / p_b = 3 is the maximum: 400 log10 3 = 190.849; so many judgements outweigh the prior."""
    found = bradley_terry({A_WINS: 3 * MANY, B_WINS: MANY})
    assert found["a"] - found["b"] == pytest.approx(190.8485, abs=1e-3)
    assert found["a"] + found["b"] == pytest.approx(2000)
    halves = bradley_terry({A_WINS: 2 * MANY, TIE: 2 * MANY})
    assert halves == pytest.approx(found), "a tie is half a win of each"


def test_strength_goes_through_a_third_model():
    """a : b = 2 : 1 and b : c = 4 : 1, who never met: a beats c at 8 : 1."""
    counts = {A_WINS: 2 * MANY, B_WINS: MANY, Outcome("b", "c", 1): 4 * MANY, Outcome("c", "b", 1): MANY}
    found = bradley_terry(counts)
    assert found["a"] - found["c"] == pytest.approx(400 * math.log10(8), abs=1e-2)


def test_with_the_prior_a_model_that_never_lost_has_a_rating():
    """By symmetry p_b = 1 / p_a = 1 / x; expected wins: 3 + 1/2 = 3 x^2 / (x^2 + 1) + x / (x + 1)."""
    found = bradley_terry({A_WINS: 3})
    x = 10 ** ((found["a"] - 1000) / 400)
    assert 3 * x**2 / (x**2 + 1) + x / (x + 1) == pytest.approx(3.5, abs=1e-6)
    assert found["b"] == pytest.approx(2000 - found["a"]) and 1000 < found["a"] < 1400


def test_ratings_come_with_intervals_that_narrow():
    some = [A_WINS] * 6 + [B_WINS] * 4
    few, many = some, some * 30
    widths = []
    for outcomes in (few, many):
        best, worst = ratings(outcomes)
        assert (best["model"], worst["model"]) == ("a", "b") and best["num_judgements"] == len(outcomes)
        assert best["low"] < best["rating"] < best["high"]
        widths.append(best["high"] - best["low"])
    assert widths[1] < widths[0] / 3, "30 times as many judgements: about 5 times narrower"
    assert ratings(many) == ratings(many) != ratings(many, seed=1)
    best, worst = ratings([A_WINS] * 5)
    assert best["low"] == pytest.approx(best["rating"]) == best["high"], "one outcome, so no width"
