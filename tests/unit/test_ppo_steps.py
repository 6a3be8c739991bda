"""The optimizer steps of PPO: one on text behind the policy's, and one that is refused for a gap."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.data.collators import collate_texts
from common.data.packed_batch import PackedBatch
from common.engine.ds_config import build_config, build_engine
from common.models.loading import ModelOptions, load_causal_lm
from common.models.policy_model import PolicyModel, compute_nll_sum
from common.ranks.failures import StepSkipped
from step1_sft.arguments import SFTArguments
from step3_ppo import ppo_losses
from step3_ppo.algorithms import ALGORITHMS, fill_defaults
from step3_ppo.arguments import PPOArguments
from step3_ppo.ppo_losses import PPOLosses
from step3_ppo.ppo_math import KLController


class LinearLosses(PPOLosses):
    """The losses of one linear layer: squares of its output for fixed inputs; the sampler is `gap` off."""

    gap = approx_kl = 0.0

    def _policy_sums(self, batch):
        stats = {"policy/logprob_gap": self.gap, "policy/approx_kl": self.approx_kl}
        stats = {name: (torch.tensor(number), torch.tensor(1)) for name, number in stats.items()}
        return self.roles.actor.model(POLICY_INPUT).square().sum(), stats

    def _value_sums(self, batch):
        return 2 * self.roles.critic.model(POLICY_INPUT).square().sum(), {}

    def _pretraining_sums(self, batch):
        return self.roles.actor.model(TEXT_INPUT).square().sum(), {}


POLICY_INPUT, TEXT_INPUT, START = torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, -1.0]]), [[0.5, -0.25]]


@pytest.fixture
def linear_losses(process_group):
    def make(**flags) -> tuple[LinearLosses, Any, list[PackedBatch]]:
        """Return the losses, their engine, and a minibatch."""
        model = torch.nn.Linear(2, 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(torch.tensor(START))
        args = SFTArguments(learning_rate=0.1, lr_scheduler_type="constant")
        engine = build_engine(model, build_config(overrides={"gradient_clipping": 0.0}), args, 10)
        columns = {"loss_counts": [torch.ones(1)], "loss_mask": [torch.ones(1).bool()]}
        batches = [PackedBatch.build([0], columns)]
        roles = SimpleNamespace(actor=SimpleNamespace(model=engine), critic=None)
        args = PPOArguments(unsupervised_dataset_name="x", unsup_coef=0.5, **flags)
        args = fill_defaults(args, ALGORITHMS["ppo"])
        return LinearLosses(args, roles, KLController(0.1), None, iter([batches] * 2)), engine, batches

    return make


def test_a_step_on_text_is_its_own_behind_that_of_the_policy(linear_losses, monkeypatch):
    """D60: AdamW's two steps, the second on the text's gradient alone, where the first has led."""
    monkeypatch.setattr(ppo_losses, "count_targets", lambda batch: 1.0)
    losses, engine, batches = linear_losses(unsup_step="own")
    weight = torch.tensor(START, requires_grad=True)
    betas = engine.optimizer.param_groups[0]["betas"]
    adam = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, betas=betas)
    found = []
    steps = [(POLICY_INPUT, 1.0, lambda: losses.update(batches)), (TEXT_INPUT, 0.5, losses.update_on_text)]
    for inputs, coef, step in steps:
        loss = (inputs @ weight.T).square().sum()
        adam.zero_grad()
        (coef * loss).backward()
        adam.step()
        found.append(step())
        torch.testing.assert_close(engine.module.weight.data, weight.data, atol=1e-6, rtol=0)
    assert "policy/unsup_loss" not in found[0]
    assert found[1]["policy/unsup_loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert found[1]["unsup/grad_norm"] == pytest.approx(float(weight.grad.norm()), abs=1e-5)
    joint, engine, batches = linear_losses(unsup_step="joint")
    assert joint.update(batches)["policy/unsup_loss"] == pytest.approx(1.75**2)  # 3 * 0.5 + 0.25
    assert not torch.allclose(engine.module.weight, weight, atol=1e-2), "one step of the sum"


def test_text_is_learned_at_temperature_1_whatever_samples_have(tiny_model_folder):
    model = load_causal_lm(ModelOptions(tiny_model_folder("llama"), dropout=0.0), 320)
    batch = collate_texts([{"input_ids": [5, 9, 30, 7]}, {"input_ids": [8, 6]}])
    sums = []
    for temperature in (1.0, 0.5):
        policy = PolicyModel(model, num_valid_tokens=320, temperature=temperature)
        roles = SimpleNamespace(actor=SimpleNamespace(model=policy, is_packed=False))
        losses = PPOLosses(PPOArguments(), roles, None, None)
        sums.append(losses._pretraining_sums(batch)[0].item())
    assert sums == [compute_nll_sum(policy, batch, temperature=1.0).item()] * 2
    assert sums[0] != pytest.approx(compute_nll_sum(policy, batch).item(), abs=1e-3)


def test_text_has_the_router_loss_of_its_targets(monkeypatch):
    monkeypatch.setattr(ppo_losses, "compute_nll_sum", lambda *_, **__: torch.tensor(3.0))
    mixture = SimpleNamespace(router_loss=torch.tensor(4.0), router_coefficient=0.5)
    roles = SimpleNamespace(actor=SimpleNamespace(model=mixture, is_packed=False))
    texts = collate_texts([{"input_ids": [5, 9, 30, 7]}, {"input_ids": [8, 6]}])
    loss, stats = PPOLosses(PPOArguments(), roles, None, None)._pretraining_sums(texts)
    assert loss.item() == 3 + (3 + 1) * 0.5 * 4 and float(stats["policy/unsup_router_loss"]) == 16


def test_the_critics_mean_is_over_its_tokens_and_the_actors_over_what_counts(linear_losses):
    """As of --loss_aggregation sequence, which counts responses."""
    losses, _, batches = linear_losses(unsup_step="own")
    losses.roles.critic = losses.roles.actor
    batches = [batch.with_key("loss_counts", torch.full((1,), 4.0), like="loss_counts") for batch in batches]
    assert losses.compute_actor_gradients(batches).means["policy/loss"] == 0.25**2 / 4
    assert losses.compute_critic_gradients(batches).means["value/loss"] == 2 * 0.25**2


def test_a_minibatch_without_tokens_makes_no_step(linear_losses):
    """Though a divisor that is constant counts its responses."""
    losses, engine, batches = linear_losses(unsup_step="own", loss_aggregation="constant")
    losses.update(batches)
    moved, num_steps = engine.module.weight.tolist(), engine.global_steps
    empty = [batch.with_key("loss_mask", torch.zeros(1).bool(), like="loss_mask") for batch in batches]
    assert losses.update(empty) == {}
    assert (engine.module.weight.tolist(), engine.global_steps) == (moved, num_steps)
    assert losses.update([*batches, *empty])["policy/num_tokens"] == 1.0


def test_a_minibatch_beyond_the_kl_makes_no_step_and_the_next_one_does(linear_losses):
    losses, engine, batches = linear_losses(unsup_step="own", early_stop_kl=0.125, early_stop_action="skip")
    losses.approx_kl = 0.25
    assert losses.update(batches) == {} and engine.module.weight.tolist() == START
    losses.approx_kl = 0.125
    assert losses.update(batches)["policy/approx_kl"] == 0.125
    assert engine.module.weight.tolist() != START and engine.global_steps == 1
    losses, engine, batches = linear_losses(unsup_step="own", early_stop_kl=0.125)
    losses.approx_kl = 0.25
    assert losses.update(batches) and engine.module.weight.tolist() != START, "the rest is left out, not this"


def test_a_gap_above_the_bound_makes_no_step(linear_losses):
    """V27: --old_logprobs strict. The next step can be made."""
    losses, engine, batches = linear_losses(unsup_step="own")
    losses.gap = 2e-3
    with pytest.raises(
        StepSkipped, match="differ by 0.002 nats per token.* strict allows 0.001; --old"
    ) as refused:
        losses.update(batches, max_gap=1e-3)
    assert engine.module.weight.tolist() == START and refused.value.batches == batches
    losses.update(batches)
    losses.gap = 0.5e-3
    losses.update(batches, max_gap=1e-3)
    assert engine.module.weight.tolist() != START and engine.global_steps == 2
    losses.gap = 2**-10
    losses.update(batches, max_gap=2**-10)
    assert engine.global_steps == 3, "a gap of the bound is not above it"


def test_the_loss_of_the_critic_is_that_of_the_flags():
    """By hand; the statistics, and the router loss of a mixture, are of the tokens that count."""
    values = torch.tensor([1.0, 2.0, 9.0], requires_grad=True)
    columns = {"old_values": [1.1, 1.0, 0.0], "returns": [3.0, 3.0, 0.0], "response_ids": [0.0] * 3}
    data = {key: [torch.tensor(column)] for key, column in columns.items()}
    data["loss_mask"] = [torch.tensor([True, True, False])]
    mixture = SimpleNamespace(router_loss=torch.tensor(4.0), router_coefficient=0.5)
    critic = SimpleNamespace(model=mixture, compute_values=lambda batch: (values, None))
    args = fill_defaults(PPOArguments(value_loss="huber", value_clip_range=0.5), ALGORITHMS["ppo"])
    losses = PPOLosses(args, SimpleNamespace(critic=critic), None, None)
    loss, stats = losses._value_sums(PackedBatch.build([0], data))
    # |1 - 3| - 1/2; of 2, clipped to 1.5, |1.5 - 3| - 1/2; the router's for each of two tokens
    assert loss.item() == pytest.approx(1.5 + 1.0 + 2 * 0.5 * 4.0) and float(stats["value/router_loss"]) == 8
    assert [float(x) for x in stats["value/clip_fraction"]] == [1, 2]
