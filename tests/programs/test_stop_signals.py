"""SIGTERM and Ctrl-C, under every launcher and on a terminal: the state is saved, the same flags resume."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from program_runs import ROOT, as_flags, deepspeed, environment, read_curve, start, torchrun, wait_for_steps
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


def test_on_a_terminal_a_bar_is_shown_until_the_end(tiny, tmp_path):
    own, theirs = pty.openpty()
    command = [sys.executable, "step1_sft/main.py", *as_flags(endless_flags(tiny, tmp_path / "output", 0))]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    env = environment(TERM="xterm", COLUMNS="90", LINES="24")
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **streams)
    os.set_blocking(own, False)
    text, deadline = b"", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            text += os.read(own, 65536)
        if text.count(b"tokens/s") == 2 and b"saving, then" not in text:
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.5)
    with contextlib.suppress(BlockingIOError):
        text += os.read(own, 65536)
    process.kill()
    text = text.decode()
    assert process.wait() == STOPPED, text
    assert "/5000, left " in text and "\x1b[?25l" not in text
    assert "SIGINT: saving, then exiting" in text and text.rstrip().endswith("to resume"), text
    rows = text.split("\r\n")
    first, second = (index for index, row in enumerate(rows) if "tokens/s" in row)
    assert second - first == 24 - 3 + 1, "the heading is on every screen"


def test_a_chat_on_a_terminal_shows_the_conversation_and_no_bar(tiny):
    own, theirs = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    command = [sys.executable, "chat.py", str(tiny.base), "--max_new_tokens", "20"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(TERM="xterm"), start_new_session=True, **streams
    )
    os.write(own, b"How are you?\n\n")  # the empty line leaves
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError):  # the program has closed the terminal
        while part := os.read(own, 65536):
            text += part
    assert process.wait(timeout=60) == 0, text
    shown = text.decode()
    assert "bot>" in shown and "\u2501" not in shown and "the start" not in shown and "left" not in shown, (
        shown
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_alone_ends_at_once(tiny, forks, ranks):
    """There is nothing to save, so it keeps the usual meaning of a signal."""
    flags = {"model_name_or_path": tiny.reward, "data_path": tiny.rows, "data_output_path": tiny.cache}
    hook = {"at": "step2_reward.answer_scores:compute_pair_scores", "call": 2, "do": "term"}
    flags |= {"max_seq_len": 48, "per_device_eval_batch_size": 1}
    done = forks.run("step2_reward.rw_eval", flags, ranks=ranks, hooks=[hook], seconds=60)
    assert done.code == -signal.SIGTERM and "accuracy" not in done.text(), done.text()
