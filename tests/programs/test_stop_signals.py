"""SIGTERM and Ctrl-C under every launcher: the state is saved, and the same command resumes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from program_runs import ROOT, as_flags, deepspeed, environment, read_curve, run, torchrun
from tiny_inputs import step_flags

from common.runs.checkpoints import find_checkpoints
from common.runs.run import STOPPED
from common.runs.run_files import read_lock

pytestmark = pytest.mark.slow

LAUNCHERS = {
    "python": lambda *words: [sys.executable, *map(str, words)],
    "torchrun": torchrun,
    "deepspeed": deepspeed,
}


def endless_flags(tiny, output: Path, save_interval: int) -> dict:
    """Return the flags of a run that only a signal ends."""
    flags = {"num_train_epochs": 10000, "max_train_steps": 5000, "lr_scheduler_type": "constant"}
    return step_flags(tiny, 1, **flags, output_dir=output, save_interval=save_interval)


def start(command: list[str], log: Path) -> subprocess.Popen:
    """Start a command in a process group of its own, as a shell does."""
    with open(log, "w") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=file, stderr=file, start_new_session=True
        )


def wait_for_steps(output: Path, count: int, process: subprocess.Popen, log: Path) -> None:
    """Return when so many steps have been made."""
    deadline = time.monotonic() + 240
    while not (output / "metrics.jsonl").exists() or len(read_curve(output, "sft/loss")) < count:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def wait_for_checkpoint(output: Path) -> None:
    """Return when the state is saved: DeepSpeed's runner does not wait for the ranks that do it."""
    deadline = time.monotonic() + 60
    while not find_checkpoints(output)[0] and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("launcher", "number", "whole_group"),
    [
        ("python", signal.SIGINT, True),
        ("torchrun", signal.SIGTERM, False),  # the launcher alone; DeepSpeed's would not pass it on
        ("deepspeed", signal.SIGINT, True),  # as a terminal does
    ],
)
def test_stops_and_goes_on(tiny, tmp_path, launcher, number, whole_group):
    output, log = tmp_path / "output", tmp_path / "log"
    flags = endless_flags(tiny, output, save_interval=0)
    process = start(LAUNCHERS[launcher]("step1_sft/main.py", *as_flags(flags)), log)
    try:
        wait_for_steps(output, 3, process, log)
        if launcher == "python":
            second = run(LAUNCHERS[launcher]("step1_sft/main.py", *as_flags(flags)), may_fail=True)
            assert second.returncode and "belongs to a run that has not ended" in second.stderr
        (os.killpg if whole_group else os.kill)(process.pid, number)
        code = process.wait(timeout=60)
        wait_for_checkpoint(output)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert code == STOPPED if launcher == "python" else code != 0, log.read_text()
    text = log.read_text()
    assert f"{number.name}: saving, then leaving" in text or "SIGTERM: saving, then leaving" in text
    (found, *_), doubts = find_checkpoints(output)
    num_steps = found.meta["numbers"]["progress"]["step"]
    assert num_steps == len(read_curve(output, "sft/loss")) >= 3 and not doubts
    more = flags | {"max_train_steps": num_steps + 2}
    done = run(LAUNCHERS[launcher]("step1_sft/main.py", *as_flags(more)))
    assert f"resumes from {found.folder}" in done.stdout
    assert len(read_curve(output, "sft/loss")) == num_steps + 2


def test_a_crashed_run_is_started_again_and_a_refused_one_is_not(tiny, tmp_path):
    output, log = tmp_path / "output", tmp_path / "log"
    flags = endless_flags(tiny, output, save_interval=1)
    command = torchrun("step1_sft/main.py", *as_flags(flags))
    until_done = [sys.executable, "-m", "tools.until_done", str(output)]
    process = start([*until_done, *command], log)
    try:
        wait_for_steps(output, 3, process, log)
        os.kill(read_lock(output)["process"], signal.SIGKILL)
        deadline = time.monotonic() + 120
        while "resumes from" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(timeout=60) == STOPPED, log.read_text()
    finally:
        process.kill()
    text = log.read_text()
    assert text.count("until_done: the run ended with exit code") == 1 and "resumes from" in text
    assert text.count("error: rank") == text.count("error: rank 0 died at step") == 1, text
    assert read_lock(output)["exit_code"] == STOPPED
    done = run([*until_done, *command, "--max_seq_len", "1"], may_fail=True)
    assert (
        done.returncode == 1
        and done.stderr.count("nothing was started") == 1
        and "until_done" not in done.stderr
    )
