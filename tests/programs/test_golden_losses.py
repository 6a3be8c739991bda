"""Losses of short runs, compared with tests/golden: a change that moves them must say why.

UPDATE_GOLDEN=1 python -m pytest tests/programs/test_golden_losses.py     writes the files anew
"""

import os
from pathlib import Path

import pytest
from program_runs import read_metrics, run_here
from tiny_inputs import step_flags

pytestmark = [pytest.mark.slow, pytest.mark.smoke]

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
TOLERANCE = 2e-5  # other processors add up in another order

SINGLE = {"learning_rate": 1e-3, "eval_fraction": 0.1}
PPO = {
    "data_split": "0,0,1",
    "generation_batches": 2,
    "ppo_epochs": 2,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "enable_hybrid_engine": True,
}
# Between 0 and 1: responses have unequal lengths, so that a mean over the wrong tokens is another number.
POLICY = ("rollout/finished_fraction", "policy/loss", "objective/score")
RUNS = {
    "sft": (1, SINGLE, ("sft/loss", "sft/grad_norm", "sft/eval_loss")),
    "reward": (2, SINGLE, ("reward/loss", "reward/grad_norm", "reward/eval_margin")),
    "dpo": (2, SINGLE | {"loss": "dpo"}, ("dpo/loss", "dpo/grad_norm", "dpo/eval_margin")),
    "ppo": (3, PPO, (*POLICY, "value/loss", "objective/kl", "policy/grad_norm")),
    "grpo": (3, PPO | {"algorithm": "grpo", "num_samples_per_prompt": 2}, POLICY),
}


def read_table(text: str) -> dict[tuple[str, str], float]:
    """Return {(metric, step): value}."""
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return {(name, step): float(value) for step, name, value in rows}


def check_losses(name, tiny, output, **more):
    """Make a run on this process's device, and compare."""
    step, flags, metrics = RUNS[name]
    shared = {"data_split": "1,1,1", "max_train_steps": 4, "dtype": "fp32", "output_dir": output}
    run_here(step, step_flags(tiny, step, **shared | flags | more))
    speeds = read_metrics(output, "perf/step_seconds")
    assert all(0 < row["perf/mfu"] < 1 and row["perf/rest_seconds"] >= 0 for row in speeds)
    lines = [
        f"{row['step']} {metric} {row[metric]:.7g}"
        for metric in metrics
        for row in read_metrics(output, metric)
    ]
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text("# step metric value\n" + "\n".join(lines) + "\n")
    found, expected = read_table("\n".join(lines)), read_table(file.read_text())
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), key


@pytest.mark.parametrize("name", RUNS)
def test_losses(name, tiny, tmp_path, lone_process, no_pictures, capsys):
    check_losses(name, tiny, tmp_path / "output")
