"""Long passes: what they show, on a terminal and elsewhere, and where a request ends them."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from common.ranks import passes, watchdog
from common.ranks.passes import Interrupted, watched

ROOT = Path(__file__).resolve().parents[2]


def test_a_long_pass_prints_a_line_now_and_then_and_a_short_one_none(monkeypatch, capfd):
    clock = [0.0]
    monkeypatch.setattr(passes.time, "monotonic", lambda: clock[0])
    watchdog.print_progress_lines()
    with watchdog.phase("the evaluation"):
        capfd.readouterr()
        for _ in watched(range(400), 400, "batches"):
            clock[0] += 4.0
            if clock[0] == 40.0:
                break
        assert list(watched(range(3), 3, "batches")) == [0, 1, 2]
    lines = [line.split("] ")[1] for line in capfd.readouterr().err.splitlines()]
    # After 12, 24 and 36 seconds; 4 seconds for each of the others.
    assert lines == [
        "the evaluation: 3 of 400 batches, left 0:26:28",
        "the evaluation: 6 of 400 batches, left 0:26:16",
        "the evaluation: 9 of 400 batches, left 0:26:04",
    ]


def test_a_request_ends_a_pass_before_its_next_item(monkeypatch):
    answers, seen = iter([False, False, True]), []
    monkeypatch.setattr(passes, "must_stop", lambda: next(answers))
    with pytest.raises(Interrupted):
        for item in watched(range(9), 9, "rows"):
            seen.append(item)  # noqa: PERF402
    assert seen == [0, 1]
    monkeypatch.undo()
    assert list(watched(range(9), 9, "rows")) == list(range(9)), "elsewhere none is asked"


# ---- on a terminal


PROGRAM = """
import os, signal, sys, time
from common.flags.streams import harden_streams
from common.programs import running
from common.ranks import passes, watchdog
from common.ranks.failures import say

def program():
    passes.show_run(3, 9, 5000.0)
    print("a line of the run", flush=True)
    time.sleep(0.7)
    say("a message of another thread")
    with watchdog.phase("the evaluation"):
        for _ in passes.watched(range(5), 5, "batches"):
            time.sleep(0.3)
    print("another line", flush=True)
    if not os.fork():
        print("a child", type(sys.stdout).__name__, flush=True)
        os._exit(0)
    os.wait()
    print("now", flush=True)
    time.sleep({seconds})
    print("the last line", flush=True)

running.run_program(program)
"""


def run_on_a_terminal(seconds: float, number: int = 0, **options):
    """Output, exit code, and the terminal's attributes before and after; `number` is sent at "now"."""
    own, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    command = [sys.executable, "-c", PROGRAM.replace("{seconds}", str(seconds))]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"} | options.pop("env", {})
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs} | options
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, **streams)
    output = b""
    os.set_blocking(own, False)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            output += os.read(own, 65536)
            continue
        if process.poll() is not None:
            break
        if number and b"now" in output:
            time.sleep(0.7)
            process.send_signal(number)
            number = 0
        time.sleep(0.05)
    after = termios.tcgetattr(theirs)
    os.close(own)
    os.close(theirs)
    return output.decode(), process.wait(10), before, after


def on_the_screen(output: str) -> list[str]:
    """Rows that a terminal shows after this output; only the codes that a bar of one row uses."""
    rows = []
    for line in output.replace("\r\n", "\n").split("\n"):
        if line.lstrip("\r").startswith("\x1b[1A"):  # one row up
            rows.pop()
        line = line.split("\x1b[2K")[-1].split("\r")[-1]
        while "\x1b[" in line:
            head, _, tail = line.partition("\x1b[")
            line = head + tail.lstrip("0123456789;?")[1:]
        rows.append(line.rstrip())
    return [row for row in rows if row]


def test_a_bar_stands_below_the_lines_and_leaves_nothing():
    output, code, before, after = run_on_a_terminal(0.1)
    assert code == 0 and before == after
    assert "step 3/9, left 1:23:20 " in output
    assert "the evaluation: 2 of 5 batches" in output
    assert "step 3/9" in output.rpartition("the evaluation: ")[2], "the run again, after its pass"
    lines = ["a line of the run", "a message of another thread", "another line"]
    shown = on_the_screen(output)
    assert [row for row in shown if row in lines] == lines, output
    assert "the last line" in shown[-1], output
    assert "\x1b[?25l" not in output and "\x1b[?1049h" not in output
    assert "a child FileProxy" not in output and "a child" in output


@pytest.mark.parametrize(
    ("number", "code", "last"),
    [(signal.SIGINT, 130, "stopped by Ctrl-C"), (signal.SIGTERM, -15, ""), (signal.SIGKILL, -9, "")],
    ids=["Ctrl-C", "SIGTERM", "SIGKILL"],
)
def test_a_kill_leaves_the_terminal_as_it_was(number, code, last):
    output, ended, before, after = run_on_a_terminal(30, number)
    assert ended == code and before == after
    assert "\x1b[?25l" not in output, "the cursor was never hidden"
    assert on_the_screen(output)[-1].endswith(last), output


@pytest.mark.parametrize("way", ["a pipe", "a dumb terminal", "another rank"])
def test_no_bar(way):
    more = {"a pipe": {}, "a dumb terminal": {"TERM": "dumb"}, "another rank": {"RANK": "1"}}[way]
    if way == "a pipe":
        command = [sys.executable, "-c", PROGRAM.replace("{seconds}", "0")]
        env = os.environ | {"FORCE_COLOR": "1"}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        output, code = done.stdout + done.stderr, done.returncode
    else:
        output, code, *_ = run_on_a_terminal(0, env=more)
    assert code == 0 and "\x1b" not in output and "step 3/9" not in output and "━" not in output
    assert "a line of the run" in output and "the last line" in output
