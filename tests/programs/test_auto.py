"""--auto: the plan's flags are those of the run, on every rank and in its files; a plan without a verdict."""

import json
import sys

import pytest
import yaml
from program_runs import ROOT, as_flags, run, torchrun
from test_bad_input import BAD, DONE, good_flags

CHOSEN = {"actor_zero_stage": 2, "critic_zero_stage": 3, "max_tokens_per_micro_batch": 80}


@pytest.fixture
def planned(forks, tiny, tmp_path):
    """Run step 3 with --auto on two ranks, beside a planner that says, writes and ends as it is told."""

    def start(says: str, writes: dict | None, code: int, **flags):
        planner = tmp_path / "planner"
        file = f"while [[ $1 != --json ]]; do shift; done\necho '{json.dumps(writes)}' > $2\n"
        planner.write_text(f"#!/bin/bash\necho {says}\n{file if writes else ''}exit {code}\n")
        planner.chmod(0o755)
        do = f"exec:import sys; sys.executable = {str(planner)!r}"
        hooks = [{"at": "common.programs.startup:check_run", "do": do}]
        values = good_flags(tiny, tmp_path / "output", 3, auto=True, max_train_steps=1, **flags)
        return forks.run(3, values, ranks=2, hooks=hooks, seconds=120), tmp_path / "output"

    return start


def test_what_the_plan_chooses_is_what_runs(planned):
    plan = {"flags": CHOSEN, "seconds": {"generate": 1.5}}
    done, output = planned("--auto sets some flags", plan, 0, enable_hybrid_engine=True)
    assert done.codes == [DONE, DONE], done.text()
    assert "--auto sets some flags" in done.text(0) and "--auto sets" not in done.text(1)
    assert "ZeRO stages (actor 2, critic 3)" in done.text(0)
    args = json.loads((output / "args.json").read_text())
    assert CHOSEN.items() <= args.items() and args["auto"] is True
    assert json.loads((output / "plan.json").read_text()) == plan
    config = yaml.safe_load((output / "config.yaml").read_text())
    assert CHOSEN.items() <= config.items() and "auto" not in config  # it chooses nothing again


def test_nothing_that_does_not_fit_is_started(planned):
    done, output = planned("nothing fits", None, 2)
    assert done.codes == [BAD, BAD] and not output.exists() and "nothing fits" in done.text(0)


def test_a_run_that_cannot_be_planned_chooses_nothing(planned):
    done, output = planned("no memory plan: a model of its own", None, 0)
    assert done.codes == [BAD, BAD] and not output.exists()
    assert "no memory plan: a model of its own" in done.text(0)
    assert "--auto: this run cannot be planned, see above; leave it out" in done.text(0)


def test_the_real_plan_of_a_pretended_gpu(tiny, output, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(output.parent))  # nothing is measured there
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/pretended_site"))
    flags = as_flags(good_flags(tiny, output, 1, auto=True, max_train_steps=1))
    done = run([sys.executable, "step1_sft/main.py", *flags])
    assert "--auto sets no flag" in done.stderr and "on 1 x NVIDIA A100" in done.stderr
    plan = json.loads((output / "plan.json").read_text())
    assert plan["flags"] == {} and "; this machine is not measured: " in plan["source"]
    assert max(plan["memory_gib"].values()) > 0 < plan["seconds"]["train"]


def test_the_real_plan(tiny, output):
    """Its flags are as planned by the tool alone, for as many processes."""
    flags = as_flags(good_flags(tiny, output, 1, auto=True, max_train_steps=1))
    done = run(torchrun("step1_sft/main.py", *flags))
    assert "--auto sets" in done.stderr and "fits: at the peak" in done.stderr
    args = json.loads((output / "args.json").read_text())
    plan = json.loads((output / "plan.json").read_text())
    assert plan["flags"].items() <= args.items()
    words = ["--stage", "1", "--gpu", "cpu", "--num_gpus", "2", "--gpu_memory_gib", "2"]
    alone = run([sys.executable, "-m", "tools.plan", *words, *flags, "--dtype", args["resolved_dtype"]])
    assert alone.stdout.splitlines()[0] in done.stderr
