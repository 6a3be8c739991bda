"""What a teacher adds to the loss of the actor: by hand."""

from types import SimpleNamespace

import pytest
import torch
from right_or_wrong import close

from common.data.packed_batch import PackedBatch
from step3_ppo.algorithms import ALGORITHMS, divergence_beta, fill_defaults
from step3_ppo.arguments import PPOArguments
from step3_ppo.policy_losses import build_policy_loss
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
    args = fill_defaults(args, ALGORITHMS["distill"])
    losses = PPOLosses(args, roles, KLController(0.1), build_policy_loss(args))
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
        loss, of_logprobs, of_divergences, means = distilled(
            data, distill_loss="jsd", distill_weight=2.0, distill_beta=0.3
        )
        # 2 (1 + 2 / 2 + 3 / 2); without a reward the policy's own log-probabilities get no gradient at all
        assert loss == pytest.approx(7.0 + of_rewards)
        assert (of_logprobs is None) if slopes is None else of_logprobs.tolist() == slopes
        close(of_divergences, [2.0, 1.0, 1.0, 0.0])
        assert means["distill/loss"] == pytest.approx(7.0) and means["distill/divergence"] == 2.0
        assert means["distill/teacher_logprob"] == pytest.approx(-6.5 / 3)


def test_the_sampled_divergence_is_in_the_advantages_alone():
    loss, of_logprobs, of_divergences, means = distilled(
        {"advantages": torch.tensor([0.5, -1.0, 0.0, 0.0])}, distill_loss="sampled", distill_weight=4.0
    )
    assert loss == pytest.approx(-0.5 + 0.5) and of_divergences is None
    close(of_logprobs, [-0.5, 0.5, 0.0, 0.0])
    # actor - teacher: -0.5, 1, 0
    assert means["distill/divergence"] == pytest.approx(0.5 / 3) and means["distill/loss"] == 0.0


def test_the_divergences_by_their_beta():
    betas = {"reverse_kl": 1.0, "forward_kl": 0.0, "jsd": 0.25, "sampled": None}
    for loss, beta in betas.items():
        assert divergence_beta(PPOArguments(distill_loss=loss, distill_beta=0.25)) == beta
