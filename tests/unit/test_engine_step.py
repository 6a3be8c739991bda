"""One optimizer step is taken on the exact mean over the global batch."""

import pytest
import torch

from common import checkpoint
from common.ds_config import EngineOptions, build_train_config
from common.engine_step import LossTerm, update_engine
from common.training_loop import build_engine

pytestmark = pytest.mark.usefixtures("process_group")
# Micro-batches of very different sizes: a mean of their means is another number.
MICRO_BATCHES = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0], [0.5, 0.5], [2.0, 2.0]])]


def build(stage: int = 0, accumulation: int = 2, learning_rate: float = 0.1):
    """An engine over one linear layer with known weights, and plain SGD's view of it."""
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.25]]))
    options = EngineOptions(zero_stage=stage, gradient_accumulation_steps=accumulation, gradient_clipping=0.0)
    return build_engine(
        model, build_train_config(options), learning_rate=learning_rate, weight_decay=0.0,
        lora_learning_rate=0.0,
        beta2=0.95, schedule="constant", num_warmup_steps=0, num_steps=10,
    )  # fmt: skip


def squared_sums(engine):
    return lambda batch: (engine(batch).square().sum(), {"mean_output": engine(batch).detach().sum()})


def term(engine, **more) -> LossTerm:
    return LossTerm("loss", MICRO_BATCHES, squared_sums(engine), lambda batch: len(batch), **more)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_gradient_is_that_of_the_global_mean(stage):
    engine = build(stage)
    means = update_engine(engine, [term(engine)])
    rows = torch.cat(MICRO_BATCHES)
    weight = torch.tensor([[0.5, -0.25]], requires_grad=True)
    outputs = rows @ weight.T
    loss = outputs.square().mean()
    (gradient,) = torch.autograd.grad(loss, weight)
    assert means["loss"] == pytest.approx(float(loss), abs=1e-6)
    assert means["mean_output"] == pytest.approx(float(outputs.mean()), abs=1e-6)
    assert means["grad_norm"] == pytest.approx(float(gradient.norm()), abs=1e-5)
    assert means["learning_rate"] == pytest.approx(0.1)
    mean_of_means = sum((m @ weight.T).square().mean() for m in MICRO_BATCHES) / 2
    assert abs(float(mean_of_means) - means["loss"]) > 0.1, "the wrong form must be another number"
    # AdamW's first step moves each weight by the learning rate against the gradient's sign.
    expected = torch.tensor([[0.5, -0.25]]) - 0.1 * gradient.sign()
    torch.testing.assert_close(engine.module.weight.data, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_update_begins_without_the_gradient_of_the_last_one(stage):
    engine = build(stage, learning_rate=0.0)
    first, second = (update_engine(engine, [term(engine)]) for _ in range(2))
    assert first == second and first["grad_norm"] > 0


def test_terms_are_weighted_and_each_has_its_own_denominator():
    engine = build()
    second = LossTerm("other", MICRO_BATCHES[1:], squared_sums(engine), lambda batch: 5.0, weight=3.0)
    means = update_engine(engine, [term(engine), second])
    weight = torch.tensor([[0.5, -0.25]], requires_grad=True)
    first_loss = (torch.cat(MICRO_BATCHES) @ weight.T).square().mean()
    second_loss = (MICRO_BATCHES[1] @ weight.T).square().sum() / 5
    (gradient,) = torch.autograd.grad(first_loss + 3.0 * second_loss, weight)
    assert means["other"] == pytest.approx(float(second_loss), abs=1e-6)
    assert means["grad_norm"] == pytest.approx(float(gradient.norm()), abs=1e-5)


def test_a_loss_that_is_not_finite_is_refused_before_the_weights_move():
    engine = build()
    before = engine.module.weight.detach().clone()
    bad = LossTerm("loss", MICRO_BATCHES, lambda b: (engine(b).sum() * float("nan"), {}), len)
    with pytest.raises(FloatingPointError, match="loss is not finite at optimizer step 1"):
        update_engine(engine, [bad])
    assert engine.module.weight.equal(before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_is_refused_before_the_weights_move(stage):
    engine = build(stage)
    before = checkpoint.gather_state_dict(engine.module)["weight"]
    # The root's slope at 0 is infinite, the loss is finite.
    bad = LossTerm("loss", MICRO_BATCHES, lambda b: ((engine(b) * 0).sqrt().sum(), {}), len)
    with pytest.raises(FloatingPointError, match="the gradient's norm is not finite at optimizer step 1"):
        update_engine(engine, [bad])
    assert checkpoint.gather_state_dict(engine.module)["weight"].equal(before)
