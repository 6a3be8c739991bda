"""SIGTERM and Ctrl-C under every launcher: the state is saved, and the same flags resume."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from program_runs import as_flags, deepspeed, read_curve, start, torchrun, wait_for_steps
from tiny_inputs import step_flags

from common.runs.checkpoints import find_checkpoints
from common.runs.run_files import STOPPED, read_lock

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


def wait_for_end(output: Path) -> None:
    """Return when the first rank has left: DeepSpeed's runner does not wait for it."""
    deadline = time.monotonic() + 60
    while read_lock(output)["exit_code"] is None and time.monotonic() < deadline:
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("launcher", "number", "whole_group"),
    [
        ("python", signal.SIGINT, True),
        ("torchrun", signal.SIGTERM, False),  # the launcher alone; DeepSpeed's would not pass it on
        ("deepspeed", signal.SIGINT, True),  # as a terminal does
    ],
)
def test_launched_run_saves_on_a_signal_and_resumes(tiny, forks, tmp_path, launcher, number, whole_group):
    output, log = tmp_path / "output", tmp_path / "log"
    flags = endless_flags(tiny, output, save_interval=0)
    process = start(LAUNCHERS[launcher]("step1_sft/main.py", *as_flags(flags)), log)
    try:
        wait_for_steps(output, "sft/loss", 3, process, log)
        if launcher == "python":
            second = forks.run(1, flags)
            assert second.code and "belongs to a run that has not ended" in second.text()
        (os.killpg if whole_group else os.kill)(process.pid, number)
        code = process.wait(timeout=60)
        wait_for_end(output)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert code == STOPPED if launcher == "python" else code != 0, log.read_text()
    assert read_lock(output)["exit_code"] == STOPPED
    text = log.read_text()
    assert f"{number.name}: saving, then exiting" in text or "SIGTERM: saving, then exiting" in text
    (found, *_), damages = find_checkpoints(output)
    num_steps = found.meta["numbers"]["progress"]["step"]
    assert num_steps == len(read_curve(output, "sft/loss")) >= 3 and not damages
    more = flags | {"max_train_steps": num_steps + 2}
    done = forks.run(1, more, ranks=1 if launcher == "python" else 2)
    assert done.code == 0 and f"resumes from {found.folder}" in done.text(), done.text()
    assert len(read_curve(output, "sft/loss")) == num_steps + 2
