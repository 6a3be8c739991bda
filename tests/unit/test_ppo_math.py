"""Rewards, advantages and returns of PPO: by hand, against float64 loops and wrong forms.

O4 and the like in a docstring are rows of the seeds.
"""

import math

import torch
from response_batches import PADDING, fill, random_batch
from right_or_wrong import close, forms, judge

from step3_ppo.ppo_math import discounted_returns, generalized_advantages, kl_estimate, kl_penalised_rewards

# --- kl_penalised_rewards ---


def loop_rewards(scores, kl, mask, *, kl_coef, reward_clip):
    rewards = torch.zeros(kl.shape, dtype=torch.float64)
    for i, score in enumerate(scores.tolist()):
        real = [t for t in range(kl.shape[1]) if mask[i, t]]
        for t in real:
            rewards[i, t] = -kl_coef * kl[i, t].item()
        if real:
            rewards[i, real[-1]] += max(-reward_clip, min(reward_clip, score)) if reward_clip else score
    return rewards


def rewards_at(column):
    """Return a wrong form that puts the score at a column of its own choice."""

    def form(scores, kl, mask, *, kl_coef, reward_clip):
        rewards = torch.where(mask, -kl_coef * kl, 0.0)
        rows = torch.arange(len(scores))
        rewards[rows, column(mask)] += scores.clamp(-reward_clip, reward_clip) if reward_clip else scores
        return rewards

    return form


REWARD_FORMS = forms(
    kl_penalised_rewards,
    kl_sign=lambda scores, kl, mask, **options: kl_penalised_rewards(scores, -kl, mask, **options),
    at_the_first_pad=rewards_at(lambda mask: mask.sum(1).clamp(max=mask.shape[1] - 1)),
    at_the_last_column=rewards_at(lambda mask: torch.full((len(mask),), mask.shape[1] - 1)),
    before_the_end_token=rewards_at(lambda mask: (mask.sum(1) - 2).clamp(min=0)),
    not_clipped=lambda scores, kl, mask, **options: kl_penalised_rewards(
        scores, kl, mask, **options | {"reward_clip": None}
    ),
    clipped_above_only=lambda scores, kl, mask, **options: kl_penalised_rewards(
        scores.clamp(max=options["reward_clip"] or math.inf), kl, mask, **options | {"reward_clip": None}
    ),
    clips_the_sum=lambda scores, kl, mask, **options: kl_penalised_rewards(
        scores, kl, mask, **options | {"reward_clip": None}
    ).clamp(-(options["reward_clip"] or math.inf), options["reward_clip"] or math.inf),
    penalises_padding=lambda scores, kl, mask, **options: torch.where(
        mask, kl_penalised_rewards(scores, kl, mask, **options), -options["kl_coef"] * kl
    ),
    score_on_every_token=lambda scores, kl, mask, *, kl_coef, reward_clip: torch.where(
        mask, scores.clamp(-(reward_clip or 1e9), reward_clip or 1e9)[:, None] - kl_coef * kl, 0.0
    ),
)


@REWARD_FORMS
def test_rewards_by_hand(form, is_right):
    """O4: R_t. O5: kl_ctl 0.1. O6, O13: clamped to -5 and to 5. O11, O12: at each row's own last token."""

    def check(form):
        kl = torch.tensor([[1.0, 2.0, 3.0, 9.0], [4.0, 9.0, 9.0, 9.0], [-1.0, -2.0, 0.0, 1.0]])
        mask = torch.arange(4) < torch.tensor([3, 1, 4])[:, None]
        scores = torch.tensor([7.0, -8.0, 2.0])
        expected = [
            [-0.1, -0.2, 5 - 0.3, 0.0],  # 7 clipped to 5, on the last of three tokens
            [-5 - 0.4, 0.0, 0.0, 0.0],  # -8 clipped to -5
            [0.1, 0.2, 0.0, 2 - 0.1],
        ]
        close(form(scores, kl, mask, kl_coef=0.1, reward_clip=5.0), expected)

    judge(check, form, is_right)


