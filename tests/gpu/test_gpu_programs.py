"""Whole programs on a real GPU: the golden losses, 16 bits, offload, ranks, resume."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from program_runs import ROOT, STEPS, as_flags, read_curve, read_metrics, run, start, torchrun, wait_for_steps
from test_golden_losses import GOLDEN, PPO, RUNS, read_table
from tiny_inputs import step_flags

pytestmark = pytest.mark.real_gpu
SHARED = {"data_split": "1,1,1", "max_train_steps": 4, "dtype": "fp32"}
TOLERANCE = 1e-3  # a GPU adds up in another order, and texts that are sampled from it may not differ


def words(tiny, step: int, output: Path, **flags) -> list[str]:
    given = step_flags(tiny, step, output_dir=output, **SHARED | flags)
    return [str(ROOT / STEPS[step] / "main.py"), *as_flags(given)]


def check_golden(name: str, folder: Path) -> None:
    for (key, step), value in read_table((GOLDEN / f"{name}.txt").read_text()).items():
        [found] = [row[key] for row in read_metrics(folder, key) if str(row["step"]) == step]
        assert found == pytest.approx(value, abs=TOLERANCE, rel=TOLERANCE), (key, step)


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_a_cpu(name, tiny, tmp_path):
    step, flags, _ = RUNS[name]
    run([sys.executable, *words(tiny, step, tmp_path / "out", **flags)])
    check_golden(name, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "away"),
    [
        ("sft", {"zero_stage": 3, "offload": "optimizer"}),
        ("sft", {"zero_stage": 3, "offload": "all"}),
        ("ppo", {"offload_reference_model": True, "offload_reward_model": True}),
    ],
    ids=str,
)
def test_offload_changes_no_loss(name, away, tiny, tmp_path):
    step, flags, _ = RUNS[name]
    run([sys.executable, *words(tiny, step, tmp_path / "out", **flags | away)])
    check_golden(name, tmp_path / "out")


def test_the_sampler_agrees_with_the_trainer_in_bf16(tiny, tmp_path, figures):
    run([sys.executable, *words(tiny, 3, tmp_path / "out", **PPO, dtype="bf16", packed=True)])
    gaps = read_curve(tmp_path / "out", "policy/logprob_gap")
    figures["bf16_logprob_gap_of_a_tiny_model"] = gaps
    assert max(gaps) < 2e-2


def test_fp16_scales_its_losses_and_learns(tiny, tmp_path, figures):
    flags = RUNS["sft"][1] | {"dtype": "fp16", "max_train_steps": 8}
    run([sys.executable, *words(tiny, 1, tmp_path / "out", **flags)])
    losses = read_curve(tmp_path / "out", "sft/loss")
    figures["fp16_sft_losses"] = losses
    assert losses[-1] < losses[0]


def test_a_killed_run_resumes(tiny, tmp_path, figures):
    flags = PPO | {"save_interval": 2, "deterministic": True, "max_train_steps": 12}
    run([sys.executable, *words(tiny, 3, tmp_path / "whole", **flags)])
    command = [sys.executable, *words(tiny, 3, tmp_path / "parts", **flags)]
    process = start(command, tmp_path / "log")
    wait_for_steps(tmp_path / "parts", "policy/loss", 5, process, tmp_path / "log")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    run(command)
    whole, parts = (read_curve(tmp_path / name, "policy/loss") for name in ("whole", "parts"))
    figures["resumed_to_the_same_bits"] = whole == parts
    assert parts == pytest.approx(whole, rel=TOLERANCE)


def test_two_ranks_on_one_card_are_refused_by_name(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = run(torchrun(*words(tiny, 1, tmp_path / "out")), may_fail=True)
    assert done.returncode and "CUDA_VISIBLE_DEVICES" in done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("flags", [{"actor_zero_stage": 3}, {"inference_tp_size": 2}], ids=str)
def test_two_gpus_generate_together(flags, tiny, tmp_path, figures):
    for name, more in (("alone", {}), ("together", flags)):
        run(torchrun(*words(tiny, 3, tmp_path / name, **PPO, **more)))
    alone, together = (read_curve(tmp_path / name, "objective/score") for name in ("alone", "together"))
    assert together == pytest.approx(alone, rel=TOLERANCE)
    figures[f"received_gib {flags}"] = read_curve(tmp_path / "together", "hybrid/received_gib")
