"""Rewards, advantages, returns, groups and KL: by hand, against float64 loops and wrong forms.

O4 and the like in a docstring are rows of the seeds.
"""

import math
from itertools import product

import pytest
import torch
from right_or_wrong import close, forms, judge
from rollout_batches import PADDING, fill, random_batch

from common.models.tensor_ops import whiten
from step3_ppo.ppo_math import (
    KLController,
    constant_groups,
    discounted_returns,
    generalized_advantages,
    group_baselines,
    group_centre,
    group_whiten,
    kl_estimate,
    kl_loss_terms,
    kl_penalised_rewards,
)

# --- kl_penalised_rewards ---


@forms(
    kl_penalised_rewards,
    kl_sign=lambda scores, kl, mask, **options: kl_penalised_rewards(scores, -kl, mask, **options),
    penalises_padding=lambda scores, kl, mask, **options: torch.where(
        mask, kl_penalised_rewards(scores, kl, mask, **options), -options["kl_coef"] * kl
    ),
)
def test_rewards_by_hand(form, is_right):
    """O4: R_t. O5: kl_ctl 0.1. O11, O12: at each row's own last token. O9, O19: padding is not read."""

    def check(form):
        for padding in PADDING:
            kl = torch.tensor([[1.0, 2.0, 3.0, padding], [4.0, *[padding] * 3], [-1.0, -2.0, 0.0, 1.0]])
            mask = torch.arange(4) < torch.tensor([3, 1, 4])[:, None]
            rewards = form(torch.tensor([5.0, -5.0, 2.0]), kl, mask, kl_coef=0.1)
            close(rewards, [[-0.1, -0.2, 5 - 0.3, 0.0], [-5 - 0.4, 0.0, 0.0, 0.0], [0.1, 0.2, 0.0, 2 - 0.1]])

    judge(check, form, is_right)


# --- generalized_advantages ---


