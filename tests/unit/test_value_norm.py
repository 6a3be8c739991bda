"""Value normalisation: by hand, against running sums in float64 and wrong forms. R56 in the seeds' rows."""

import json
import math

import pytest
import torch
from response_batches import PADDING, fill, random_batch
from right_or_wrong import close, forms, judge

from step3_ppo.value_norm import ValueNormaliser

EVERYTHING = torch.ones(2).bool()


class Biased(ValueNormaliser):
    """The exponential average as it begins: as if there had been returns of 0 before."""

    def update(self, returns, mask):
        self.weight = self.weight or 1.0
        super().update(returns, mask)


class MeanOfMeans(ValueNormaliser):
    """Every update counts the same, however many tokens it has."""

    def update(self, returns, mask):
        self.weight *= int(mask.sum())
        super().update(returns, mask)
        self.weight /= int(mask.sum())


class OnlyWithinBatches(ValueNormaliser):
    """Average the variances of the batches, and forget how far their means are apart."""

    def update(self, returns, mask):
        super().update(returns + (self.mean - returns[mask].mean() if self.weight else 0), mask)


class ReadsPadding(ValueNormaliser):
    def update(self, returns, mask):
        super().update(returns, torch.ones_like(mask))


class OnePass:
    """Running means of x and x^2 in fp32, whose difference has lost its digits."""

    def __init__(self, kind, beta=0.5, eps=1e-5):
        self.beta, self.eps, self.weight, self.means = beta, eps, 0.0, torch.zeros(2)

    def update(self, returns, mask):
        kept = returns[mask]
        batch = torch.stack([kept.mean(), kept.square().mean()])
        self.means = self.beta * self.means + (1 - self.beta) * batch
        self.weight = self.beta * self.weight + 1 - self.beta

    def normalise(self, x):
        mean, square = self.means / self.weight
        return (x - mean) / (square - mean.square()).clamp(min=self.eps).sqrt()


NORMALISER_FORMS = forms(
    ValueNormaliser,
    biased=Biased,
    mean_of_means=MeanOfMeans,
    only_within_batches=OnlyWithinBatches,
    reads_padding=ReadsPadding,
)


@NORMALISER_FORMS
def test_both_kinds_by_hand(form, is_right):
    """R56: value_norm exp and ma."""

    def check(form):
        first = torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[True, True, False]])
        second = torch.tensor([[6.0, 6.0, 9.0, 9.0]]), torch.tensor([[True, True, True, True]])
        exp, ma = form("exp", 0.5), form("ma", 0.5)
        for normaliser in (exp, ma):
            normaliser.update(*first)  # debiased: mean 2, variance 1, as the batch has
            close(normaliser.normalise(torch.tensor([4.0])), [2.0])
            normaliser.update(*second)  # of itself: mean 7.5, mean of squares 58.5
        # weights 1/4 and 1/2 of 3/4: mean (2 + 2 * 7.5) / 3 = 17/3, squares (5 + 2 * 58.5) / 3 = 122/3
        assert exp.mean == pytest.approx(17 / 3, abs=1e-9)
        assert exp.variance == pytest.approx(122 / 3 - (17 / 3) ** 2, abs=1e-9)
        # 1, 3, 6, 6, 9, 9: mean 34/6, squares 244/6
        assert ma.mean == pytest.approx(34 / 6, abs=1e-9)
        assert ma.variance == pytest.approx(244 / 6 - (34 / 6) ** 2, abs=1e-9)

    judge(check, form, is_right)