def test_rewards_from_log_probabilities_by_hand():
    """O4, O8: -kl_ctl (log P - log P_ref), and + R at t = T."""
    logprobs, ref = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -1.0, -3.0]])
    kl = kl_estimate(logprobs, ref, "k1")  # 0.5, -1, 0
    mask = torch.ones(1, 3).bool()
    rewards = kl_penalised_rewards(torch.tensor([2.0]), kl, mask, kl_coef=0.1, reward_clip=5.0)
    close(rewards, [[-0.05, 0.1, 2.0]])


@REWARD_FORMS
def test_rewards_equal_a_float64_loop(form, is_right):
    def check(form):
        kl, spread, mask = random_batch(2, lengths=[9, 1, 4, 2, 8])
        scores = 4 * spread[:, 0]
        for reward_clip in (2.0, 0, None):
            options = {"kl_coef": 0.3, "reward_clip": reward_clip}
            close(form(scores, kl, mask, **options), loop_rewards(scores, kl, mask, **options))

    judge(check, form, is_right)


def test_rewards_ignore_padding_and_give_an_empty_response_nothing():
    """O9, O19: only the response's positions count."""
    kl, scores, mask = random_batch(2)
    expected = kl_penalised_rewards(scores[:, 0], kl, mask, kl_coef=0.3, reward_clip=2.0)
    assert expected[~mask].eq(0).all() and expected[3].eq(0).all() and not mask[3].any()
    for padding in PADDING:
        rewards = kl_penalised_rewards(
            scores[:, 0], fill(kl, mask, padding), mask, kl_coef=0.3, reward_clip=2.0
        )
        assert torch.equal(rewards, expected)


