"""Losses of PPO and the critic's explained variance: by hand, against float64 loops and wrong forms."""

import functools
import math

import pytest
import torch
from response_batches import PADDING, fill, random_batch
from right_or_wrong import close, forms, judge, play_ranks

from step3_ppo.ppo_math import (
    PolicyLossTerms,
    ValueLossTerms,
    explained_variance,
    kl_estimate,
    policy_loss_terms,
    value_loss_terms,
)

# --- policy_loss_terms ---


def loop_policy_loss(new, old, advantages, mask, low, high, dual_clip=None):
    loss = torch.zeros(new.shape, dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        advantage = advantages[i, t].item()
        ratio = math.exp(new[i, t].item() - old[i, t].item())
        loss[i, t] = max(-advantage * ratio, -advantage * min(max(ratio, low), high))
        if dual_clip and advantage < 0:
            loss[i, t] = min(loss[i, t].item(), -advantage * dual_clip)
    return loss


def plain_policy(ratio_of, *, least=torch.maximum, clamp=True, sign=-1, detach=True):
    """Return the textbook form, from which one thing at a time is made wrong."""

    def form(new, old, advantages, mask, *, clip_range):
        ratio = ratio_of(new, old if not detach else old.detach())
        advantages = advantages if not detach else advantages.detach()
        bounded = ratio.clamp(1 - clip_range, 1 + clip_range) if clamp else ratio
        loss = torch.where(mask, least(sign * advantages * ratio, sign * advantages * bounded), 0.0)
        is_clipped = mask & ((ratio - 1).abs() > clip_range)
        return PolicyLossTerms(
            loss, torch.where(mask, ratio, 0.0).detach(), is_clipped, torch.zeros_like(loss)
        )

    return form


def exp_ratio(new, old):
    return (new - old).exp()


POLICY_FORMS = forms(
    policy_loss_terms,
    ratio_without_exp=plain_policy(lambda new, old: new - old),
    ratio_upside_down=plain_policy(lambda new, old: (old - new).exp()),
    optimistic_bound=plain_policy(exp_ratio, least=torch.minimum),
    not_clipped=plain_policy(exp_ratio, clamp=False),
    sign=plain_policy(exp_ratio, sign=1),
)


@POLICY_FORMS
def test_policy_loss_by_hand(form, is_right):
    def check(form):
        ratios = torch.tensor([[1.0, 1.5, 0.5, 1.1], [1.5, 0.5, 1.0, 1.0]])
        advantages = torch.tensor([[2.0, 2.0, 2.0, -3.0], [-1.0, -1.0, 4.0, 4.0]])
        mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
        old = torch.full((2, 4), -2.0)
        terms = form(old + ratios.log(), old, advantages, mask, clip_range=0.2)
        expected = [
            [
                -2.0,
                -2.4,
                -1.0,
                3.3,
            ],  # -2 * 1; -2 * 1.2, at the bound; -2 * 0.5: worse, so not clipped; 3 * 1.1
            [1.5, 0.8, -4.0, 0.0],  # 1 * 1.5: worse, so not clipped; 1 * 0.8, at the bound; -4 * 1; padding
        ]
        close(terms.loss, expected)
        close(terms.ratio, [[1.0, 1.5, 0.5, 1.1], [1.5, 0.5, 1.0, 0.0]])
        assert terms.is_clipped.tolist() == [[False, True, False, False], [False, True, False, False]]
        # k3 of KL(old || new): ratio - 1 - log ratio
        close(terms.approx_kl[0], [0.0, 0.5 - math.log(1.5), -0.5 + math.log(2), 0.1 - math.log(1.1)])
        assert terms.approx_kl[1, 3] == 0

    judge(check, form, is_right)


@POLICY_FORMS
def test_policy_loss_equals_a_float64_loop(form, is_right):
    def check(form):
        new, old, advantages, mask = random_batch(3)
        terms = form(new / 3, old / 3, advantages, mask, clip_range=0.2)
        close(terms.loss, loop_policy_loss(new / 3, old / 3, advantages, mask, 0.8, 1.2))

    judge(check, form, is_right)


def test_policy_loss_with_a_higher_upper_bound_and_a_bounded_negative_side():
    new, old, advantages, mask = random_batch(3)
    terms = policy_loss_terms(new, old, advantages, mask, clip_range=0.2, clip_range_high=0.28, dual_clip=3.0)
    close(terms.loss, loop_policy_loss(new, old, advantages, mask, 0.8, 1.28, 3.0))
    # 1.25 is inside a range to 1.28; 1.3 is not; -A * 4 is bounded to 3
    new = torch.tensor([[1.25, 1.3, 4.0]]).log().requires_grad_()
    terms = policy_loss_terms(
        new,
        torch.zeros(1, 3),
        torch.tensor([[1.0, 1.0, -1.0]]),
        torch.ones(1, 3).bool(),
        clip_range=0.2,
        clip_range_high=0.28,
        dual_clip=3.0,
    )
    terms.loss.sum().backward()
    close(terms.loss, [[-1.25, -1.28, 3.0]])
    close(new.grad, [[-1.25, 0.0, 0.0]])
    assert terms.is_clipped.tolist() == [[False, True, True]]


@POLICY_FORMS
def test_policy_gradient_is_minus_advantage_times_ratio_and_zero_where_clipped(form, is_right):
    def check(form):
        ratios = torch.tensor([[1.0, 1.5, 0.5, 1.5, 0.5, 1.1]])
        advantages = torch.tensor([[2.0, 2.0, 2.0, -2.0, -2.0, -2.0]])
        new = ratios.log().requires_grad_()
        terms = form(
            new, torch.zeros_like(ratios), advantages, torch.ones_like(ratios).bool(), clip_range=0.2
        )
        terms.loss.sum().backward()
        close(new.grad, [[-2.0, 0.0, -1.0, 3.0, 0.0, 2.2]])

    judge(check, form, is_right)


def exact_ratios(*ratios: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities whose fp32 ratio is exactly these."""
    logs = []
    for ratio in ratios:
        wanted = torch.tensor(ratio)
        near = wanted.log().view(torch.int32) + torch.arange(-8, 9, dtype=torch.int32)
        candidates = near.view(torch.float32)
        logs.append(candidates[(candidates.exp() - wanted).abs().argmin()])
    return torch.stack(logs)[None], torch.zeros(1, len(ratios))


@forms(policy_loss_terms, max_and_clamp=plain_policy(exp_ratio))
def test_a_ratio_at_its_bound_gets_no_gradient(form, is_right):
    def check(form):
        new, old = exact_ratios(1.25, 0.75, 1.25, 0.75)
        assert new.exp().tolist() == [[1.25, 0.75, 1.25, 0.75]]
        new.requires_grad_()
        advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0]])  # the last two would lead back inside
        terms = form(new, old, advantages, torch.ones(1, 4).bool(), clip_range=0.25)
        terms.loss.sum().backward()
        close(new.grad, [[0.0, 0.0, 1.25, -0.75]])

    judge(check, form, is_right)


def leaks_padding(new, old, advantages, mask, *, clip_range):
    return policy_loss_terms(new, old, advantages, torch.ones_like(mask), clip_range=clip_range)


@forms(
    policy_loss_terms,
    all_positions=leaks_padding,
    times_mask=lambda new, old, advantages, mask, *, clip_range: PolicyLossTerms(
        *(x * mask for x in leaks_padding(new, old, advantages, mask, clip_range=clip_range))
    ),
)
def test_policy_loss_and_its_gradient_do_not_read_padding(form, is_right):
    def check(form):
        new, old, advantages, mask = random_batch(3)
        leaf = new.clone().requires_grad_()
        expected = policy_loss_terms(leaf, old, advantages, mask, clip_range=0.2)
        expected.loss.sum().backward()
        for padding in PADDING:
            filled = [fill(x, mask, padding) for x in (new, old, advantages)]
            filled_leaf = filled[0].requires_grad_()
            terms = form(*filled, mask, clip_range=0.2)
            assert all(map(torch.equal, terms, expected))
            terms.loss.sum().backward()
            assert torch.equal(filled_leaf.grad, leaf.grad) and leaf.grad[~mask].eq(0).all()

    judge(check, form, is_right)


@forms(policy_loss_terms, not_detached=plain_policy(exp_ratio, detach=False))
def test_only_new_logprobs_get_a_gradient(form, is_right):
    def check(form):
        new, old, advantages, mask = random_batch(3)
        leaves = [x.requires_grad_() for x in (new, old, advantages)]
        terms = form(*leaves, mask, clip_range=0.2)
        terms.loss.sum().backward()
        assert new.grad is not None and old.grad is None and advantages.grad is None
        assert not terms.ratio.requires_grad and not terms.approx_kl.requires_grad

    judge(check, form, is_right)


@forms(policy_loss_terms, max_and_clamp=plain_policy(exp_ratio))
def test_an_overflowing_ratio_that_is_clipped_has_a_finite_gradient(form, is_right):
    def check(form):
        new = torch.tensor([[200.0, 0.0]], requires_grad=True)  # exp(200) is infinite in fp32
        terms = form(new, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool(), clip_range=0.2)
        terms.loss.sum().backward()
        close(terms.loss, [[-1.2, -1.0]])
        close(new.grad, [[0.0, -1.0]])

    judge(check, form, is_right)


def test_losses_of_bf16_inputs_are_fp32():
    new, old, advantages, mask = random_batch(3)
    policy = policy_loss_terms(new.bfloat16(), old.bfloat16(), advantages.bfloat16(), mask, clip_range=0.2)
    value = value_loss_terms(new.bfloat16(), old.bfloat16(), advantages.bfloat16(), mask, clip_range=0.2)
    floats = (policy.loss, policy.ratio, policy.approx_kl, value.loss, kl_estimate(new.bfloat16(), old, "k3"))
    assert all(x.dtype == torch.float32 for x in floats)
    assert policy.is_clipped.dtype == value.is_clipped.dtype == torch.bool


# --- value_loss_terms ---


def loop_value_loss(new, old, returns, mask, clip_range):
    loss = torch.zeros(new.shape, dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        v, v_old, target = (x[i, t].item() for x in (new, old, returns))
        bounded = min(max(v, v_old - clip_range), v_old + clip_range) if clip_range else v
        loss[i, t] = 0.5 * max((v - target) ** 2, (bounded - target) ** 2)
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
