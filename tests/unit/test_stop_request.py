"""One signal asks, a second one leaves; one that a shell has blocked for us stays blocked."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.ranks import distributed
from common.runs import stop_request
from common.runs.stop_request import StopRequest

ROOT = Path(__file__).resolve().parents[2]
# A program that says what it knows. "wait" puts its main thread where no handler is ever called: in C
# code, as in a collective that waits for another rank.
PROGRAM = """
import ctypes, signal, sys
from common.runs.stop_request import StopRequest
{before}
request = StopRequest()
request.install()
print("ready", flush=True)
for line in sys.stdin:
    if line == "wait\\n":
        print("waiting", flush=True)
        library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)
    print(request.name or "nothing", request.is_asked_anywhere(), flush=True)
"""


@pytest.fixture
def start():
    """Start such a program, and end it."""
    started = []

    def begin(before: str = "") -> subprocess.Popen:
        text = PROGRAM.format(before=before)
        process = subprocess.Popen(
            [sys.executable, "-c", text], cwd=ROOT, text=True, bufsize=1,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "ready\n", process.stderr.read()
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def ask(process: subprocess.Popen) -> str:
    process.stdin.write("say\n")
    return process.stdout.readline().strip()


def ask_until(process: subprocess.Popen, expected: str) -> None:
    """The signal is taken in by another thread, a moment later."""
    until = time.monotonic() + 20
    while (found := ask(process)) != expected:
        assert time.monotonic() < until, found
        time.sleep(0.02)


@pytest.mark.slow
def test_a_second_request_leaves_at_once_even_where_python_does_not_run(start):
    second = signal.SIGINT
    process = start("import common.runs.stop_request as s; s.SAME_REQUEST_SECONDS = 0.1")
    process.stdin.write("wait\n")
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(second)
    assert process.wait(20) == 128 + second
    assert f"{second.name} again: leaving at once" in process.stderr.read()


@pytest.mark.slow
def test_a_signal_that_is_ignored_stays_ignored(start):
    """As nohup and a shell's background jobs have it."""
    process = start("signal.signal(signal.SIGINT, signal.SIG_IGN)")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert ask(process) == "nothing False"
    process.send_signal(signal.SIGTERM)
    ask_until(process, "SIGTERM True")


@pytest.mark.slow
def test_a_request_is_taken_where_nobody_reads_what_is_said(start):
    """A launch script pipes into tee, and a signal for the whole group ends tee first."""
    process = start()
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    ask_until(process, "SIGTERM True")


def test_requests_are_told_apart_by_the_time_between_them(monkeypatch):
    clock, left = [100.0], []
    monkeypatch.setattr(stop_request.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(stop_request.os, "_exit", left.append)
    monkeypatch.setattr(stop_request.os, "write", lambda *_: None)
    request = StopRequest()
    for now, expected in ((100.0, []), (101.9, []), (102.0, []), (102.1, [130])):
        clock[0] = now
        request._take(signal.SIGINT)
        assert left == expected, now
    assert request.name == "SIGINT"


def test_any_rank_that_was_asked_asks_all(monkeypatch):
    """The answer is the largest over ranks, so that all leave after the same step."""
    request, given = StopRequest(), []
    monkeypatch.setattr(distributed, "max_float", lambda value: given.append(value) or 1.0)
    assert request.is_asked_anywhere() and given == [0.0]
    request.name = "SIGTERM"
    monkeypatch.setattr(distributed, "max_float", lambda value: value)
    assert request.is_asked_anywhere()
