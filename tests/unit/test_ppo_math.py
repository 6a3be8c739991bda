"""KL estimates and controller, rewards and advantages of PPO: by hand, against loops and wrong forms."""

import math

import pytest
import torch
from response_batches import PADDING, fill, random_batch
from right_or_wrong import close, forms, judge

from step3_ppo.ppo_math import KLController, generalized_advantages, kl_estimate, kl_penalised_rewards

# --- kl_estimate ---


def in_fp32(logprobs, ref_logprobs, estimator):
    d = logprobs - ref_logprobs
    return {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[estimator]


KL_FORMS = forms(
    kl_estimate,
    sign=lambda logprobs, ref, estimator: kl_estimate(ref, logprobs, estimator),
    k2_for_k3=lambda logprobs, ref, estimator: kl_estimate(
        logprobs, ref, {"k3": "k2"}.get(estimator, estimator)
    ),
    k2_not_halved=lambda logprobs, ref, estimator: (
        kl_estimate(logprobs, ref, estimator) * (2 if estimator == "k2" else 1)
    ),
)


@KL_FORMS
def test_kl_estimates_by_hand(form, is_right):
    def check(form):
        # p = 1/2, reference 1/4: d = log 2; k3 = 1/2 - 1 + log 2
        # p = 1/8, reference 1/4: d = -log 2; k3 = 2 - 1 - log 2
        logprobs, ref = torch.tensor([1 / 2, 1 / 8]).log(), torch.tensor([1 / 4, 1 / 4]).log()
        log2 = math.log(2)
        close(form(logprobs, ref, "k1"), [log2, -log2])
        close(form(logprobs, ref, "k2"), [log2**2 / 2, log2**2 / 2])
        close(form(logprobs, ref, "k3"), [log2 - 0.5, 1 - log2])

    judge(check, form, is_right)


@KL_FORMS
def test_kl_estimates_equal_a_float64_loop(form, is_right):
    def check(form):
        logprobs, ref, _ = random_batch(2)
        differences = (logprobs.double() - ref.double()).flatten().tolist()
        for estimator, formula in {
            "k1": lambda d: d,
            "k2": lambda d: d * d / 2,
            "k3": lambda d: math.expm1(-d) + d,
        }.items():
            close(form(logprobs, ref, estimator).flatten(), [formula(d) for d in differences], atol=2e-6)

    judge(check, form, is_right)


@forms(kl_estimate, in_fp32=in_fp32)
def test_k3_of_a_policy_near_its_reference_is_not_rounding_noise(form, is_right):
    def check(form):
        ref = torch.linspace(-3, -1, 100)
        logprobs = ref + 1e-3
        d = logprobs.double() - ref.double()
        result = form(logprobs, ref, "k3")
        assert (result >= 0).all()
        # k3 = d^2 / 2 - d^3 / 6 + ...: about 5e-7
        close(result, d.square() / 2 - d**3 / 6, atol=1e-12)

    judge(check, form, is_right)


def test_the_means_of_k1_and_k3_are_the_kl_and_k3_has_no_negative_entry():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    kl = (policy * (policy / reference).log()).sum()
    for estimator in ("k1", "k3"):
        close((policy * kl_estimate(policy.log(), reference.log(), estimator)).sum(), kl)
    assert (kl_estimate(policy.log(), reference.log(), "k3") >= 0).all()


def test_an_unknown_kl_estimator_is_named():
    with pytest.raises(ValueError, match="'k4' is unknown; use k1, k2 or k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


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
    leaves = [x.requires_grad_() for x in random_batch(2)[:2]]
    mask = random_batch(2)[2]
    results = generalized_advantages(*leaves, mask, gamma=1.0, gae_lambda=0.95)
    assert not any(x.requires_grad for x in results)
    empty = generalized_advantages(*(x[:, :0] for x in leaves), mask[:, :0], gamma=1.0, gae_lambda=0.95)
    assert [x.shape for x in empty] == [(5, 0), (5, 0)]


# --- KLController ---


def test_a_fixed_coefficient_stays():
    controller = KLController(0.1)
    controller.update(1e9, 64)
    controller.update(math.nan, 64)
    assert controller.coef == 0.1


class ErrorNotClipped(KLController):
    def update(self, mean_kl, num_samples):
        self.coef *= 1 + (mean_kl / self.target - 1) * num_samples / self.horizon


class OtherDirection(KLController):
    def update(self, mean_kl, num_samples):
        super().update(2 * self.target - mean_kl, num_samples)


class CountsUpdates(KLController):
    def update(self, mean_kl, num_samples):
        super().update(mean_kl, 1)


@forms(
    KLController,
    error_not_clipped=ErrorNotClipped,
    other_direction=OtherDirection,
    counts_updates=CountsUpdates,
)
def test_an_adaptive_coefficient_by_hand(form, is_right):
    def check(form):
        controller = form(0.2, target=6.0, horizon=1000)
        controller.update(6.6, 100)  # error 0.1: 1 + 0.1 * 100 / 1000 = 1.01
        assert controller.coef == pytest.approx(0.2 * 1.01, rel=1e-9)
        controller.update(60.0, 100)  # error clipped to 0.2: 1.02
        assert controller.coef == pytest.approx(0.2 * 1.01 * 1.02, rel=1e-9)
        controller.update(0.0, 500)  # error clipped to -0.2: 0.9
        assert controller.coef == pytest.approx(0.2 * 1.01 * 1.02 * 0.9, rel=1e-9)

    judge(check, form, is_right)


def test_a_saved_controller_goes_on_where_it_was():
    whole = KLController(0.2, target=6.0)
    for kl in (3.0, 9.0):
        whole.update(kl, 64)
    resumed = KLController(0.2, target=6.0)
    resumed.load_state_dict(whole.state_dict())
    for controller in (whole, resumed):
        controller.update(7.0, 64)
    assert resumed.coef == whole.coef != 0.2


def test_a_controller_refuses_what_would_ruin_it():
    for options in ({"init_coef": -1.0}, {"target": 0.0}, {"target": -6.0}, {"horizon": 0}):
        with pytest.raises(ValueError, match=str(next(iter(options.values())))):
            KLController(**{"init_coef": 0.1} | options)
    controller = KLController(0.1, target=6.0)
    for kl in (math.nan, math.inf):
        with pytest.raises(ValueError, match="finite"):
            controller.update(kl, 64)
    assert controller.coef == 0.1
