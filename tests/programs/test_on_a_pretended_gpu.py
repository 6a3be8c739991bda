"""Whole programs on a pretended GPU: what would crash there, and whether the numbers are a CPU's."""

import pytest
from pretended_gpu import pretended_gpu
from program_runs import read_curve
from test_golden_losses import PPO, RUNS, check_losses
from tiny_inputs import step_flags

pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_a_cpu(name, tiny, tmp_path, lone_process, no_pictures):
    with pretended_gpu() as gpu:
        check_losses(name, tiny, tmp_path / "output")
    assert not gpu.queries


SHORT = PPO | {"max_train_steps": 2, "dtype": "fp32", "seed": 3}
LORA = {"actor_lora_dim": 2}
ON_TWO = {
    "sft": (1, {"zero_stage": 2, "eval_fraction": 0.1, "max_train_steps": 2, "dtype": "fp32"}),
    "sft_bf16_lora": (1, {"zero_stage": 3, "lora_dim": 2, "max_train_steps": 2, "offload": "all"}),
    "zero3_tp2": (3, SHORT | {"actor_zero_stage": 3, "critic_zero_stage": 3, "inference_tp_size": 2}),
    "zero3_lora_tp2": (3, SHORT | LORA | {"actor_zero_stage": 3, "inference_tp_size": 2}),
}


@pytest.mark.parametrize("name", ON_TWO)
def test_two_ranks_under_the_rule_of_nccl(name, tiny, forks, tmp_path):
    step, flags = ON_TWO[name]
    outputs, metric = [tmp_path / "gpu", tmp_path / "cpu"], "policy/loss" if step == 3 else "sft/loss"
    for output, more in zip(outputs, ({"gpu": {}}, {}), strict=True):
        ran = forks.run(step, step_flags(tiny, step, output_dir=output, **flags), ranks=2, **more)
        assert ran.codes == [0, 0], ran.text(0)[-3000:] + ran.text(1)[-3000:]
        if more:
            seen = [ran.seen(rank) for rank in (0, 1)]
            assert [s["device"] for s in seen] == ["cuda:0", "cuda:1"] and not any(s["queries"] for s in seen)
        if "dtype" not in flags:
            return
    curves = [read_curve(output, metric) for output in outputs]
    assert curves[0] == pytest.approx(curves[1], abs=1e-6)