def test_rewards_have_no_gradient_and_take_no_tokens_at_all():
    scores, kl = torch.zeros(2, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    mask = torch.ones(2, 3).bool()
    assert not kl_penalised_rewards(scores, kl, mask, kl_coef=1.0, reward_clip=5.0).requires_grad
    assert kl_penalised_rewards(scores, kl[:, :0], mask[:, :0], kl_coef=1.0, reward_clip=5.0).shape == (2, 0)


# --- generalized_advantages ---


def loop_advantages(rewards, values, mask, *, gamma, gae_lambda, bootstrap_values=None):
    advantages = torch.zeros(rewards.shape, dtype=torch.float64)
    returns = advantages.clone()
    for i in range(len(rewards)):
        real = [t for t in range(rewards.shape[1]) if mask[i, t]]
        next_value = 0.0 if bootstrap_values is None else bootstrap_values[i].item()
        next_advantage = 0.0
        for t in reversed(real):
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
    last = (mask.sum(1) - 1).clamp(min=0)
    return generalized_advantages(
        rewards, values, mask, **options | {"bootstrap_values": values.gather(1, last[:, None])[:, 0]}
    )


def changed(**changes):
    return lambda *tensors, **options: generalized_advantages(*tensors, **options | changes)


def added_after(advantages, returns, *, values, mask):
    return advantages, torch.where(mask, returns - values, 0.0)


ADVANTAGE_FORMS = forms(
    generalized_advantages,
    reads_the_padded_tail=reads_the_padded_tail,
    bootstraps_its_own_last_value=with_last_value_kept,
    ignores_bootstrap=changed(bootstrap_values=None),
    lambda_one=changed(gae_lambda=1.0),
    gamma_one=changed(gamma=1.0),
    returns_without_values=lambda rewards, values, mask, **options: added_after(
        *generalized_advantages(rewards, values, mask, **options), values=values, mask=mask
    ),
    value_sign=lambda rewards, values, mask, **options: generalized_advantages(
        rewards, -values, mask, **options
    ),
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


@ADVANTAGE_FORMS
def test_advantages_equal_a_float64_loop(form, is_right):
    def check(form):
        rewards, values, mask = random_batch(2)
        options = {"gamma": 0.97, "gae_lambda": 0.9}
        for bootstrap in (None, torch.linspace(-1, 1, len(mask))):
            results = form(rewards, values, mask, **options, bootstrap_values=bootstrap)
            expected = loop_advantages(rewards, values, mask, **options, bootstrap_values=bootstrap)
            for actual, wanted in zip(results, expected, strict=True):
                assert actual.dtype == torch.float32
                close(actual, wanted)

    judge(check, form, is_right)


@forms(
    generalized_advantages,
    reads_the_padded_tail=reads_the_padded_tail,
    bootstraps_its_own_last_value=with_last_value_kept,
)
def test_lambda_one_gives_the_discounted_sum_of_rewards_as_returns(form, is_right):
    def check(form):
        rewards, values, mask = random_batch(2)
        returns = form(rewards, values, mask, gamma=0.9, gae_lambda=1.0)[1]
        for i, length in enumerate(mask.sum(1).tolist()):
            expected = [
                math.fsum(0.9 ** (k - t) * rewards[i, k].item() for k in range(t, length))
                for t in range(length)
            ]
            close(returns[i, :length], torch.tensor(expected, dtype=torch.float64))

    judge(check, form, is_right)


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
        wider = [torch.nn.functional.pad(x, (2, 3)) for x in (rewards, values, mask)]
        results = form(*wider, **options)  # left padding too: what counts is told by the mask alone
        assert all(torch.equal(x[:, 2:-3], y) for x, y in zip(results, expected, strict=True))

    judge(check, form, is_right)


def test_advantages_step_over_a_gap_in_the_mask():
    rewards, values, _ = random_batch(2)
    mask = torch.rand(rewards.shape, generator=torch.Generator().manual_seed(2)) < 0.6
    options = {"gamma": 0.97, "gae_lambda": 0.9}
    results = generalized_advantages(rewards, values, mask, **options)
    for actual, wanted in zip(results, loop_advantages(rewards, values, mask, **options), strict=True):
        close(actual, wanted)


def test_advantages_carry_no_gradient_and_take_no_tokens_at_all():
    """O18."""
    leaves = [x.requires_grad_() for x in random_batch(2)[:2]]
    mask = random_batch(2)[2]
    results = generalized_advantages(*leaves, mask, gamma=1.0, gae_lambda=0.95)
    assert not any(x.requires_grad for x in results)
    empty = generalized_advantages(*(x[:, :0] for x in leaves), mask[:, :0], gamma=1.0, gae_lambda=0.95)
    assert [x.shape for x in empty] == [(5, 0), (5, 0)]


# --- discounted_returns ---


def returns_of(**changes):
    return lambda rewards, mask, **options: discounted_returns(rewards, mask, **options | changes)


RETURN_FORMS = forms(
    discounted_returns,
    rewards_so_far=lambda rewards, mask, *, gamma: torch.where(mask, rewards, 0.0).cumsum(1) * mask,
    not_discounted=returns_of(gamma=1.0),
    without_its_own=lambda rewards, mask, *, gamma: (
        discounted_returns(rewards, mask, gamma=gamma) - torch.where(mask, rewards, 0.0)
    ),
    one_number_a_response=lambda rewards, mask, *, gamma: torch.where(
        mask, discounted_returns(rewards, mask, gamma=gamma)[:, :1], 0.0
    ),
    reads_the_padded_tail=lambda rewards, mask, *, gamma: torch.where(
        mask, discounted_returns(rewards, torch.ones_like(mask), gamma=gamma), 0.0
    ),
)


@RETURN_FORMS
def test_discounted_returns_by_hand(form, is_right):
    def check(form):
        rewards = torch.tensor([[1.0, 2.0, 4.0, 9.0], [3.0, 9.0, 9.0, 9.0]])
        mask = torch.arange(4) < torch.tensor([3, 1])[:, None]
        # 1 + 0.5 * 4; 2 + 0.5 * 4; 4
        close(form(rewards, mask, gamma=0.5), [[3.0, 4.0, 4.0, 0.0], [3.0, 0.0, 0.0, 0.0]])

    judge(check, form, is_right)


@RETURN_FORMS
def test_discounted_returns_equal_a_float64_loop(form, is_right):
    def check(form):
        rewards, mask = random_batch(1)
        expected = torch.zeros(rewards.shape, dtype=torch.float64)
        for i in range(len(rewards)):
            to_go = 0.0
            for t in reversed(range(int(mask[i].sum()))):
                to_go = rewards[i, t].item() + 0.9 * to_go
                expected[i, t] = to_go
        for padding in PADDING:
            returns = form(fill(rewards, mask, padding), mask, gamma=0.9)
            assert returns.dtype == torch.float32 and not returns.requires_grad
            close(returns, expected)

    judge(check, form, is_right)
