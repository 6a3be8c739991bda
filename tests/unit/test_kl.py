"""KL estimates, KL as a loss, and the controller: by hand, against loops and wrong forms.

O8 and the like in a docstring are rows of the seeds.
"""

import math

import pytest
import torch
from response_batches import PADDING, fill, random_batch
from right_or_wrong import close, forms, judge

from step3_ppo.ppo_math import KL_HORIZON, KLController, kl_estimate, kl_loss_terms


def in_fp32(logprobs, ref_logprobs, estimator):
    d = logprobs - ref_logprobs
    return {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[estimator]


@forms(
    kl_estimate,
    sign=lambda logprobs, ref, estimator: kl_estimate(ref, logprobs, estimator),
    k2_for_k3=lambda logprobs, ref, estimator: kl_estimate(
        logprobs, ref, {"k3": "k2"}.get(estimator, estimator)
    ),
    in_fp32=in_fp32,
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


def test_the_means_of_k1_and_k3_are_the_kl_and_k3_has_no_negative_entry():
    policy, reference = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.3, 0.3, 0.4]).double()
    kl = (policy * (policy / reference).log()).sum()
    for estimator in ("k1", "k3"):
        close((policy * kl_estimate(policy.log(), reference.log(), estimator)).sum(), kl)
    assert (kl_estimate(policy.log(), reference.log(), "k3") >= 0).all()


def plain_kl_loss(*, sign=1, detach_policy=False, detach_reference=True):
    """Return the textbook form, from which one thing at a time is made wrong."""

    def form(new, ref, mask, estimator):
        new = new.detach() if detach_policy else new
        ref = ref.detach() if detach_reference else ref
        d = sign * (new.double() - ref.double())
        values = {"k1": d, "k2": d.square() / 2, "k3": (-d).exp() - 1 + d}[estimator]
        return torch.where(mask, values, 0.0).float()

    return form


@forms(
    kl_loss_terms,
    sign=plain_kl_loss(sign=-1),
    detached=plain_kl_loss(detach_policy=True),
    reference_not_detached=plain_kl_loss(detach_reference=False),
    k1_for_k2=lambda new, ref, mask, estimator: kl_loss_terms(
        new, ref, mask, {"k2": "k1"}.get(estimator, estimator)
    ),
)
def test_kl_losses_and_their_gradients_by_hand(form, is_right):
    """O8: the penalty in the loss. Only the new log-probabilities get a gradient."""

    def check(form):
        # p = 1/2, 1/8; reference 1/4: d = log 2, -log 2; the third token is padding
        log2 = math.log(2)
        expected = {  # values, d value / d logprob: 1; d; 1 - exp(-d)
            "k1": ([log2, -log2, 0.0], [1.0, 1.0, 0.0]),
            "k2": ([log2**2 / 2, log2**2 / 2, 0.0], [log2, -log2, 0.0]),
            "k3": ([log2 - 0.5, 1 - log2, 0.0], [0.5, -1.0, 0.0]),
        }
        for estimator, (values, slopes) in expected.items():
            new = torch.tensor([1 / 2, 1 / 8, 1 / 16]).log().requires_grad_()
            ref = torch.tensor([1 / 4, 1 / 4, 1 / 4]).log().requires_grad_()
            terms = form(new, ref, torch.tensor([True, True, False]), estimator)
            assert terms.requires_grad and terms.dtype == torch.float32
            close(terms, values)
            terms.sum().backward()
            close(new.grad, slopes)
            assert ref.grad is None

    judge(check, form, is_right)


def expected_gradient(estimator, logits, reference):
    """Return the mean over tokens drawn from softmax(logits) of the loss's gradient in the logits."""
    total = torch.zeros_like(logits)
    for token, probability in enumerate(logits.softmax(-1).tolist()):
        leaf = logits.clone().requires_grad_()
        logprob = leaf.log_softmax(-1)[[token]]
        loss = kl_loss_terms(logprob, reference[[token]].log(), torch.ones(1).bool(), estimator)
        (gradient,) = torch.autograd.grad(loss.sum(), leaf)
        total += probability * gradient
    return total


def test_the_mean_gradients_are_what_the_docstring_says():
    """O8: k1 regularises nothing, k2 is KL(policy || reference), k3 is KL(reference || policy)."""
    logits = torch.tensor([0.3, -0.5, 0.9, 0.0], dtype=torch.float64)
    reference = torch.tensor([0.4, 0.3, 0.1, 0.2], dtype=torch.float64)
    leaf = logits.clone().requires_grad_()
    policy = leaf.softmax(-1)
    (reverse,) = torch.autograd.grad((policy * (policy / reference).log()).sum(), leaf, retain_graph=True)
    (forward,) = torch.autograd.grad((reference * (reference / policy).log()).sum(), leaf)
    for estimator, gradient in {"k1": torch.zeros(4), "k2": reverse, "k3": forward}.items():
        close(expected_gradient(estimator, logits, reference), gradient)
    assert (reverse - forward).abs().max() > 0.05  # the example can tell them apart


@forms(
    kl_loss_terms,
    where_after=lambda new, ref, mask, estimator: torch.where(mask, kl_estimate(new, ref, estimator), 0.0),
)
def test_kl_losses_and_their_gradients_do_not_read_padding(form, is_right):
    def check(form):
        new, ref, mask = random_batch(2)
        for estimator in ("k1", "k2", "k3"):
            leaf = new.clone().requires_grad_()
            expected = kl_loss_terms(leaf, ref, mask, estimator)
            expected.sum().backward()
            for padding in PADDING:
                filled = fill(new, mask, padding).requires_grad_()
                terms = form(filled, fill(ref, mask, padding), mask, estimator)
                terms.sum().backward()
                assert torch.equal(terms, expected) and torch.equal(filled.grad, leaf.grad)

    judge(check, form, is_right)


# --- KLController ---


def test_a_fixed_coefficient_stays():
    controller = KLController(0.1)
    controller.update(1e9, 64)
    controller.update(math.nan, 64)
    assert controller.coef == 0.1


class ErrorNotClipped(KLController):
    def update(self, mean_kl, num_samples):
        self.coef *= 1 + (mean_kl / self.target - 1) * num_samples / KL_HORIZON


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
    """O5, R56: a fixed coefficient is the default, this is the other. A resumed one continues."""

    def check(form):
        controller = form(0.2, 6.0)
        controller.update(6.6, 1000)  # error 0.1: 1 + 0.1 * 1000 / 10000 = 1.01
        assert controller.coef == pytest.approx(0.2 * 1.01, rel=1e-9)
        controller.update(60.0, 1000)  # error clipped to 0.2: 1.02
        assert controller.coef == pytest.approx(0.2 * 1.01 * 1.02, rel=1e-9)
        resumed = form(0.7, 6.0)
        resumed.load_state_dict(controller.state_dict())
        resumed.update(0.0, 5000)  # error clipped to -0.2: 0.9
        assert resumed.coef == pytest.approx(0.2 * 1.01 * 1.02 * 0.9, rel=1e-9)
        # Six horizons and a half in one step: the factor of one horizon six times, and that of a half.
        resumed.update(0.0, 65_000)
        assert resumed.coef == pytest.approx(0.2 * 1.01 * 1.02 * 0.9 * 0.8**6 * 0.9, rel=1e-9)

    judge(check, form, is_right)
