"""The average of the trained weights."""

import pytest
import torch

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
