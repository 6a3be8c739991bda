"""The policy loss of PPO and its decoupled form: by hand, against float64 loops and wrong forms.

O20 and the like in a docstring are rows of the seeds.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from response_batches import PADDING, fill, random_batch
from right_or_wrong import close, forms, judge

from common.data.packed_batch import PackedBatch
from step3_ppo.algorithms import ALGORITHMS, fill_defaults
from step3_ppo.arguments import PPOArguments
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import behaviour_weights, clipped_surrogate, dual_clip, policy_log_ratio


def policy_loss(new, old, advantages, mask, clip_range=0.2, clip_range_high=0.0, c_clip=0.0):
    """Compose the loss as PPOLosses does."""
    ratio = policy_log_ratio(new, old, mask).exp()
    advantages = torch.where(mask, advantages, 0.0)
    loss = clipped_surrogate(ratio, advantages, clip_range, clip_range_high)
    return dual_clip(loss, advantages, c_clip) if c_clip else loss


def loop_policy_loss(new, old, advantages, mask, low, high, bound=None):
    loss = torch.zeros(new.shape, dtype=torch.float64)
    for i, t in mask.nonzero().tolist():
        advantage = advantages[i, t].item()
        ratio = math.exp(new[i, t].item() - old[i, t].item())
        loss[i, t] = max(-advantage * ratio, -advantage * min(max(ratio, low), high))
        if bound and advantage < 0:
            loss[i, t] = min(loss[i, t].item(), -advantage * bound)
    return loss


def wrong(ratio_of, *, worst=torch.maximum, is_clamped=True, sign=-1):
    """Return the textbook form with one thing wrong."""

    def form(new, old, advantages, mask):
        ratio = ratio_of(new, old)
        bounded = ratio.clamp(0.8, 1.2) if is_clamped else ratio
        return torch.where(mask, worst(sign * advantages * ratio, sign * advantages * bounded), 0.0)

    return form


def exp_ratio(new, old):
    return (new - old).exp()


POLICY_FORMS = forms(
    policy_loss,
    ratio_without_exp=wrong(lambda new, old: new - old),
    ratio_upside_down=wrong(lambda new, old: (old - new).exp()),
    optimistic_bound=wrong(exp_ratio, worst=torch.minimum),
    not_clipped=wrong(exp_ratio, is_clamped=False),
    sign=wrong(exp_ratio, sign=1),
)


@POLICY_FORMS
def test_policy_loss_and_gradient_by_hand(form, is_right):
    """O20: clamp to 0.8 ... 1.2. O21: old against new. O22: no gradient beyond the bound."""

    def check(form):
        ratios = torch.tensor([[1.0, 1.5, 0.5, 1.1], [1.5, 0.5, 1.0, 1.0]])
        advantages = torch.tensor([[2.0, 2.0, 2.0, -3.0], [-1.0, -1.0, 4.0, 4.0]])
        mask = torch.tensor([[True, True, True, True], [True, True, True, False]])
        old = torch.full((2, 4), -2.0)
        new = (old + ratios.log()).requires_grad_()
        loss = form(new, old, advantages, mask)
        loss.sum().backward()
        # -2 * 1; -2 * 1.2, at the bound; -2 * 0.5: worse, so not clipped; 3 * 1.1
        # 1 * 1.5: worse, so not clipped; 1 * 0.8, at the bound; -4 * 1; padding
        close(loss, [[-2.0, -2.4, -1.0, 3.3], [1.5, 0.8, -4.0, 0.0]])
        close(new.grad, [[-2.0, 0.0, -1.0, 3.3], [1.5, 0.0, -4.0, 0.0]])

    judge(check, form, is_right)


@POLICY_FORMS
def test_policy_loss_equals_a_float64_loop(form, is_right):
    def check(form):
        new, old, advantages, mask = random_batch(3)
        loss = form(new / 3, old / 3, advantages, mask)
        close(loss, loop_policy_loss(new / 3, old / 3, advantages, mask, 0.8, 1.2))

    judge(check, form, is_right)


def test_policy_loss_with_a_higher_upper_bound_and_a_bounded_negative_side():
    """O20, A20: clip_range_high and c_clip."""
    new, old, advantages, mask = random_batch(3)
    loss = policy_loss(new, old, advantages, mask, 0.2, 0.28, 3.0)
    close(loss, loop_policy_loss(new, old, advantages, mask, 0.8, 1.28, 3.0))
    # 1.25 is inside a range to 1.28; 1.3 is not; -A * 4 is bounded to 3
    new = torch.tensor([[1.25, 1.3, 4.0]]).log().requires_grad_()
    advantages, mask = torch.tensor([[1.0, 1.0, -1.0]]), torch.ones(1, 3).bool()
    loss = policy_loss(new, torch.zeros(1, 3), advantages, mask, 0.2, 0.28, 3.0)
    loss.sum().backward()
    close(loss, [[-1.25, -1.28, 3.0]])
    close(new.grad, [[-1.25, 0.0, 0.0]])


@forms(policy_loss, all_positions=lambda *x: policy_loss(*x[:3], torch.ones_like(x[3])))
def test_policy_loss_and_its_gradient_do_not_read_padding(form, is_right):
    """O24: log_ratio * mask. A23: where, since NaN * 0 is NaN. O9: flat tokens have the same loss."""

    def check(form):
        new, old, advantages, mask = random_batch(3)
        leaf = new.clone().requires_grad_()
        expected = policy_loss(leaf, old, advantages, mask)
        expected.sum().backward()
        assert torch.equal(policy_loss(new[mask], old[mask], advantages[mask], mask[mask]), expected[mask])
        for padding in PADDING:
            filled = [fill(x, mask, padding) for x in (new, old, advantages)]
            filled_leaf = filled[0].requires_grad_()
            loss = form(*filled, mask)
            assert torch.equal(loss, expected)
            loss.sum().backward()
            assert torch.equal(filled_leaf.grad, leaf.grad) and leaf.grad[~mask].eq(0).all()

    judge(check, form, is_right)


def test_only_new_logprobs_get_a_gradient():
    """O18, O23."""
    new, old, _, mask = random_batch(3)
    leaves = [x.requires_grad_() for x in (new, old)]
    policy_log_ratio(*leaves, mask).sum().backward()
    assert new.grad is not None and old.grad is None
    assert not behaviour_weights(new, old, mask)[0].requires_grad


@forms(policy_loss, not_bounded=wrong(exp_ratio))
def test_an_overflowing_ratio_that_is_clipped_has_a_finite_gradient(form, is_right):
    def check(form):
        new = torch.tensor([[200.0, 0.0]], requires_grad=True)  # exp(200) is infinite in fp32
        loss = form(new, torch.zeros(1, 2), torch.ones(1, 2), torch.ones(1, 2).bool())
        loss.sum().backward()
        close(loss, [[-1.2, -1.0]])
        close(new.grad, [[0.0, -1.0]])

    judge(check, form, is_right)


def test_policy_losses_of_bf16_inputs_are_fp32():
    """O27."""
    new, old, advantages, mask = random_batch(3)
    assert policy_loss(new.bfloat16(), old.bfloat16(), advantages, mask).dtype == torch.float32
    assert behaviour_weights(new.bfloat16(), old.bfloat16(), mask)[0].dtype == torch.float32


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


def loop_means(data, args):
    """Return the decoupled loss and the statistics of flat tokens, one after the other."""
    loss, weights, kls, ratios = 0.0, [], [], []
    for i in data["loss_mask"].nonzero()[:, 0].tolist():
        new, old, prox = (data[k][i].item() for k in ("new", "old_logprobs", "prox_logprobs"))
        advantage, ratio, weight = data["advantages"][i].item(), math.exp(new - prox), math.exp(prox - old)
        ratios.append(ratio)
        if weight <= args.behav_imp_weight_cap:
            loss += max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)) * weight
            weights.append(weight)
            kls.append(prox - old)
    return loss, {"behav_imp_weight": weights, "behav_kl": kls, "ratio": ratios}


@pytest.mark.parametrize("wrong_by", ["", "ratio_to_the_sampler", "weight_upside_down"])
def test_the_decoupled_loss_and_its_statistics_equal_a_float64_loop(wrong_by):
    """A14, A22: what is logged is the mean over the tokens that are not capped. A3: its own count."""
    new, old, prox, advantages, mask = (x.flatten() for x in random_batch(4))
    data = {"new": new / 3, "old_logprobs": old / 3, "prox_logprobs": prox / 3, "advantages": advantages}
    data |= {"loss_mask": mask, "loss_weights": mask.float(), "rollout_logprobs": old / 3}
    actor = SimpleNamespace(engine=None, compute_logprobs=lambda *_, **__: (data["new"], torch.zeros(45)))
    args = PPOArguments(use_decoupled_loss=True, behav_imp_weight_cap=1.3, clip_range=0.2)
    losses = PPOLosses(fill_defaults(args, ALGORITHMS["ppo"]), SimpleNamespace(actor=actor))
    found, stats = losses._policy_sums(PackedBatch.build([0], {key: [x] for key, x in data.items()}))
    if wrong_by == "ratio_to_the_sampler":
        data["prox_logprobs"] = data["old_logprobs"]
    elif wrong_by == "weight_upside_down":
        data["prox_logprobs"], data["old_logprobs"] = data["old_logprobs"], data["prox_logprobs"]
    loss, values = loop_means(data, args)
    if wrong_by:
        assert float(found) != pytest.approx(loss, abs=1e-3)
        return
    assert (
        float(found) == pytest.approx(loss, abs=1e-5) and len(values["ratio"]) > len(values["behav_kl"]) > 0
    )
    for name, of_tokens in values.items():
        total, count = stats[f"policy/{name}"]
        assert float(total / count) == pytest.approx(sum(of_tokens) / len(of_tokens), abs=1e-5), name
