"""KL estimates, KL as a loss, and the controller: by hand, against loops and wrong forms.

O8 and the like in a docstring are rows of the seeds.
"""

import math
from itertools import product

import pytest
import torch
from right_or_wrong import close, forms, judge
from rollout_batches import PADDING

from step3_ppo.ppo_math import KLController, kl_estimate, kl_loss_terms


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
