"""benchmarks/run_gpu.sh in miniature, every process of it on a pretended GPU."""

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
