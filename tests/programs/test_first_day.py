"""benchmarks/run_gpu.sh and run_cpu.sh in miniature; every process of the first on a pretended GPU."""

import json
import sys

import pytest
from program_runs import ROOT, run

pytestmark = pytest.mark.slow


def test_a_first_day_on_a_gpu_continues_after_a_failure(tmp_path, monkeypatch):
    env = {"PYTHONPATH": str(ROOT / "tests/pretended_site"), "VIRTUAL_ENV": sys.prefix, "QUICK": "1"}
    env |= {"TRL_116": "/nowhere/python"}  # the stage that fails
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = run(["bash", str(ROOT / "benchmarks/run_gpu.sh"), str(tmp_path)], may_fail=True, seconds=500)
    stages = json.loads((tmp_path / "run_gpu.json").read_text())["stages"]
    codes = {name: stage["exit_code"] for name, stage in stages.items()}
    assert codes == {"doctor": 0, "gpu": 0, "tests": 0, "generate": 0, "reshard": 0, "train": 2}, done.stdout
    assert done.returncode == 1 and "failed: train" in done.stderr
    figures = {name: stage["figures"] for name, stage in stages.items()}
    ppo = figures["gpu"]["sections"]["ppo"]
    assert all(case["peak_gib"] and case["planned_gib"] for case in ppo.values())
    assert figures["gpu"]["sections"]["published_ppo_seconds"] == 0.504
    assert set(figures["tests"]["tests"].values()) == {"passed"} and figures["generate"]["ours"] > 0


def test_baselines_are_measured_again_by_their_own_commands(tmp_path, monkeypatch):
    """Without TRL, with a TRL that does not start, and a name without a baseline, which starts nothing."""
    env = {"VIRTUAL_ENV": sys.prefix, "QUICK": "1", "OUTPUT_DIR": str(tmp_path), "TRL_112": "/nowhere/python"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    program = str(ROOT / "benchmarks/run_cpu.sh")
    baselines = ROOT / "benchmarks/baselines"
    before = {path.name: path.read_bytes() for path in baselines.iterdir()}
    wrong = run(["bash", program, "reshard", "reshards"], may_fail=True, seconds=60)
    assert wrong.returncode == 2 and "reshards.cpu.json" in wrong.stderr and "==" not in wrong.stdout
    done = run(["bash", program, "ppo_step", "memory"], may_fail=True, seconds=300)
    assert done.returncode == 1 and "failed: ppo_step;" in done.stderr, done.stdout + done.stderr
    (written,) = tmp_path.glob("*.cpu.json")
    facts = json.loads(written.read_text())
    assert written.name == "memory.cpu.json" and facts["ours"] > 0
    assert facts["command"] == "python benchmarks/bench_memory.py --trl_python TRL"
    assert facts["versions"].endswith("; peer TRL 1.16")
    assert before == {path.name: path.read_bytes() for path in baselines.iterdir()}
