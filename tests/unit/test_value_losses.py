"""The critic's loss and its explained variance: by hand, against float64 loops and wrong forms.

O25 and the like in a docstring are rows of the seeds.
"""

import functools
import math

import pytest
import torch
from response_batches import PADDING, fill, random_batch
from right_or_wrong import close, forms, judge, play_ranks

from step3_ppo.ppo_math import ValueLossTerms, explained_variance, value_loss_terms

# --- value_loss_terms ---


def loop_value_loss(new, old, returns, mask, clip_range, delta=math.inf):
    def loss_of(error):
        return 0.5 * error**2 if abs(error) <= delta else delta * (abs(error) - 0.5 * delta)

    loss = torch.zeros(new.shape, dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        v, v_old, target = (x[i, t].item() for x in (new, old, returns))
        bounded = min(max(v, v_old - clip_range), v_old + clip_range) if clip_range else v
        loss[i, t] = max(loss_of(v - target), loss_of(bounded - target))
    return loss


def plain_value(*, half=0.5, most=torch.maximum, around="old", detach=True):
    def form(new, old, returns, mask, *, clip_range):
        old, returns = (old.detach(), returns.detach()) if detach else (old, returns)
        centre = old if around == "old" else returns
        bounded = torch.minimum(torch.maximum(new, centre - clip_range), centre + clip_range)
        squares, bounded_squares = (new - returns).square(), (bounded - returns).square()
        loss = torch.where(mask, half * most(squares, bounded_squares), 0.0)
        return ValueLossTerms(loss, mask & (bounded_squares > squares))

    return form


VALUE_FORMS = forms(
    value_loss_terms,
    not_halved=plain_value(half=1.0),
    smaller_square=plain_value(most=torch.minimum),
    only_the_clipped_square=plain_value(most=lambda squares, bounded_squares: bounded_squares),
    clipped_around_the_return=plain_value(around="returns"),
)


@VALUE_FORMS
def test_value_loss_by_hand(form, is_right):
    """O25, O26: half the larger square, cliprange_value 0.2. O28: the new value against the old return."""

    def check(form):
        new = torch.tensor([[1.0, 2.0, 2.0, 0.0, 5.0]])
        old = torch.tensor([[1.1, 1.0, 1.0, 1.0, 0.0]])
        returns = torch.tensor([[3.0, 3.0, 0.0, 3.0, 0.0]])
        mask = torch.tensor([[True, True, True, True, False]])
        terms = form(new, old, returns, mask, clip_range=0.2)
        # inside: (1 - 3)^2 / 2; towards the return too far: (1.2 - 3)^2 / 2;
        # away from it: 2^2 / 2 and (0 - 3)^2 / 2
        close(terms.loss, [[2.0, 1.62, 2.0, 4.5, 0.0]])
        assert terms.is_clipped.tolist() == [[False, True, False, False, False]]

    judge(check, form, is_right)


@VALUE_FORMS
def test_value_loss_and_gradient_equal_float64_loops(form, is_right):
    def check(form):
        new, old, returns, mask = random_batch(3)
        leaf = new.clone().requires_grad_()
        terms = form(leaf, old, returns, mask, clip_range=0.3)
        close(terms.loss, loop_value_loss(new, old, returns, mask, 0.3), atol=2e-6)
        terms.loss.sum().backward()
        step = 1e-6
        ahead = loop_value_loss(new.double() + step, old, returns, mask, 0.3)
        behind = loop_value_loss(new.double() - step, old, returns, mask, 0.3)
        close(leaf.grad, (ahead - behind) / (2 * step), atol=1e-5)

    judge(check, form, is_right)


def huber(errors, delta):
    return torch.where(errors.abs() <= delta, 0.5 * errors**2, delta * (errors.abs() - 0.5 * delta))


def plain_huber(*, scale=1.0, of_clipped=huber, inner=0.5):
    """Return the textbook form, from which one thing at a time is made wrong."""

    def form(new, old, returns, mask, *, clip_range, kind, huber_delta=1.0):
        errors = new - returns
        whole = torch.where(errors.abs() <= huber_delta, inner * errors**2, huber(errors, huber_delta))
        bounded = of_clipped(old + (new - old).clamp(-clip_range, clip_range) - returns, huber_delta)
        loss = torch.where(mask, scale * torch.maximum(whole, bounded), 0.0)
        return ValueLossTerms(loss, mask & (bounded > whole))

    return form


HUBER_FORMS = forms(
    value_loss_terms,
    squares=lambda *tensors, kind, huber_delta=1.0, **options: value_loss_terms(*tensors, **options),
    absolute_errors=plain_huber(of_clipped=lambda errors, delta: errors.abs()),
    squares_of_what_is_clipped=plain_huber(of_clipped=lambda errors, delta: 0.5 * errors**2),
    not_halved=plain_huber(scale=2.0),
    whole_square_inside=plain_huber(inner=1.0),
    ignores_delta=lambda *tensors, huber_delta=1.0, **options: value_loss_terms(*tensors, **options),
)


@HUBER_FORMS
def test_huber_value_loss_by_hand(form, is_right):
    """O25: value_loss mse or huber."""

    def check(form):
        new = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.5, 5.0]])
        old = torch.tensor([[1.1, 1.0, 1.0, 1.0, 2.5, 0.0]])
        returns = torch.tensor([[3.0, 3.0, 0.0, 3.0, 3.0, 0.0]])
        mask = torch.tensor([[True, True, True, True, True, False]])
        terms = form(new, old, returns, mask, clip_range=0.2, kind="huber")
        # |e| - 1/2 above 1: 2 -> 1.5; 1 and, clipped to 1.2, 1.8 -> 1.3; 2 -> 1.5; 3 -> 2.5; 0.5 -> 0.25 / 2
        close(terms.loss, [[1.5, 1.3, 1.5, 2.5, 0.125, 0.0]])
        assert terms.is_clipped.tolist() == [[False, True, False, False, False, False]]
        # delta 2: 2 (|e| - 1) above 2: 2^2 / 2; 1.8^2 / 2; 2^2 / 2; 2 * 2; 0.5^2 / 2
        terms = form(new, old, returns, mask, clip_range=0.2, kind="huber", huber_delta=2.0)
        close(terms.loss, [[2.0, 1.62, 2.0, 4.0, 0.125, 0.0]])

    judge(check, form, is_right)