@NORMALISER_FORMS
def test_both_kinds_equal_running_sums_in_float64(form, is_right):
    def check(form):
        exp, ma = form("exp", 0.9), form("ma")
        sums, everything = [0.0, 0.0, 0.0], []
        for seed in range(6):
            returns, mask = random_batch(1, lengths=[9 - seed, 1, 0, 3 * seed % 9, 1], seed=seed)
            returns = 1 + seed + 2 * returns
            kept = returns[mask].double().tolist()
            batch = (1.0, math.fsum(kept) / len(kept), math.fsum(x * x for x in kept) / len(kept))
            sums = [0.9 * s + 0.1 * b for s, b in zip(sums, batch, strict=True)]
            everything += kept
            exp.update(returns, mask)
            ma.update(returns, mask)
            means = [math.fsum(x**power for x in everything) / len(everything) for power in (1, 2)]
            for normaliser, (mean, square) in ((exp, [s / sums[0] for s in sums[1:]]), (ma, means)):
                assert normaliser.mean == pytest.approx(mean, abs=1e-9)
                assert normaliser.variance == pytest.approx(square - mean**2, abs=1e-9)
                expected = (returns.double() - mean) / math.sqrt(square - mean**2)
                close(normaliser.normalise(returns), expected)

    judge(check, form, is_right)


@forms(ValueNormaliser, one_pass=OnePass)
def test_returns_far_from_0_keep_their_digits(form, is_right):
    def check(form):
        normaliser = form("exp", 0.5)
        returns = torch.tensor([5000.0, 5000.25, 5000.5])
        for _ in range(3):
            normaliser.update(returns, torch.ones(3).bool())
        close(normaliser.normalise(returns), [-math.sqrt(1.5), 0.0, math.sqrt(1.5)])

    judge(check, form, is_right)


@pytest.mark.parametrize("kind", ["exp", "ma"])
def test_before_an_update_nothing_changes_and_afterwards_both_ways_are_inverse(kind):
    normaliser = ValueNormaliser(kind)
    values, mask = random_batch(1)
    assert torch.equal(normaliser.normalise(values), values)
    assert torch.equal(normaliser.denormalise(values), values)
    normaliser.update(values, torch.zeros_like(mask))  # nothing counts
    assert normaliser.weight == 0
    normaliser.update(3 + 7 * values, mask)
    close(normaliser.denormalise(normaliser.normalise(values)), values)
    normalised = normaliser.normalise(3 + 7 * values)
    assert normalised.dtype == normaliser.denormalise(values.bfloat16()).dtype == torch.float32
    assert abs(float(normalised[mask].mean())) < 1e-6
    assert abs(float(normalised[mask].std(correction=0)) - 1) < 1e-6


def test_equal_returns_have_the_smallest_variance():
    normaliser = ValueNormaliser("ma", eps=0.04)
    normaliser.update(torch.full((7,), 0.1), torch.ones(7).bool())
    assert normaliser.std == pytest.approx(0.2)
    close(normaliser.normalise(torch.tensor([0.1, 0.3])), [0.0, 1.0])


def test_padding_is_not_read():
    returns, mask = random_batch(1)
    states = []
    for padding in PADDING:
        normaliser = ValueNormaliser("exp")
        normaliser.update(fill(returns, mask, padding), mask)
        states.append(normaliser.state_dict())
    assert all(state == states[0] for state in states)


@pytest.mark.parametrize("kind", ["exp", "ma"])
def test_a_saved_normaliser_goes_on_where_it_was(kind):
    """R56: every stateful one is checkpointed."""
    whole, resumed = ValueNormaliser(kind, 0.9), ValueNormaliser(kind, 0.9)
    batches = [random_batch(1, seed=seed) for seed in range(3)]
    for returns, mask in batches[:2]:
        whole.update(returns, mask)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for normaliser in (whole, resumed):
        normaliser.update(*batches[2])
    assert resumed.state_dict() == whole.state_dict() and resumed.weight > 0


def test_what_cannot_be_is_named():
    for options, message in (
        ({"kind": "none"}, "--value_norm none is unknown"),
        ({"beta": 1.0}, "--value_norm_beta 1.0 must be at least 0 and below 1"),
        ({"beta": -0.1}, "--value_norm_beta -0.1"),
        ({"eps": 0.0}, "eps 0.0 must be above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ValueNormaliser(**{"kind": "exp"} | options)
    normaliser = ValueNormaliser("exp")
    with pytest.raises(ValueError, match="not finite"):
        normaliser.update(torch.tensor([1.0, math.nan]), EVERYTHING)
    assert normaliser.weight == 0
