"""Rewards, advantages, returns and groups: by hand, against float64 loops and wrong forms.

O4 and the like in a docstring are rows of the seeds.
"""

import math

import pytest
import torch
from response_batches import PADDING, fill, random_batch
from right_or_wrong import close, forms, judge

from common.models.tensor_ops import whiten
from step3_ppo.ppo_math import (
    GroupBaselines,
    constant_groups,
    discounted_returns,
    generalized_advantages,
    group_baselines,
    group_whiten,
    kl_estimate,
    kl_penalised_rewards,
)

# --- kl_penalised_rewards ---


def rewards_at(column):
    """Return a wrong form that puts the score at a column of its own choice."""

    def form(scores, kl, mask, *, kl_coef):
        rewards = torch.where(mask, -kl_coef * kl, 0.0)
        rewards[torch.arange(len(scores)), column(mask)] += scores
        return rewards

    return form


@forms(
    kl_penalised_rewards,
    kl_sign=lambda scores, kl, mask, **options: kl_penalised_rewards(scores, -kl, mask, **options),
    at_the_first_pad=rewards_at(lambda mask: mask.sum(1).clamp(max=mask.shape[1] - 1)),
    at_the_last_column=rewards_at(lambda mask: torch.full((len(mask),), mask.shape[1] - 1)),
    before_the_end_token=rewards_at(lambda mask: (mask.sum(1) - 2).clamp(min=0)),
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


def test_rewards_from_log_probabilities_by_hand():
    """O4, O8: -kl_ctl (log P - log P_ref), and + R at t = T."""
    logprobs, ref = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -1.0, -3.0]])
    kl = kl_estimate(logprobs, ref, "k1")  # 0.5, -1, 0
    rewards = kl_penalised_rewards(torch.tensor([2.0]), kl, torch.ones(1, 3).bool(), kl_coef=0.1)
    close(rewards, [[-0.05, 0.1, 2.0]])