@HUBER_FORMS
def test_huber_value_loss_and_gradient_equal_float64_loops(form, is_right):
    def check(form):
        new, old, returns, mask = random_batch(3)
        for delta in (0.7, 1.0):
            leaf = new.clone().requires_grad_()
            terms = form(leaf, old, returns, mask, clip_range=0.3, kind="huber", huber_delta=delta)
            close(terms.loss, loop_value_loss(new, old, returns, mask, 0.3, delta), atol=2e-6)
            terms.loss.sum().backward()
            ahead = loop_value_loss(new.double() + 1e-6, old, returns, mask, 0.3, delta)
            behind = loop_value_loss(new.double() - 1e-6, old, returns, mask, 0.3, delta)
            close(leaf.grad, (ahead - behind) / 2e-6, atol=1e-5)

    judge(check, form, is_right)


def test_huber_is_the_square_for_small_errors_and_does_not_read_padding():
    new, old, returns, mask = (x.clamp(-0.4, 0.4) if x.is_floating_point() else x for x in random_batch(3))
    square = value_loss_terms(new, old, returns, mask, clip_range=0.2)
    for padding in PADDING:
        filled = [fill(x, mask, padding) for x in (new, old, returns)]
        leaf = filled[0].requires_grad_()
        terms = value_loss_terms(*filled, mask, clip_range=0.2, kind="huber")
        assert all(map(torch.equal, terms, square))
        terms.loss.sum().backward()
        assert leaf.grad.isfinite().all() and leaf.grad[~mask].eq(0).all()


def test_an_unknown_value_loss_is_named():
    new, old, returns, mask = random_batch(3)
    with pytest.raises(ValueError, match="--value_loss mae is unknown; use mse or huber"):
        value_loss_terms(new, old, returns, mask, clip_range=0.2, kind="mae")


def test_value_losses_of_bf16_inputs_are_fp32():
    """O27."""
    new, old, returns, mask = random_batch(3)
    for kind in ("mse", "huber"):
        halves = (x.bfloat16() for x in (new, old, returns))
        terms = value_loss_terms(*halves, mask, clip_range=0.2, kind=kind)
        assert terms.loss.dtype == torch.float32 and terms.is_clipped.dtype == torch.bool


