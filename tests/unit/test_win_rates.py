"""Win rates by hand, and the wrong forms that must differ."""

import math

import pytest

from common.models.tensor_ops import wilson_interval
from serving.judgement_store import Pair, win_rates


def judged(first: str, second: str, choices: str) -> list[Pair]:
    """Judged pairs of two models: a, b, or t for a tie, x for both bad."""
    names = {"t": "tie", "x": "both_bad"}
    return [Pair("", (), "typed", first, second, choice=names.get(c, c)) for c in choices]


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
    found = win_rates(judged("m", "n", "at") + judged("n", "m", "abx") + judged("o", "n", "aa"))
    rates = {"m": (2, 3), "n": (1, 5), "o": (2, 2), "m against n": (2, 3), "n against o": (0, 2)}
    rows = [
        {"name": name, "won": won, "lost": decided - won, "neither": neither}
        | {"rate": wilson_interval(won, decided)._asdict()}
        for (name, (won, decided)), neither in zip(rates.items(), (2, 2, 0, 2, 0), strict=True)
    ]
    m, n, o, *of_two = rows
    assert found == {"models": [o, m, n], "duels": of_two}
    assert win_rates([]) == {"models": [], "duels": []}
