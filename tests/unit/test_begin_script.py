"""The first line and the help of a program, which wait for no library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STEPS = ("step1_sft/main.py", "step2_reward/main.py", "step3_ppo/main.py", "step2_reward/rw_eval.py")


@pytest.fixture
def call(tmp_path):
    """Run a program where importing torch fails."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch is imported')\n")

    def run(*words: str, **variables: str) -> subprocess.CompletedProcess:
        env = os.environ | {"PYTHONPATH": str(tmp_path)} | variables
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)

    return run


@pytest.mark.parametrize("program", [*STEPS, "step2_reward/dpo/main.py"])
def test_help_loads_no_library(call, program):
    short, whole = call(program, "--help"), call(program, "--help_all")
    assert (short.returncode, short.stderr) == (whole.returncode, whole.stderr) == (0, "")
    assert "model_name_or_path" in short.stdout and len(whole.stdout) >= len(short.stdout) > 1000


@pytest.mark.parametrize("program", [*STEPS, "chat.py", "arena.py", "export.py"])
def test_what_is_loaded_is_said_first_and_by_one_rank(call, program):
    done = call(program, "--model_name_or_path", "m")
    assert done.stderr.startswith("[   0 s] loading torch, transformers and deepspeed\nTraceback")
    assert "torch is imported" in done.stderr
    assert call(program, "x", RANK="1").stderr.startswith("Traceback")


@pytest.mark.parametrize(("given", "seen"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "active")])
def test_waiting_threads_leave_the_cores_to_others_unless_told(call, tmp_path, monkeypatch, given, seen):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    (tmp_path / "torch.py").write_text("import os; raise ImportError(os.environ['OMP_WAIT_POLICY'])\n")
    for program in STEPS:
        flags = ("--model_name_or_path", "m", "--data_path", "d")
        assert call(program, *flags, **given).stderr.endswith(f"ImportError: {seen}\n")
