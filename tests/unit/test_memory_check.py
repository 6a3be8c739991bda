"""A step that is started itself: its memory plan, whose process is pretended here but for one."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.flags.args import Problems
from common.programs import memory_check
from common.programs.memory_check import make_plan
from common.ranks import distributed
from tools.step_flags import PlanArguments, parse_step_args

WORDS = ["--model_name_or_path", "a/b", "--local_rank=0"]
CRASH = 'Traceback (most recent call last):\n  File "x.py"\nKeyError: 7\n'
Planner = Callable[..., list[list[str]]]


@pytest.fixture
def planner(monkeypatch) -> Planner:
    """Have a GPU, and a planner that ends as it is told; return the command lines that it gets."""
    monkeypatch.setattr(distributed, "has_gpu", lambda: True)
    monkeypatch.delenv("NO_PLAN", raising=False)

    def pretend(
        code: int = 0,
        out: str = "",
        complaints: str = "",
        error: Exception | None = None,
        written: str = "",
    ):
        commands = []

        def communicate(timeout: float) -> tuple[str, str]:
            if isinstance(error, subprocess.TimeoutExpired):
                raise error
            return out, complaints

        def start(command: list[str], **more):
            commands.append(command)
            if isinstance(error, OSError):
                raise error
            if written:
                Path(command[command.index("--json") + 1]).write_text(written)
            return SimpleNamespace(communicate=communicate, returncode=code, kill=lambda: None)

        # In its own name: the module is everyone's.
        pretended = SimpleNamespace(**vars(subprocess) | {"Popen": start})
        monkeypatch.setattr(memory_check, "subprocess", pretended)
        return commands

    return pretend


def test_what_fits_is_started_after_its_plan(planner, capfd):
    planner(0, "step 1, SFT, on 1 x H100\nfits: 3 GiB are left\n", "a library's warning\n")
    make_plan(1, WORDS)
    assert capfd.readouterr().err == "step 1, SFT, on 1 x H100\nfits: 3 GiB are left\n"


def test_what_does_not_fit_leaves_with_2_after_plan_and_cure(planner, capfd):
    planner(2, "does not fit\nchange: --offload all\n", "error: step 1 was not started; NO_PLAN=1\n")
    with pytest.raises(SystemExit) as left:
        make_plan(1, WORDS)
    told = "does not fit\nchange: --offload all\nerror: step 1 was not started; NO_PLAN=1\n"
    assert left.value.code == 2 and capfd.readouterr().err == told


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ({"code": 1, "out": "half a plan", "complaints": CRASH}, "KeyError: 7"),
        ({"code": -9}, "exit code -9"),
        ({"error": subprocess.TimeoutExpired("python", 300)}, "TimeoutExpired"),
        ({"error": BlockingIOError(11, "no more processes")}, "BlockingIOError"),
    ],
)
def test_a_planner_without_a_verdict_stops_nobody(ending, told, planner, capfd):
    commands = planner(**ending)
    make_plan(1, WORDS)
    assert commands and capfd.readouterr().err == f"no memory plan: {told}\n"


def test_nothing_is_planned_where_it_is_not_wanted_or_on_a_cpu(planner, monkeypatch, capfd):
    commands = planner(2, "does not fit")
    monkeypatch.setenv("NO_PLAN", "1")
    make_plan(1, WORDS)
    monkeypatch.delenv("NO_PLAN")
    monkeypatch.setattr(distributed, "has_gpu", lambda: False)
    make_plan(1, WORDS)
    assert not commands and capfd.readouterr().err == ""


def test_what_the_plan_writes_is_returned_and_never_that_of_an_earlier_one(planner):
    planner(0, "fits\n", written='{"flags": {"zero_stage": 3}}')
    assert make_plan(1, WORDS) == {"flags": {"zero_stage": 3}}
    planner(0, "no memory plan: a model of its own\n")
    assert make_plan(1, WORDS) == {}


def test_flags_are_chosen_on_a_cpu_and_despite_no_plan(planner, monkeypatch):
    commands = planner(0, "fits\n", written='{"flags": {}, "seconds": {"train": 3.5}}')
    monkeypatch.setenv("NO_PLAN", "1")
    monkeypatch.setattr(distributed, "has_gpu", lambda: False)
    assert make_plan(1, [*WORDS, "--auto"], chooses=True) == {"flags": {}, "seconds": {"train": 3.5}}
    assert commands[0][-1] == "--auto"
    planner(2, "does not fit\n")
    with pytest.raises(SystemExit, match="2"):
        make_plan(1, [*WORDS, "--auto"], chooses=True)


@pytest.mark.parametrize(("rank", "code", "asked"), [(0, 0, True), (0, 2, True), (1, 2, False)])
def test_all_ranks_follow_the_first_ones_planner(rank, code, asked, planner, monkeypatch):
    """Also one whose own environment has NO_PLAN: none may wait for a verdict that others do not."""
    commands = planner(code)
    monkeypatch.setenv("NO_PLAN", "" if rank == 0 else "1")
    first = "null" if code else "{}"
    told = lambda key, make: make() if rank == 0 else first  # noqa: E731
    monkeypatch.setattr(distributed, "text_of_first_rank", told)
    if code:
        with pytest.raises(SystemExit, match="2"):
            make_plan(3, WORDS)
    else:
        make_plan(3, WORDS)
    assert bool(commands) == asked


@pytest.mark.parametrize(
    ("launcher", "machines"),
    [
        ({}, (1, 1)),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, (8, 2)),  # torchrun
        ({"WORLD_SIZE": "4", "LOCAL_SIZE": "4"}, (4, 1)),  # DeepSpeed's launcher
        ({"WORLD_SIZE": "3", "LOCAL_SIZE": "2"}, (2, 2)),  # the last machine has fewer
    ],
)
def test_the_plan_is_of_the_step_its_flags_and_its_machines(launcher, machines, planner, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(distributed.dist, "is_initialized", lambda: False)  # it is planned before the start
    commands = planner()
    memory_check.print_plan(2, WORDS)
    words = commands[0][commands[0].index("tools.plan") + 1 :]
    args = parse_step_args(PlanArguments, words, problems=(problems := Problems()))
    assert not problems.messages
    assert (args.stage, args.gpu, args.num_gpus, args.num_nodes) == (2, "here", *machines)
    assert args.model_name_or_path == "a/b" and args.seed == 1234


def test_the_real_planner_is_found_from_the_users_folder(tmp_path, monkeypatch, capfd):
    """Which has `tools` of its own, and relative paths of models."""
    (tmp_path / "tools.py").write_text("raise SystemExit(2)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_PLAN", raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # of the planner
    monkeypatch.setattr(distributed, "has_gpu", lambda: True)
    monkeypatch.setattr("sys.argv", ["main.py", *WORDS])
    make_plan(1)
    assert capfd.readouterr().err == "no memory plan: torch sees no GPU\n"


@pytest.fixture
def script(monkeypatch) -> None:
    """Have a script that begins on rank 0 of a machine with a GPU."""
    monkeypatch.setattr(memory_check.shutil, "which", {"nvidia-smi": "/x/nvidia-smi"}.get)
    monkeypatch.setattr("sys.argv", ["main.py", *WORDS])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_plan_begins_with_its_program_and_is_read_once(script, planner, capfd):
    commands = planner(2, "does not fit\n", "error: step 1 was not started\n")
    memory_check.begin_plan(1)
    assert len(commands) == 1 and commands[0][-len(WORDS) :] == WORDS
    with pytest.raises(SystemExit, match="2"):
        make_plan(1)
    assert len(commands) == 1 and capfd.readouterr().err == "does not fit\nerror: step 1 was not started\n"
    with pytest.raises(SystemExit, match="2"):  # of another run in this process
        make_plan(2, WORDS)
    assert len(commands) == 2


@pytest.mark.parametrize(
    "variables",
    [
        {"NO_PLAN": "1"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"LOCAL_WORLD_SIZE": "x"},
        {"argv": "--dry_run"},
        {"smi": ""},
    ],
    ids=lambda variables: " ".join(variables),
)
def test_no_plan_begins_where_none_is_read(variables, script, planner, monkeypatch):
    commands = planner()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if "argv" in variables:
        monkeypatch.setattr("sys.argv", ["main.py", "--dry_run", *WORDS])
    if "smi" in variables:
        monkeypatch.setattr(memory_check.shutil, "which", lambda name: None)
    memory_check.begin_plan(1)
    assert not commands and not memory_check.BEGUN
    monkeypatch.setattr("sys.argv", ["main.py", "--auto", *WORDS])
    memory_check.begin_plan(1)
    is_first = not variables.keys() & {"RANK", "LOCAL_WORLD_SIZE"}
    assert len(commands) == len(memory_check.BEGUN) == is_first
    memory_check.BEGUN.clear()


def test_the_plan_of_a_program_that_leaves_ends_with_it(tmp_path):
    """Its flags were rejected meanwhile, say."""
    planner = tmp_path / "planner"
    planner.write_text("#!/bin/sh\necho $$ > pid\nexec sleep 60\n")
    planner.chmod(0o755)
    code = "import sys, time; from pathlib import Path; from common.programs import memory_check;"
    code += f"sys.executable = {str(planner)!r}; process = memory_check.start_plan(1, []);"
    code += "\nwhile not Path('pid').exists() or not Path('pid').read_text(): time.sleep(0.01)"
    env = {**os.environ, "PYTHONPATH": str(memory_check.ROOT)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, check=True, timeout=60)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        for _ in range(500):
            os.kill(pid, 0)
            time.sleep(0.01)
