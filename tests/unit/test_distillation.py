"""What --distill_loss says, and what a teacher adds to the loss of the actor: by hand."""

import re
from types import SimpleNamespace

import pytest
import torch
from right_or_wrong import close

from common.data.packed_batch import PackedBatch
from step3_ppo.algorithms import ALGORITHMS, fill_defaults
from step3_ppo.arguments import PPOArguments
from step3_ppo.distillation import DistillLoss, parse_distill_loss
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import KLController


def distilled(data: dict, **flags):
    """The policy's sums where the actor says -1, -2, -3, -4; its divergences from the teacher are 1 to 4."""
    new = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    divergences = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)

    def compute_divergence(batch, teacher, beta, token_weights):
        assert teacher == "teacher" and beta == 0.3
        return new, torch.zeros(4), (divergences * token_weights).sum(), divergences.detach()

    says = {
        "compute_logprobs": lambda *_, **__: (new, torch.zeros(4)),
        "compute_divergence": compute_divergence,
    }
    actor = SimpleNamespace(model=SimpleNamespace(router_loss=None), **says)
    args = PPOArguments(algorithm="distill", teacher_model_name_or_path="t", **flags)
    roles = SimpleNamespace(actor=actor, reference="teacher")
    losses = PPOLosses(fill_defaults(args, ALGORITHMS["distill"]), roles, KLController(0.1))
    columns = {"old_logprobs": new.detach(), "rollout_logprobs": new.detach()}
    columns |= {"ref_logprobs": torch.tensor([-0.5, -3.0, -3.0, 9.0])}
    columns |= {"loss_mask": torch.tensor([True, True, True, False])}
    columns |= {"response_ids": torch.zeros(4, dtype=torch.int64)}
    columns |= {"loss_weights": torch.tensor([1.0, 0.5, 0.5, 0.0]), "advantages": torch.zeros(4)} | data
    loss, stats = losses._policy_sums(PackedBatch.build([0], {k: [x] for k, x in columns.items()}))
    loss.backward()
    means = {k: float(v[0] / v[1]) if isinstance(v, tuple) else float(v) for k, v in stats.items()}
    return float(loss), new.grad, divergences.grad, means


def test_the_divergence_is_added_to_the_policy_loss_by_its_weight():
    rewarded = {"scores": torch.tensor([1.0]), "advantages": torch.tensor([2.0, -1.0, 0.0, 9.0])}
    for data, of_rewards, slopes in (({}, 0.0, None), (rewarded, -2.0 + 0.5, [-2.0, 0.5, 0.0, 0.0])):
        loss, of_logprobs, of_divergences, means = distilled(data, distill_loss="2*jsd:0.3")
        # 2 (1 + 2 / 2 + 3 / 2); without a reward the policy's own log-probabilities get no gradient at all
        assert loss == pytest.approx(7.0 + of_rewards)
        assert (of_logprobs is None) if slopes is None else of_logprobs.tolist() == slopes
        close(of_divergences, [2.0, 1.0, 1.0, 0.0])
        assert means["distill/loss"] == pytest.approx(7.0) and means["distill/divergence"] == 2.0
        assert means["distill/teacher_logprob"] == pytest.approx(-6.5 / 3)


def test_the_sampled_divergence_is_in_the_advantages_alone():
    loss, of_logprobs, of_divergences, means = distilled(
        {"advantages": torch.tensor([0.5, -1.0, 0.0, 0.0])}, distill_loss="4*sampled"
    )
    assert loss == pytest.approx(-0.5 + 0.5) and of_divergences is None
    close(of_logprobs, [-0.5, 0.5, 0.0, 0.0])
    # actor - teacher: -0.5, 1, 0
    assert means["distill/divergence"] == pytest.approx(0.5 / 3) and means["distill/loss"] == 0.0


GOOD_DISTILL_LOSSES = {
    "reverse_kl": (1.0, 1.0), "forward_kl": (1.0, 0.0), "jsd:0.25": (1.0, 0.25), "jsd:0": (1.0, 0.0),
    "0.5*jsd:1": (0.5, 1.0), " 2 * sampled": (2.0, None),
}  # fmt: skip


@pytest.mark.parametrize("text", GOOD_DISTILL_LOSSES)
def test_what_a_distillation_loss_says(text):
    assert parse_distill_loss(text) == DistillLoss(*GOOD_DISTILL_LOSSES[text])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("revers_kl", "did you mean reverse_kl?"),
        ("mse", "use one of reverse_kl, forward_kl, jsd:BETA, sampled"),
        ("half*reverse_kl", "the weight 'half' is not a number above 0"),
        ("0*reverse_kl", "the weight '0' is not a number above 0"),
        ("nan*reverse_kl", "the weight 'nan' is not a number above 0"),
        ("jsd", "BETA '' is not a number from 0"),
        ("jsd:1.5", "BETA '1.5' is not a number from 0"),
        ("reverse_kl:0.5", "'reverse_kl:0.5' is not a divergence"),
    ],
)
def test_other_distillation_losses_are_refused(text, words):
    with pytest.raises(ValueError, match=f"--distill_loss {re.escape(text)}: .*{re.escape(words)}"):
        parse_distill_loss(text)