def test_an_empty_response_has_no_reward_and_none_has_a_gradient():
    scores, kl = torch.ones(2, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    rewards = kl_penalised_rewards(scores, kl, mask, kl_coef=1.0)
    assert not rewards.requires_grad and rewards.tolist() == [[0, 1, 0], [0, 0, 0]]
    assert kl_penalised_rewards(scores, kl[:, :0], mask[:, :0], kl_coef=1.0).shape == (2, 0)


# --- generalized_advantages ---


def loop_advantages(rewards, values, mask, *, gamma, gae_lambda, bootstrap_values=None):
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    returns = advantages.clone()
    for i in range(len(rewards)):
        next_value = 0.0 if bootstrap_values is None else bootstrap_values[i].item()
        next_advantage = 0.0
        for t in reversed([t for t in range(rewards.shape[1]) if mask[i, t]]):
            value = values[i, t].item()
            delta = rewards[i, t].item() + gamma * next_value - value
            next_advantage = delta + gamma * gae_lambda * next_advantage
            next_value = value
            advantages[i, t] = next_advantage
            returns[i, t] = next_advantage + value
    return advantages, returns


def reads_the_padded_tail(rewards, values, mask, *, gamma, gae_lambda, bootstrap_values=None):
    """The seed-era loop: it runs over all columns, so values of padding enter through V_t+1 and A_t+1."""
    everything = torch.ones_like(mask)
    results = generalized_advantages(rewards, values, everything, gamma=gamma, gae_lambda=gae_lambda)
    return tuple(torch.where(mask, x, 0.0) for x in results)


def with_last_value_kept(rewards, values, mask, **options):
    last = values.gather(1, (mask.sum(1) - 1).clamp(min=0)[:, None])[:, 0]
    return generalized_advantages(rewards, values, mask, **options | {"bootstrap_values": last})


def changed(**changes):
    return lambda *tensors, **options: generalized_advantages(*tensors, **options | changes)


def returns_without_values(rewards, values, mask, **options):
    advantages, returns = generalized_advantages(rewards, values, mask, **options)
    return advantages, torch.where(mask, returns - values, 0.0)


ADVANTAGE_FORMS = forms(
    generalized_advantages,
    reads_the_padded_tail=reads_the_padded_tail,
    bootstraps_its_own_last_value=with_last_value_kept,
    ignores_bootstrap=changed(bootstrap_values=None),
    lambda_one=changed(gae_lambda=1.0),
    gamma_one=changed(gamma=1.0),
    returns_without_values=returns_without_values,
)


@ADVANTAGE_FORMS
def test_advantages_by_hand(form, is_right):
    """O14: the recursion. O15: A_T+1 = 0. O17: returns = A + V. R57: bootstrapped only where it was cut."""

    def check(form):
        rewards = torch.tensor([[1.0, 2.0, 3.0, 50.0], [4.0, 60.0, 60.0, 60.0]])
        values = torch.tensor([[0.5, 1.0, 2.0, 70.0], [1.0, 80.0, 80.0, 80.0]])
        mask = torch.arange(4) < torch.tensor([3, 1])[:, None]
        options = {"gamma": 0.5, "gae_lambda": 0.5}  # gamma lambda = 0.25
        advantages, returns = form(rewards, values, mask, **options)
        # delta_2 = 3 - 2 = 1; delta_1 = 2 + 0.5 * 2 - 1 = 2; delta_0 = 1 + 0.5 * 1 - 0.5 = 1
        # A_2 = 1; A_1 = 2 + 0.25 * 1 = 2.25; A_0 = 1 + 0.25 * 2.25 = 1.5625; second row: 4 - 1 = 3
        close(advantages, [[1.5625, 2.25, 1.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
        close(returns, [[2.0625, 3.25, 3.0, 0.0], [4.0, 0.0, 0.0, 0.0]])
        advantages, returns = form(
            rewards, values, mask, **options, bootstrap_values=torch.tensor([4.0, 0.0])
        )
        # cut short in a state of value 4: delta_2 = 3 + 0.5 * 4 - 2 = 3; A_1 = 2 + 0.75; A_0 = 1 + 0.6875
        close(advantages, [[1.6875, 2.75, 3.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
        close(returns, [[2.1875, 3.75, 5.0, 0.0], [4.0, 0.0, 0.0, 0.0]])

    judge(check, form, is_right)


@pytest.mark.parametrize("has_gaps", [False, True])
def test_advantages_equal_a_float64_loop(has_gaps):
    rewards, values, mask = random_batch(2)
    if has_gaps:
        mask = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2)) < 0.6
    options = {"gamma": 0.97, "gae_lambda": 0.9}
    for bootstrap in (None, torch.linspace(-1, 1, len(mask))):
        results = generalized_advantages(rewards, values, mask, **options, bootstrap_values=bootstrap)
        expected = loop_advantages(rewards, values, mask, **options, bootstrap_values=bootstrap)
        for actual, wanted in zip(results, expected, strict=True):
            assert actual.dtype == torch.float32
            close(actual, wanted)


@forms(generalized_advantages, reads_the_padded_tail=reads_the_padded_tail)
def test_advantages_do_not_read_padding(form, is_right):
    """O16: the seed's loop runs over the padded tail, and reads its values."""

    def check(form):
        rewards, values, mask = random_batch(2)
        options = {"gamma": 0.97, "gae_lambda": 0.9}
        expected = generalized_advantages(rewards, values, mask, **options)
        for padding in PADDING:
            results = form(fill(rewards, mask, padding), fill(values, mask, padding), mask, **options)
            assert all(map(torch.equal, results, expected))

    judge(check, form, is_right)


def test_advantages_carry_no_gradient_and_take_no_tokens_at_all():
    """O18."""
    rewards, values, mask = random_batch(2)
    leaves = [rewards.requires_grad_(), values.requires_grad_()]
    results = generalized_advantages(*leaves, mask, gamma=1.0, gae_lambda=0.95)
    assert not any(x.requires_grad for x in results)
    empty = generalized_advantages(*(x[:, :0] for x in leaves), mask[:, :0], gamma=1.0, gae_lambda=0.95)
    assert [x.shape for x in empty] == [(5, 0), (5, 0)]


@forms(
    discounted_returns,
    rewards_so_far=lambda rewards, mask, *, gamma: torch.where(mask, rewards, 0.0).cumsum(1) * mask,
    not_discounted=lambda rewards, mask, *, gamma: discounted_returns(rewards, mask, gamma=1.0),
    reads_the_padded_tail=lambda rewards, mask, *, gamma: torch.where(
        mask, discounted_returns(rewards, torch.ones_like(mask), gamma=gamma), 0.0
    ),
)
def test_discounted_returns_by_hand(form, is_right):
    def check(form):
        rewards = torch.tensor([[1.0, 2.0, 4.0, 9.0], [3.0, 9.0, 9.0, 9.0]])
        mask = torch.arange(4) < torch.tensor([3, 1])[:, None]
        # 1 + 0.5 * 4; 2 + 0.5 * 4; 4
        close(form(rewards, mask, gamma=0.5), [[3.0, 4.0, 4.0, 0.0], [3.0, 0.0, 0.0, 0.0]])

    judge(check, form, is_right)


# --- groups ---


def random_groups(num: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return 3 + torch.randn(num, generator=generator), torch.randint(-3, 9, (num,), generator=generator)


def equal_scores() -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 3 to 8 equal scores that no power of 2 has."""
    generator = torch.Generator().manual_seed(0)
    sizes = [3 + i % 6 for i in range(200)]
    scores = torch.cat([torch.rand(1, generator=generator).expand(size) for size in sizes])
    return scores, torch.arange(200).repeat_interleave(torch.tensor(sizes))


def one_pass(scores, group_ids):
    """The deviation from E[x^2] - E[x]^2, in float64."""
    baselines = group_baselines(scores, group_ids)
    mean_square = group_baselines(scores.double().square(), group_ids).mean
    size = (group_ids[:, None] == group_ids).sum(1)
    bessel = size / (size - 1).clamp(min=1)
    return baselines._replace(std=((mean_square - baselines.mean.square()) * bessel).sqrt())


def by_place(scores, group_ids):
    """Take groups to be equally long and next to each other, as `view(-1, group_size)` does."""
    size = len(scores) // len(group_ids.unique())
    rows = scores.double()[: len(scores) // size * size].view(-1, size)
    mean = rows.mean(1, keepdim=True).expand_as(rows).flatten()
    others = ((rows.sum(1, keepdim=True) - rows) / (size - 1)).flatten()
    return GroupBaselines(mean, rows.std(1, keepdim=True).expand_as(rows).flatten(), others)


def population(scores, group_ids):
    size = (group_ids[:, None] == group_ids).sum(1)
    baselines = group_baselines(scores, group_ids)
    return baselines._replace(std=baselines.std * ((size - 1) / size).sqrt())


@forms(
    group_baselines,
    by_place=by_place,
    population_deviation=population,
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
    """A6: the one-pass variance is negative for some of them, and its root NaN."""
    scores, ids = equal_scores()
    found = group_baselines(scores, ids)
    assert (scores.double() - found.mean).eq(0).all()
    assert (scores.double() - found.leave_one_out_mean).eq(0).all()
    assert found.std.eq(0).all() and one_pass(scores, ids).std.isnan().any()
    x = scores[:, None].expand(-1, 3).contiguous()
    assert group_whiten(x, torch.ones_like(x).bool(), ids).eq(0).all()


def test_the_one_pass_variance_of_equal_scores_is_negative_in_float64():
    """A6: what the two passes are there for; for other scores the form is right."""
    scores, ids = random_groups()
    close(one_pass(scores, ids).std[:5], group_baselines(scores, ids).std[:5])
    assert one_pass(*equal_scores()).std.isnan().any()


def test_a_group_reads_no_other_group_and_no_place():
    scores, ids = random_groups()
    expected = group_baselines(scores, ids)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    moved = group_baselines(scores[order], -977 * ids[order])
    spoilt = group_baselines(torch.where(ids == 3, torch.nan, scores), ids)
    for wanted, of_moved, of_spoilt in zip(expected, moved, spoilt, strict=True):
        close(of_moved, wanted[order], atol=1e-12)
        assert torch.equal(of_spoilt[ids != 3], wanted[ids != 3]) and of_spoilt[ids == 3].isnan().all()


def test_groups_carry_no_gradient_and_there_may_be_none():
    scores = torch.ones(3, requires_grad=True)
    assert not any(x.requires_grad for x in group_baselines(scores, torch.zeros(3).long()))
    empty = torch.zeros(0).long()
    assert all(x.shape == (0,) for x in group_baselines(torch.zeros(0), empty))
    assert constant_groups(torch.zeros(0), empty, empty.bool()).shape == (0,)
    assert group_whiten(torch.zeros(2, 0), torch.zeros(2, 0).bool(), torch.arange(2)).shape == (2, 0)


@forms(
    constant_groups,
    deviation_of_one_pass=lambda scores, ids, is_scored: one_pass(scores, ids).std == 0,
    of_the_batch=lambda scores, ids, is_scored: constant_groups(scores, torch.zeros_like(ids), is_scored),
    all_zero=lambda *tensors: constant_groups(*tensors) & (tensors[0] == 0),
)
def test_constant_groups_by_hand(form, is_right):
    def check(form):
        scores = torch.tensor([0.1, 1.0, 0.1, 0.1, 0.0, 5.0, 1.0, 0.1])
        ids = torch.tensor([4, 2, 4, 4, 2, 9, 0, 0])
        everything = torch.ones(8).bool()
        assert form(scores, ids, everything).tolist() == [True, False, True, True, False, True, False, False]
        scores, ids = equal_scores()
        assert form(scores, ids, torch.ones_like(ids).bool()).all()

    judge(check, form, is_right)


def packed_group_whiten(x, mask, group_size):
    """The seed's loop over the tokens end to end, cut by cu_seqlens; it needs groups of one size in a row."""
    cu_seqlens = [0, *mask.sum(1).cumsum(0).tolist()]
    advantages, parts = x[mask], []
    for i in range(0, len(x), group_size):
        chunk = advantages[cu_seqlens[i] : cu_seqlens[i + group_size]]
        parts.append(whiten(chunk, torch.ones_like(chunk).bool()))
    whitened = torch.zeros_like(x)
    whitened[mask] = torch.cat(parts)
    return whitened


@forms(
    group_whiten,
    whole_batch=lambda x, mask, ids: whiten(x, mask),
    statistics_of_padding=lambda x, mask, ids: group_whiten(x, torch.ones_like(mask), ids) * mask,
    each_row=lambda x, mask, ids: group_whiten(x, mask, torch.arange(len(ids))),
    bessel=lambda x, mask, ids: group_whiten(x, mask, ids) * math.sqrt(5 / 6),
)
def test_group_whiten_by_hand(form, is_right):
    """A6, A7: normalisation inside a group's tokens. A23: padding is not read."""

    def check(form):
        x = torch.tensor([[1.0, 3.0, 99.0], [10.0, 99.0, 99.0], [5.0, 7.0, 99.0], [20.0, 99.0, 99.0]])
        mask = x != 99
        # 1, 3, 5, 7: mean 4, variance 5; 10, 20: mean 15, variance 25
        root = math.sqrt(5)
        expected = [[-3 / root, -1 / root, 0], [-1, 0, 0], [1 / root, 3 / root, 0], [1, 0, 0]]
        for padding in PADDING:
            close(form(fill(x, mask, padding), mask, torch.tensor([5, 6, 5, 6])), expected)

    judge(check, form, is_right)


def test_group_whiten_is_the_seeds_loop_over_packed_sequences():
    """A7, A8, A9, A11: cu_seqlens, group after group, nothing crosses ranks."""
    x, mask = random_batch(1, lengths=[9, 1, 4, 2, 8, 5])
    close(group_whiten(x, mask, torch.tensor([0, 0, 0, 1, 1, 1])), packed_group_whiten(x, mask, 3))


@pytest.mark.parametrize("lengths", [[0, 0, 3], [1, 0, 0]])
def test_groups_without_a_token_or_with_one(lengths):
    x, mask = random_batch(1, lengths=lengths)
    found = group_whiten(x, mask, torch.tensor([0, 0, 1]))
    assert found.isfinite().all() and found[~mask].eq(0).all() and found[:2].eq(0).all()
