"""The clipped policy loss of PPO: by hand, against a float64 loop and wrong forms.

O20 and the like in a docstring are rows of the seeds.
"""

import math

import torch
from response_batches import PADDING, fill, random_batch
from right_or_wrong import close, forms, judge

from step3_ppo.ppo_math import PolicyLossTerms, policy_loss_terms


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
        zeros = [torch.zeros_like(loss.detach()) for _ in range(3)]
        return PolicyLossTerms(loss, torch.where(mask, ratio, 0.0).detach(), is_clipped, *zeros, mask)

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
    """O20: min and clamp to 0.8 ... 1.2. O21: old against new log-probabilities."""

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
    """O20, A20: clip_range_high and c_clip."""
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
    """O22."""

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
    """O24: log_ratio * mask. A23: where, since NaN * 0 is NaN."""

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
    """O18, O23."""

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


def test_a_bound_of_0_is_no_bound():
    """The flags --clip_range_high and --c_clip say so."""
    new, old, advantages, mask = random_batch(3)
    expected = policy_loss_terms(new, old, advantages, mask, clip_range=0.2)
    off = {"clip_range_high": 0.0, "dual_clip": 0.0, "behav_imp_weight_cap": 0.0}
    found = policy_loss_terms(new, old, advantages, mask, clip_range=0.2, **off)
    assert all(map(torch.equal, found, expected))


def test_packed_tokens_and_padded_rows_have_the_same_terms():
    """O9, A10: sequences end to end, without padding."""
    new, old, advantages, mask = random_batch(3)
    padded = policy_loss_terms(new, old, advantages, mask, clip_range=0.2)
    flat = policy_loss_terms(new[mask], old[mask], advantages[mask], mask[mask], clip_range=0.2)
    assert all(torch.equal(x, y[mask]) for x, y in zip(flat, padded, strict=True))


def test_policy_losses_of_bf16_inputs_are_fp32():
    """O27."""
    new, old, advantages, mask = random_batch(3)
    halves = [x.bfloat16() for x in (new, old, advantages)]
    terms = policy_loss_terms(*halves, mask, clip_range=0.2, prox_logprobs=halves[1])
    bools = (terms.is_clipped, terms.has_weight)
    assert all(x.dtype == (torch.bool if any(x is b for b in bools) else torch.float32) for x in terms)