@pytest.mark.parametrize("clip_range", [0, None])
def test_value_loss_without_clipping_is_half_the_square(clip_range):
    new, old, returns, mask = random_batch(3)
    terms = value_loss_terms(new, old, returns, mask, clip_range=clip_range)
    close(terms.loss, loop_value_loss(new, old, returns, mask, None), atol=2e-6)
    assert not terms.is_clipped.any()


@forms(
    value_loss_terms,
    times_mask=lambda new, old, returns, mask, *, clip_range: ValueLossTerms(
        *(x * mask for x in value_loss_terms(new, old, returns, torch.ones_like(mask), clip_range=clip_range))
    ),
)
def test_value_loss_and_its_gradient_do_not_read_padding(form, is_right):
    def check(form):
        new, old, returns, mask = random_batch(3)
        leaf = new.clone().requires_grad_()
        expected = value_loss_terms(leaf, old, returns, mask, clip_range=0.2)
        expected.loss.sum().backward()
        for padding in PADDING:
            filled = [fill(x, mask, padding) for x in (new, old, returns)]
            filled_leaf = filled[0].requires_grad_()
            terms = form(*filled, mask, clip_range=0.2)
            assert all(map(torch.equal, terms, expected))
            terms.loss.sum().backward()
            assert torch.equal(filled_leaf.grad, leaf.grad) and leaf.grad[~mask].eq(0).all()

    judge(check, form, is_right)


@forms(value_loss_terms, not_detached=plain_value(detach=False))
def test_only_new_values_get_a_gradient(form, is_right):
    def check(form):
        new, old, returns, mask = random_batch(3)
        leaves = [x.requires_grad_() for x in (new, old, returns)]
        form(*leaves, mask, clip_range=0.2).loss.sum().backward()
        assert new.grad is not None and old.grad is None and returns.grad is None

    judge(check, form, is_right)


def test_a_value_inside_its_range_is_not_counted_as_clipped_by_rounding():
    old = torch.linspace(1, 1000, 5000)[None]
    new = old + 0.01 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    terms = value_loss_terms(new, old, torch.zeros_like(old), torch.ones_like(old).bool(), clip_range=0.2)
    assert not terms.is_clipped.any()


# --- explained_variance ---


EXPLAINED_FORMS = forms(
    explained_variance,
    padded_positions=lambda values, returns, mask: explained_variance(values, returns, torch.ones_like(mask)),
    mean_square_error=lambda values, returns, mask: (
        1 - (returns - values)[mask].square().mean() / returns[mask].var(correction=0)
    ),
    over_variance_of_values=lambda values, returns, mask: (
        1 - (returns - values)[mask].var(correction=0) / values[mask].var(correction=0)
    ),
    one_pass=lambda values, returns, mask: (
        1
        - ((returns - values)[mask].square().mean() - (returns - values)[mask].mean().square())
        / (returns[mask].square().mean() - returns[mask].mean().square())
    ),
)


@EXPLAINED_FORMS
def test_explained_variance_by_hand(form, is_right):
    def check(form):
        # returns 1 3 5 7: variance 5; errors 1 1 1 3: mean 1.5, variance (3 * 0.25 + 2.25) / 4 = 0.75
        returns = 10007 + torch.tensor([[1.0, 3.0, 99.0], [5.0, 7.0, -99.0]])
        values = 10007 + torch.tensor([[0.0, 2.0, 0.0], [4.0, 4.0, 0.0]])
        mask = torch.tensor([[True, True, False], [True, True, False]])
        close(form(values, returns, mask), 1 - 0.75 / 5)

    judge(check, form, is_right)


def test_explained_variance_of_perfect_useless_and_undefined():
    values, returns, mask = random_batch(2)
    assert explained_variance(returns, returns, mask) == 1
    close(explained_variance(torch.ones_like(returns), returns, mask), 0.0)
    assert explained_variance(values, torch.full_like(returns, 0.1), mask) == 0
    assert explained_variance(values, returns, torch.zeros_like(mask)) == 0
    expected = explained_variance(values, returns, mask)
    for padding in PADDING:
        result = explained_variance(fill(values, mask, padding), fill(returns, mask, padding), mask)
        assert torch.equal(result, expected) and result.dtype == torch.float32


def test_explained_variance_over_ranks_is_that_of_the_whole():
    values, returns, mask = random_batch(2)
    shares = zip(*(x.split([2, 2, 1]) for x in (values, returns, mask)), strict=True)
    for result in play_ranks([functools.partial(explained_variance, *share) for share in shares]):
        close(result, explained_variance(values, returns, mask))
