"""The losses of PPO and how they become one number: by hand, against float64 loops and wrong forms.

O20 and the like in a docstring are rows of the seeds.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from right_or_wrong import close, forms, judge
from rollout_batches import PADDING, fill, random_batch

from common.data.packed_batch import PackedBatch
from step3_ppo.algorithms import ALGORITHMS, fill_defaults
from step3_ppo.arguments import PPOArguments
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import (
    KLController,
    behaviour_weights,
    clipped_surrogate,
    dual_clip,
    loss_weights,
    policy_log_ratio,
    value_loss_terms,
)


def policy_loss(new, old, advantages, mask, clip_range=0.2, clip_range_high=0.0, c_clip=0.0):
    """Compose the loss as PPOLosses does."""
    ratio = policy_log_ratio(new, old, mask).exp()
    advantages = torch.where(mask, advantages, 0.0)
    loss = clipped_surrogate(ratio, advantages, clip_range, clip_range_high)
    return dual_clip(loss, advantages, c_clip) if c_clip else loss


def test_policy_loss_and_gradient_by_hand():
    """O20: clamp to 0.8 ... 1.2. O21: old against new. O22: no gradient beyond the bound."""
    ratios = torch.tensor([[1.0, 1.5, 0.5, 1.1], [1.5, 0.5, 1.0, 1.0]])
    advantages = torch.tensor([[2.0, 2.0, 2.0, -3.0], [-1.0, -1.0, 4.0, 4.0]])
    mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
    old = torch.full((2, 4), -2.0)
    new = (old + ratios.log()).requires_grad_()
    loss = policy_loss(new, old, advantages, mask)
    loss.sum().backward()
    # -2 * 1; -2 * 1.2, at the bound; -2 * 0.5: worse, so not clipped; 3 * 1.1
    # 1 * 1.5: worse, so not clipped; 1 * 0.8, at the bound; -4 * 1; padding
    close(loss, [[-2.0, -2.4, -1.0, 3.3], [1.5, 0.8, -4.0, 0.0]])
    close(new.grad, [[-2.0, 0.0, -1.0, 3.3], [1.5, 0.0, -4.0, 0.0]])


def test_policy_loss_with_a_higher_upper_bound_and_a_bounded_negative_side():
    """O20, A20: clip_range_high and c_clip."""
    # 1.25 is inside a range to 1.28; 1.3 is not; -A * 4 is bounded to 3; the lower bound stays 0.8
    new = torch.tensor([[1.25, 1.3, 4.0, 0.75]]).log().requires_grad_()
    advantages, mask = torch.tensor([[1.0, 1.0, -1.0, -1.0]]), torch.ones(1, 4).bool()
    loss = policy_loss(new, torch.zeros(1, 4), advantages, mask, 0.2, 0.28, 3.0)
    loss.sum().backward()
    close(loss, [[-1.25, -1.28, 3.0, 0.8]])
    close(new.grad, [[-1.25, 0.0, 0.0, 0.0]])


def test_policy_loss_and_its_gradient_do_not_read_padding():
    """O24: log_ratio * mask. A23: where, since NaN * 0 is NaN. O9: flat tokens have the same loss."""
    new, old, advantages, mask = random_batch(3)
    leaf = new.clone().requires_grad_()
    expected = policy_loss(leaf, old, advantages, mask)
    expected.sum().backward()
    assert torch.equal(policy_loss(new[mask], old[mask], advantages[mask], mask[mask]), expected[mask])
    for padding in PADDING:
        filled = [fill(x, mask, padding) for x in (new, old, advantages)]
        filled[0].requires_grad_()
        loss = policy_loss(*filled, mask)
        loss.sum().backward()
        assert torch.equal(loss, expected)
        assert torch.equal(filled[0].grad, leaf.grad) and leaf.grad[~mask].eq(0).all()


def test_only_new_logprobs_get_a_gradient():
    """O18, O23."""
    new, old, _, mask = random_batch(3)
    leaves = [x.requires_grad_() for x in (new, old)]
    policy_log_ratio(*leaves, mask).sum().backward()
    assert new.grad is not None and old.grad is None
    assert not behaviour_weights(new, old, mask)[0].requires_grad


def test_an_overflowing_ratio_that_is_clipped_has_a_finite_gradient():
    new = torch.tensor([[200.0, 0.0]], requires_grad=True)  # exp(200) is infinite in fp32
    loss = policy_loss(new, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool())
    loss.sum().backward()
    close(loss, [[-1.2, -1.0]])
    close(new.grad, [[0.0, -1.0]])


def test_losses_of_bf16_inputs_are_fp32():
    """O27."""
    *tensors, mask = random_batch(3)
    new, old, other = (x.bfloat16() for x in tensors)
    assert policy_loss(new, old, other, mask).dtype == torch.float32
    assert behaviour_weights(new, old, mask)[0].dtype == torch.float32
    for kind in ("mse", "huber"):
        assert value_loss_terms(new, old, other, mask, clip_range=0.2, kind=kind)[0].dtype == torch.float32


# --- the decoupled loss ---


def test_behaviour_weights_by_hand():
    """A14, A16: prox against the sampler. A21: the cap drops a token. A23: padding is not read."""
    weights = torch.tensor([[1.0, 2.0, 0.5, 3.0, 4.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, True, False]])
    old = torch.tensor([[0.0] * 5 + [math.nan]])
    found, has_weight = behaviour_weights(weights.log(), old, mask, cap=3.5)
    close(found, [[1.0, 2.0, 0.5, 3.0, 0.0, 0.0]])
    assert has_weight.tolist() == [[True, True, True, True, False, False]]
    close(behaviour_weights(weights.log(), old, mask)[0], [[1.0, 2.0, 0.5, 3.0, 4.0, 0.0]])
    prox = torch.full((1, 6), math.nan)  # a number that is none shows where it counts
    assert behaviour_weights(prox, old, mask, cap=3.5)[0].isnan().tolist() == mask.tolist()


def test_the_decoupled_loss_and_its_statistics_by_hand():
    """A14, A22: what is logged is the mean over the tokens that are not capped. A3: its own count."""
    weights, ratios = torch.tensor([2.0, 1.0, 4.0, 9.0]), torch.tensor([1.5, 1.0, 0.5, 9.0])
    mask, old = torch.tensor([True, True, True, False]), torch.full((4,), -3.0)
    prox = old + weights.log()
    data = {"old_logprobs": old, "prox_logprobs": prox, "rollout_logprobs": old, "loss_mask": mask}
    data |= {"advantages": torch.tensor([1.0, -1.0, 1.0, 1.0]), "loss_weights": mask.float()}
    new = prox + ratios.log()
    actor = SimpleNamespace(compute_logprobs=lambda *_, **__: (new, torch.zeros(4)))
    args = PPOArguments(use_decoupled_loss=True, behav_imp_weight_cap=3.0, clip_range=0.2)
    losses = PPOLosses(
        fill_defaults(args, ALGORITHMS["ppo"]), SimpleNamespace(actor=actor), KLController(0.1)
    )
    found, stats = losses._policy_sums(PackedBatch.build([0], {key: [x] for key, x in data.items()}))
    # 2 * -1 * 1.2, at the bound; 1 * 1 * 1; the weight of 4 is above the cap; padding
    assert float(found) == pytest.approx(-2.4 + 1.0, abs=1e-5)
    means = {"behav_imp_weight": (2 + 1) / 2, "behav_kl": math.log(2) / 2, "ratio": (1.5 + 1 + 0.5) / 3}
    for name, mean in means.items():
        total, count = stats[f"policy/{name}"]
        assert float(total / count) == pytest.approx(mean, abs=1e-5), name


# --- the critic's loss ---


VALUES = (
    torch.tensor([1.0, 2.0, 2.0, 0.0, 2.5, 5.0]),
    torch.tensor([1.1, 1.0, 1.0, 1.0, 2.5, 0.0]),
    torch.tensor([3.0, 3.0, 0.0, 3.0, 3.0, 0.0]),
)
VALUE_MASK = torch.tensor([True, True, True, True, True, False])


def check_value_loss(form, kind, expected, slopes):
    """Check losses and gradients, whatever stands in the padding: only the new values get any."""
    for padding in PADDING:
        leaves = [fill(x, VALUE_MASK, padding).requires_grad_() for x in VALUES]
        loss, is_clipped = form(*leaves, VALUE_MASK, clip_range=0.2, kind=kind)
        close(loss, expected)
        assert is_clipped.tolist() == [False, True, False, False, False, False]
        loss.sum().backward()
        close(leaves[0].grad, slopes)
        assert leaves[1].grad is None and leaves[2].grad is None


@forms(
    value_loss_terms,
    around_the_return=lambda new, old, *rest, **o: value_loss_terms(new, rest[0], *rest, **o),
    reads_padding=lambda *x, **o: value_loss_terms(*x[:3], torch.ones(6).bool(), **o),
)
def test_value_loss_by_hand(form, is_right):
    """O25, O26: half the larger square, cliprange_value 0.2. O28: the new value against the old return."""

    def check(form):
        # inside: (1 - 3)^2 / 2; towards the return too far: (1.2 - 3)^2 / 2, without a gradient;
        # away from it: 2^2 / 2 and (0 - 3)^2 / 2; inside: 0.5^2 / 2
        check_value_loss(form, "mse", [2.0, 1.62, 2.0, 4.5, 0.125, 0.0], [-2.0, 0.0, 2.0, -3.0, -0.5, 0.0])

    judge(check, form, is_right)


def test_huber_value_loss_by_hand():
    """O25: value_loss mse or huber."""
    # |e| - 1/2 above 1: 2 -> 1.5; 1 and, clipped to 1.2, 1.8 -> 1.3; 2 -> 1.5; 3 -> 2.5; 0.5 -> 0.25 / 2
    losses, slopes = [1.5, 1.3, 1.5, 2.5, 0.125, 0.0], [-1.0, 0.0, 1.0, -1.0, -0.5, 0.0]
    check_value_loss(value_loss_terms, "huber", losses, slopes)


def test_a_value_inside_its_range_is_not_counted_as_clipped_by_rounding():
    old = torch.linspace(1, 1000, 5000)[None]
    new = old + 0.01 * torch.randn(old.shape, generator=torch.Generator().manual_seed(0))
    everything = torch.ones_like(old).bool()
    assert not value_loss_terms(new, old, torch.zeros_like(old), everything, clip_range=0.2)[1].any()


# --- weights: how token losses become one number ---


def test_weights_by_hand():
    """O24: the seed's sum over mask by mask.sum() is "token"; A18: of each response alone, so for any cut."""
    mask = torch.arange(4) < torch.tensor([3, 1, 0])[:, None]
    ones, thirds = mask.float().tolist(), [[1 / 3] * 3 + [0], [1, 0, 0, 0], [0] * 4]
    expected = {"token": (ones, [3, 1, 0]), "sequence": (thirds, [1, 1, 0]), "constant": (ones, [5, 5, 5])}
    for aggregation, (of_tokens, of_responses) in expected.items():
        weights, counts = loss_weights(mask, aggregation, 5)
        close(weights, of_tokens)
        assert counts.tolist() == of_responses
        assert weights.dtype == torch.float32 and counts.dtype == torch.float64
        weights, counts = loss_weights(torch.zeros(2, 3).bool(), aggregation, 7)  # A24: nothing counts
        assert weights.eq(0).all() and float(counts.sum()) == (14 if aggregation == "constant" else 0)
