"""The decoupled policy loss: by hand, against a float64 loop and wrong forms.

A14 and the like in a docstring are rows of the seeds.
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
from step3_ppo.ppo_math import PolicyLossTerms, policy_loss_terms


def decoupled(new, old, prox, advantages, mask, **options):
    return policy_loss_terms(new, old, advantages, mask, **{"clip_range": 0.2} | options, prox_logprobs=prox)


def plain_decoupled(*, ratio_to="prox", weight_of="prox/old", capped="zero", clip="ratio", detach=True):
    """Return the textbook form, from which one thing at a time is made wrong."""

    def form(new, old, prox, advantages, mask, *, behav_imp_weight_cap=None):
        old, prox = (old.detach(), prox.detach()) if detach else (old, prox)
        kl = prox - old if weight_of == "prox/old" else old - prox
        weight = kl.exp() if weight_of else torch.ones_like(old)
        counts = mask & (weight <= (behav_imp_weight_cap or math.inf))
        if capped == "clamp":
            weight, counts = weight.clamp(max=behav_imp_weight_cap or math.inf), mask
        ratio = (new - {"prox": prox, "old": old}[ratio_to]).exp()
        outer = weight
        if clip == "product":  # clips the move from the sampler, not that of the policy
            ratio, outer = ratio * weight, torch.ones_like(weight)
        loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)) * outer
        seen = counts if capped == "zero" else mask
        loss = torch.where(counts, loss, 0.0)
        kl, weight = torch.where(seen, kl, 0.0), torch.where(seen, weight, 0.0)
        zeros = torch.zeros_like(loss.detach())
        ratio = torch.where(mask, ratio, 0.0).detach()
        return PolicyLossTerms(loss, ratio, zeros.bool(), zeros, kl, weight, counts)

    return form


DECOUPLED_FORMS = forms(
    decoupled,
    ratio_to_the_sampler=plain_decoupled(ratio_to="old"),
    no_weight=plain_decoupled(weight_of=""),
    weight_upside_down=plain_decoupled(weight_of="old/prox"),
    clips_the_product=plain_decoupled(clip="product"),
    cap_clamps=plain_decoupled(capped="clamp"),
    cap_left_in_the_statistics=plain_decoupled(capped="loss only"),
)


@DECOUPLED_FORMS
def test_decoupled_loss_by_hand(form, is_right):
    """A14, A16: prox_logp is the denominator, the loss weighs behav_imp_weight. A21: the cap. A22: shown."""

    def check(form):
        ratios = torch.tensor([[1.5, 1.1, 0.5, 1.5, 1.0, 1.0]])
        weights = torch.tensor([[1.0, 2.0, 0.5, 2.0, 4.0, 1.0]])
        advantages = torch.tensor([[2.0, 2.0, -1.0, -1.0, 3.0, 3.0]])
        mask = torch.tensor([[True, True, True, True, True, False]])
        old = torch.full((1, 6), -2.0)
        prox = old + weights.log()
        new = (prox + ratios.log()).requires_grad_()
        terms = form(new, old, prox, advantages, mask, behav_imp_weight_cap=3.0)
        # -2 * 1.2, at the bound; -2 * 1.1 * 2; 1 * 0.8 * 0.5, at the bound; 1.5 * 2; 4 is above the cap
        close(terms.loss, [[-2.4, -4.4, 0.4, 3.0, 0.0, 0.0]])
        close(terms.ratio, [[1.5, 1.1, 0.5, 1.5, 1.0, 0.0]])
        log2 = math.log(2)
        close(terms.behav_kl, [[0.0, log2, -log2, log2, 0.0, 0.0]])
        close(terms.behav_imp_weight, [[1.0, 2.0, 0.5, 2.0, 0.0, 0.0]])
        terms.loss.sum().backward()
        close(new.grad, [[0.0, -4.4, 0.0, 3.0, 0.0, 0.0]], atol=2e-6)

    judge(check, form, is_right)


@DECOUPLED_FORMS
def test_decoupled_loss_equals_a_float64_loop(form, is_right):
    """A14, A21, A22."""

    def check(form):
        new, old, prox, advantages, mask = random_batch(4)
        new, old, prox = new / 3, old / 3, prox / 3
        for cap in (None, 1.3):
            terms = form(new, old, prox, advantages, mask, behav_imp_weight_cap=cap)
            loss, kl, weight = (torch.zeros(mask.shape, dtype=torch.float64) for _ in range(3))
            for i, t in mask.nonzero().tolist():
                log_weight = prox[i, t].item() - old[i, t].item()
                if cap and math.exp(log_weight) > cap:
                    continue
                ratio = math.exp(new[i, t].item() - prox[i, t].item())
                a = advantages[i, t].item()
                kl[i, t], weight[i, t] = log_weight, math.exp(log_weight)
                loss[i, t] = max(-a * ratio, -a * min(max(ratio, 0.8), 1.2)) * math.exp(log_weight)
            has_weight = (weight > 0).float()
            shown = (terms.loss, terms.behav_kl, terms.behav_imp_weight, terms.has_weight.float())
            for found, expected in zip(shown, (loss, kl, weight, has_weight), strict=True):
                close(found, expected, atol=2e-6)

    judge(check, form, is_right)


def test_the_logged_weights_are_means_over_the_tokens_that_are_not_capped():
    """A3, A22: one of five tokens is capped, one does not count."""
    weights = torch.tensor([1.5, 4.0, 0.5, 1.0, 1.0])
    zeros, mask = torch.zeros(5), torch.tensor([True, True, True, True, False])
    keys = {"prox_logprobs": weights.log(), "loss_mask": mask, "loss_weights": mask.float()}
    keys |= {name: zeros for name in ("old_logprobs", "rollout_logprobs", "advantages")}
    actor = SimpleNamespace(engine=None, compute_logprobs=lambda *_, **__: (weights.log(), zeros))
    args = PPOArguments(use_decoupled_loss=True, behav_imp_weight_cap=2.0)
    losses = PPOLosses(fill_defaults(args, ALGORITHMS["ppo"]), SimpleNamespace(actor=actor))
    _, stats = losses._policy_sums(PackedBatch.single(0, **keys))
    means = {name: float(total / count) for name, (total, count) in stats.items()}
    assert means["policy/behav_imp_weight"] == pytest.approx((1.5 + 0.5 + 1.0) / 3)
    assert means["policy/behav_kl"] == pytest.approx((math.log(1.5) + math.log(0.5)) / 3)
    assert means["policy/ratio"] == pytest.approx(1.0)


def test_a_policy_that_sampled_itself_has_exactly_the_plain_loss():
    """A15: right after the rollout the recomputed policy is the sampler."""
    new, old, advantages, mask = random_batch(3)
    options = {"clip_range": 0.2, "clip_range_high": 0.3, "dual_clip": 3.0}
    leaves = [new.clone().requires_grad_() for _ in range(2)]
    plain = policy_loss_terms(leaves[0], old, advantages, mask, **options)
    found = decoupled(leaves[1], old, old.clone(), advantages, mask, **options, behav_imp_weight_cap=1.0)
    assert all(map(torch.equal, found[:5], plain[:5]))
    assert torch.equal(found.behav_imp_weight, mask.float())  # a weight at the cap counts
    for terms in (plain, found):
        terms.loss.sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_without_prox_there_is_no_weight_and_no_cap():
    new, old, advantages, mask = random_batch(3)
    plain = policy_loss_terms(new, old, advantages, mask, clip_range=0.2)
    capped = policy_loss_terms(new, old, advantages, mask, clip_range=0.2, behav_imp_weight_cap=0.5)
    assert all(map(torch.equal, plain, capped))
    assert plain.behav_kl.eq(0).all() and plain.behav_imp_weight.eq(0).all()


@forms(decoupled, not_detached=plain_decoupled(detach=False))
def test_the_weight_is_a_constant(form, is_right):
    """A14, O23: only the new policy is trained."""

    def check(form):
        new, old, prox, advantages, mask = random_batch(4)
        for x in (new, old, prox):
            x.requires_grad_()
        terms = form(new, old, prox, advantages, mask)
        terms.loss.sum().backward()
        assert new.grad is not None and old.grad is None and prox.grad is None
        assert not any(x.requires_grad for x in terms[1:])

    judge(check, form, is_right)


def test_decoupled_loss_and_its_gradient_do_not_read_padding():
    """A23."""
    new, old, prox, advantages, mask = random_batch(4)
    leaf = new.clone().requires_grad_()
    expected = decoupled(leaf, old, prox, advantages, mask, behav_imp_weight_cap=1.5)
    expected.loss.sum().backward()
    assert 0 < (expected.behav_imp_weight == 0)[mask].sum() < mask.sum()
    for padding in PADDING:
        filled = [fill(x, mask, padding) for x in (new, old, prox, advantages)]
        filled_leaf = filled[0].requires_grad_()
        terms = decoupled(*filled, mask, behav_imp_weight_cap=1.5)
        assert all(map(torch.equal, terms, expected))
        terms.loss.sum().backward()
        assert torch.equal(filled_leaf.grad, leaf.grad) and leaf.grad[~mask].eq(0).all()


def test_packed_tokens_and_padded_rows_have_the_same_decoupled_terms():
    """A10, O9: sequences end to end, without padding."""
    *tensors, mask = random_batch(4)
    padded = decoupled(*tensors, mask, behav_imp_weight_cap=1.5)
    flat = decoupled(*(x[mask] for x in tensors), mask[mask], behav_imp_weight_cap=1.5)
    assert all(torch.equal(x, y[mask]) for x, y in zip(flat, padded, strict=True))


@forms(decoupled, max_and_clamp=plain_decoupled())
def test_a_capped_token_has_a_finite_gradient_of_0(form, is_right):
    def check(form):
        old = torch.tensor([-300.0, -1.0])
        prox, new = torch.tensor([-200.0, -1.0]), torch.tensor([0.0, -1.0], requires_grad=True)
        terms = form(new, old, prox, -torch.ones(2), torch.ones(2).bool(), behav_imp_weight_cap=2.0)
        terms.loss.sum().backward()  # exp(100) and exp(200) are infinite in fp32
        close(terms.loss, [0.0, 1.0])
        close(new.grad, [0.0, 1.0])

    judge(check, form, is_right)


def test_a_number_that_is_none_shows_where_it_counts():
    new, old, prox, advantages, mask = random_batch(4)
    prox[0, 0] = math.nan
    assert decoupled(new, old, prox, advantages, mask, behav_imp_weight_cap=1.5).loss[0, 0].isnan()