def test_advantages_by_hand():
    """O14: the recursion. O15: A_T+1 = 0. O17: returns = A + V. R57: bootstrapped only where it was cut."""
    rewards = torch.tensor([[1.0, 2.0, 3.0, 50.0], [4.0, 60.0, 60.0, 60.0]])
    values = torch.tensor([[0.5, 1.0, 2.0, 70.0], [1.0, 80.0, 80.0, 80.0]])
    mask = torch.arange(4) < torch.tensor([3, 1])[:, None]
    options = {"gamma": 0.5, "gae_lambda": 0.5}  # gamma lambda = 0.25
    advantages, returns = generalized_advantages(rewards, values, mask, **options)
    # delta_2 = 3 - 2 = 1; delta_1 = 2 + 0.5 * 2 - 1 = 2; delta_0 = 1 + 0.5 * 1 - 0.5 = 1
    # A_2 = 1; A_1 = 2 + 0.25 * 1 = 2.25; A_0 = 1 + 0.25 * 2.25 = 1.5625; second row: 4 - 1 = 3
    close(advantages, [[1.5625, 2.25, 1.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    close(returns, [[2.0625, 3.25, 3.0, 0.0], [4.0, 0.0, 0.0, 0.0]])
    advantages, returns = generalized_advantages(
        rewards, values, mask, **options, bootstrap_values=torch.tensor([4.0, 0.0])
    )
    # cut short in a state of value 4: delta_2 = 3 + 0.5 * 4 - 2 = 3; A_1 = 2 + 0.75; A_0 = 1 + 0.6875
    close(advantages, [[1.6875, 2.75, 3.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
    close(returns, [[2.1875, 3.75, 5.0, 0.0], [4.0, 0.0, 0.0, 0.0]])


def test_advantages_do_not_read_padding_and_carry_no_gradient():
    """O16: the seed's loop runs over the padded tail, and reads its values. O18."""
    rewards, values, mask = random_batch(2)
    options = {"gamma": 0.97, "gae_lambda": 0.9}
    expected = generalized_advantages(rewards.requires_grad_(), values.requires_grad_(), mask, **options)
    assert not any(x.requires_grad for x in expected)
    for padding in PADDING:
        filled = (fill(x, mask, padding) for x in (rewards, values))
        found = generalized_advantages(*filled, mask, **options)
        assert all(map(torch.equal, found, expected))
    empty = generalized_advantages(rewards[:, :0], values[:, :0], mask[:, :0], **options)
    assert [x.shape for x in empty] == [(5, 0), (5, 0)]


def test_discounted_returns_by_hand():
    rewards = torch.tensor([[1.0, 2.0, 4.0, 9.0], [3.0, 9.0, 9.0, 9.0]])
    mask = torch.arange(4) < torch.tensor([3, 1])[:, None]
    # 1 + 0.5 * 4; 2 + 0.5 * 4; 4
    close(discounted_returns(rewards, mask, gamma=0.5), [[3.0, 4.0, 4.0, 0.0], [3.0, 0.0, 0.0, 0.0]])


# --- groups ---


def equal_scores() -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 3 to 8 equal scores that no power of 2 has."""
    generator = torch.Generator().manual_seed(0)
    sizes = [3 + i % 6 for i in range(200)]
    scores = torch.cat([torch.rand(1, generator=generator).expand(size) for size in sizes])
    return scores, torch.arange(200).repeat_interleave(torch.tensor(sizes))


@forms(
    group_baselines,
    of_the_batch=lambda scores, ids: group_baselines(scores, torch.zeros_like(ids)),
    leaves_none_out=lambda scores, ids: group_baselines(scores, ids)._replace(
        leave_one_out_mean=group_baselines(scores, ids).mean
    ),
)
def test_group_baselines_by_hand(form, is_right):
    """A9: group_ids, not places. A7: leave-one-out. Groups {1, 3, 8}, {10, 20}, {18}."""

    def check(form):
        scores = torch.tensor([1.0, 10.0, 3.0, 8.0, 20.0, 18.0])
        found = form(scores, torch.tensor([7, -2, 7, 7, -2, 2**40]))
        close(found.mean, [4.0, 15.0, 4.0, 4.0, 15.0, 18.0])
        three, two = math.sqrt((9 + 1 + 16) / 2), math.sqrt(50)
        close(found.std, [three, two, three, three, two, 0.0])
        # (3 + 8) / 2; 20; (1 + 8) / 2; (1 + 3) / 2; 10; nobody else: its own
        close(found.leave_one_out_mean, [5.5, 20.0, 4.5, 2.0, 10.0, 18.0])

    judge(check, form, is_right)


def test_equal_scores_have_an_advantage_of_exactly_0():
    """A6: E[x^2] - E[x]^2 would be negative for some of them, in float64 too."""
    scores, ids = equal_scores()
    found = group_baselines(scores, ids)
    assert (scores.double() - found.mean).eq(0).all()
    assert (scores.double() - found.leave_one_out_mean).eq(0).all()
    assert found.std.eq(0).all()
    x = scores[:, None].expand(-1, 3).contiguous()
    assert group_whiten(x, torch.ones_like(x).bool(), ids).eq(0).all()


def test_there_may_be_no_group():
    empty = torch.zeros(0).long()
    assert all(x.shape == (0,) for x in group_baselines(torch.zeros(0), empty))
    assert constant_groups(torch.zeros(0), empty, empty.bool()).shape == (0,)
    assert group_whiten(torch.zeros(2, 0), torch.zeros(2, 0).bool(), torch.arange(2)).shape == (2, 0)


def test_constant_groups_by_hand():
    scores = torch.tensor([0.1, 1.0, 0.1, 0.1, 0.0, 5.0, 1.0, 0.1])
    ids = torch.tensor([4, 2, 4, 4, 2, 9, 0, 0])
    everything = torch.ones(8).bool()
    expected = [True, False, True, True, False, True, False, False]
    assert constant_groups(scores, ids, everything).tolist() == expected
    scores, ids = equal_scores()
    assert constant_groups(scores, ids, torch.ones_like(ids).bool()).all()


def test_a_group_is_centred_by_hand():
    """A7: means of groups {0, 2} and {1} over what counts: (1 + 3 + 8) / 3 and 5; padding is not read."""
    x = torch.tensor([[1.0, 3.0], [5.0, math.nan], [8.0, math.inf]])
    mask, groups = torch.tensor([[True, True], [True, False], [True, False]]), torch.tensor([7, 2, 7])
    found = group_centre(x, mask, groups)
    close(found, [[-3.0, -1.0], [0.0, 0.0], [4.0, 0.0]])
    # The deviation of the step: sqrt((9 + 1 + 0 + 16) / 4), whose mean is 0
    close(whiten(found, mask), found / math.sqrt(6.5), atol=1e-5)


def test_group_whiten_by_hand():
    """A6, A7: normalisation inside a group's tokens. A23: padding is not read."""
    x = torch.tensor([[1.0, 3.0, 99.0], [10.0, 99.0, 99.0], [5.0, 7.0, 99.0], [20.0, 99.0, 99.0]])
    mask = x != 99
    # 1, 3, 5, 7: mean 4, variance 5; 10, 20: mean 15, variance 25
    root = math.sqrt(5)
    expected = [[-3 / root, -1 / root, 0], [-1, 0, 0], [1 / root, 3 / root, 0], [1, 0, 0]]
    for padding in PADDING:
        close(group_whiten(fill(x, mask, padding), mask, torch.tensor([5, 6, 5, 6])), expected)


@pytest.mark.parametrize("lengths", [[0, 0, 3], [1, 0, 0]])
def test_groups_without_a_token_or_with_one(lengths):
    x, mask = random_batch(1, lengths=lengths)
    found = group_whiten(x, mask, torch.tensor([0, 0, 1]))
    assert found.isfinite().all() and found[~mask].eq(0).all() and found[:2].eq(0).all()


# --- KL estimates, KL as a loss ---


@forms(
    kl_estimate,
    sign=lambda logprobs, ref, estimator: kl_estimate(ref, logprobs, estimator),
    in_fp32=lambda p, ref, estimator: (ref - p).exp() - 1 + p - ref if estimator == "k3" else p - ref,
)
def test_kl_estimates_by_hand(form, is_right):
    """O8: the seed's actor_log_probs - ref_log_probs is k1. k3 near the reference is not rounding noise."""

    def check(form):
        # p = 1/2, reference 1/4: d = log 2; k3 = 1/2 - 1 + log 2
        # p = 1/8, reference 1/4: d = -log 2; k3 = 2 - 1 - log 2
        logprobs, ref = torch.tensor([1 / 2, 1 / 8]).log(), torch.tensor([1 / 4, 1 / 4]).log()
        log2 = math.log(2)
        close(form(logprobs, ref, "k1"), [log2, -log2])
        close(form(logprobs, ref, "k2"), [log2**2 / 2, log2**2 / 2])
        close(form(logprobs, ref, "k3"), [log2 - 0.5, 1 - log2])
        ref = torch.linspace(-3, -1, 100)
        d = (ref + 1e-3).double() - ref.double()
        # k3 = d^2 / 2 - d^3 / 6 + ...: about 5e-7
        close(form(ref + 1e-3, ref, "k3"), d.square() / 2 - d**3 / 6, atol=1e-12)

    judge(check, form, is_right)


@forms(
    kl_loss_terms,
    detached=lambda new, ref, mask, estimator: kl_loss_terms(new.detach(), ref, mask, estimator),
    where_after=lambda new, ref, mask, estimator: torch.where(mask, kl_estimate(new, ref, estimator), 0.0),
)
def test_kl_losses_and_their_gradients_by_hand(form, is_right):
    """O8: the penalty in the loss. Padding is not read. Only the new log-probabilities get a gradient."""

    def check(form):
        # p = 1/2, 1/8; reference 1/4: d = log 2, -log 2; the third token is padding
        log2 = math.log(2)
        expected = {  # values, d value / d logprob: 1; d; 1 - exp(-d)
            "k1": ([log2, -log2, 0.0], [1.0, 1.0, 0.0]),
            "k2": ([log2**2 / 2, log2**2 / 2, 0.0], [log2, -log2, 0.0]),
            "k3": ([log2 - 0.5, 1 - log2, 0.0], [0.5, -1.0, 0.0]),
        }
        for (estimator, (values, slopes)), padding in product(expected.items(), PADDING):
            new = torch.tensor([-log2, -3 * log2, padding]).requires_grad_()
            ref = torch.tensor([-2 * log2, -2 * log2, padding]).requires_grad_()
            terms = form(new, ref, torch.tensor([True, True, False]), estimator)
            assert terms.requires_grad and terms.dtype == torch.float32
            close(terms, values)
            terms.sum().backward()
            close(new.grad, slopes)
            assert ref.grad is None

    judge(check, form, is_right)


# --- KLController ---


def test_a_fixed_coefficient_stays():
    controller = KLController(0.1)
    controller.update(1e9, 64)
    controller.update(math.nan, 64)
    assert controller.coef == 0.1


def test_an_adaptive_coefficient_by_hand():
    """O5: a fixed coefficient is the default, this is the other."""
    controller = KLController(0.2, 6.0)
    controller.update(6.6, 1000)  # error 0.1: 1 + 0.1 * 1000 / 10000 = 1.01
    assert controller.coef == pytest.approx(0.2 * 1.01, rel=1e-9)
    controller.update(60.0, 1000)  # error clipped to 0.2: 1.02
    assert controller.coef == pytest.approx(0.2 * 1.01 * 1.02, rel=1e-9)
    controller.update(0.0, 5000)  # error clipped to -0.2: 0.9
    assert controller.coef == pytest.approx(0.2 * 1.01 * 1.02 * 0.9, rel=1e-9)
    # Six horizons and a half in one step: the factor of one horizon six times, and that of a half.
    controller.update(0.0, 65_000)
    assert controller.coef == pytest.approx(0.2 * 1.01 * 1.02 * 0.9 * 0.8**6 * 0.9, rel=1e-9)


def test_a_shorter_horizon_moves_the_coefficient_further():
    controller = KLController(0.2, 6.0, 100)
    controller.update(6.6, 50)  # error 0.1: 1 + 0.1 * 50 / 100
    assert controller.coef == pytest.approx(0.2 * 1.05, rel=1e-9)
