"""The average of the trained weights."""

import pytest
import torch
from plain_logits import compute_logits

from common.engine.ds_config import EngineOptions, build_train_config
from common.engine.optim import build_engine
from common.models.loading import ModelOptions, load_causal_lm
from common.runs.export import gather_state_dict
from step1_sft.arguments import SFTArguments
from step3_ppo.ema import ExponentialMovingAverage


def test_the_average_by_hand_and_the_swap():
    model = torch.nn.Linear(1, 1)
    model.bias.requires_grad = False
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = ExponentialMovingAverage(model, decay=0.75)
    for value in (2.0, 4.0):
        with torch.no_grad():
            model.weight.fill_(value)
        ema.update()
    # 0.75 * 1 + 0.25 * 2 = 1.25; 0.75 * 1.25 + 0.25 * 4 = 1.9375
    assert set(ema.averages) == {"weight"} and float(ema.averages["weight"]) == 1.9375
    with ema.averaged_weights():
        assert float(model.weight) == 1.9375
    assert float(model.weight) == 4.0
    with pytest.raises(RuntimeError), ema.averaged_weights():
        raise RuntimeError
    assert float(model.weight) == 4.0


def test_a_bf16_weight_is_averaged_in_fp32():
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    ema = ExponentialMovingAverage(model, decay=0.999)
    with torch.no_grad():
        model.weight.fill_(2.0)
    ema.update()
    assert float(ema.averages["weight"]) == pytest.approx(1.001, abs=1e-6)  # bf16 would still say 1


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_a_decay_out_of_range_is_named(decay):
    with pytest.raises(ValueError, match="--ema_decay"):
        ExponentialMovingAverage(torch.nn.Linear(1, 1), decay)


def build(stage: int, folder: str):
    """A tiny model's engine; under stage 3 its small weights stay whole between uses, the others do not."""
    overrides = {"zero_optimization": {"stage3_param_persistence_threshold": 100}} if stage == 3 else {}
    ds_config = build_train_config(EngineOptions(zero_stage=stage, overrides=overrides))
    model = load_causal_lm(ModelOptions(folder, dropout=0.0, ds_config=ds_config), 320)
    return build_engine(model, ds_config, SFTArguments(learning_rate=1e-2, lr_scheduler_type="constant"), 10)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_engine_computes_and_exports_with_the_average_and_trains_on_without_it(stage, tiny_model_folder):
    engine = build(stage, tiny_model_folder("gpt2"))
    ids = torch.arange(1, 13).view(2, 6)

    def logits(train: bool = False) -> torch.Tensor:
        engine.train(train)
        with torch.set_grad_enabled(train):
            return compute_logits(engine, ids, torch.ones_like(ids))

    ema = ExponentialMovingAverage(engine.module, decay=0.5)
    weights = [gather_state_dict(engine.module)]
    for _ in range(2):
        engine.backward(logits(train=True).square().mean())
        engine.step()
        ema.update()
        weights.append(gather_state_dict(engine.module))
    last = logits()
    with ema.averaged_weights():
        found, averaged = gather_state_dict(engine.module), logits()
    for name in found:
        expected = 0.25 * weights[0][name] + 0.25 * weights[1][name] + 0.5 * weights[2][name]
        torch.testing.assert_close(found[name], expected, atol=1e-6, rtol=1e-5)
    assert not averaged.allclose(last, atol=1e-3), "the engine must compute with the average"
    assert logits().equal(last) and all(
        w.equal(weights[2][n]) for n, w in gather_state_dict(engine.module).items()
    )
    engine.backward(logits(train=True).square().mean())
    engine.step()
    assert not logits().allclose(last, atol=1e-3)
