"""PPO with --exact: the gap between sampler and trainer is 0, and two ranks sample what one samples."""

import gzip
import json

import pytest
from program_runs import read_curve
from tiny_inputs import step_flags

from common.runs.run_files import ROLLOUTS

pytestmark = pytest.mark.slow
PPO = {
    "enable_hybrid_engine": True,
    "exact": True,
    "max_train_steps": 3,
    "save_rollouts": 1,
    "num_warmup_steps": 0,
    "actor_learning_rate": 1e-3,
    "generation_slots": 3,
}
LORA = {"actor_lora_dim": 4}


def first_rollout(output):
    rows = map(json.loads, gzip.open(output / ROLLOUTS, "rt"))
    return sorted((row["prompt"], row["answer"]) for row in rows if row["step"] == 1)


@pytest.mark.parametrize("flags", [{}, LORA | {"actor_lora_learning_rate": 1e-2}], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_gap_is_zero_and_ranks_change_no_text(dtype, flags, forks, tiny, tmp_path):
    flags = PPO | {"dtype": dtype} | flags
    outputs = [tmp_path / "one", tmp_path / "two"]
    for ranks, output in enumerate(outputs, 1):
        rows = {"per_device_generation_batch_size": 8 // ranks, "per_device_training_batch_size": 8 // ranks}
        done = forks.run(3, step_flags(tiny, 3, output_dir=output, **flags | rows), ranks=ranks)
        assert done.codes == [0] * ranks, done.text()[-2000:]
        assert read_curve(output, "policy/logprob_gap") == [0.0] * 3
        assert read_curve(output, "policy/ratio") == [1.0] * 3
    assert first_rollout(outputs[0]) == first_rollout(outputs[1])


def test_without_it_bf16_has_a_gap(forks, tiny, tmp_path):
    flags = PPO | {"dtype": "bf16", "exact": False, "output_dir": tmp_path / "usual"}
    assert forks.run(3, step_flags(tiny, 3, **flags)).code == 0
    assert min(read_curve(tmp_path / "usual", "policy/logprob_gap")) > 1e-4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            LORA | {"merge_adapters": "true"},
            "--exact: merged adapters (--merge_adapters true, ZeRO 3)",
        ),
        (
            LORA | {"actor_zero_stage": 3},
            "--exact: merged adapters (--merge_adapters true, ZeRO 3)",
        ),
        (LORA | {"load_in_4bit": True}, "--exact: --load_in_4bit multiplies in another way"),
        (
            {"inference_tp_size": 2},
            "--exact: --inference_tp_size 2 adds parts of a product; leave one of them out",
        ),
    ],
)
def test_what_is_not_exact_is_refused(flags, message, forks, tiny, tmp_path):
    done = forks.run(3, step_flags(tiny, 3, output_dir=tmp_path / "refused", **PPO | flags))
    assert done.code == 2 and message in done.text()
