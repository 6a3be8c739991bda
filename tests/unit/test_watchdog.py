"""Where a rank is, whose failure an error is, how a rank leaves, and what the watch is made of."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common.ranks import watchdog
from common.ranks.failures import (
    CLOSED,
    OTHER,
    TIMEOUT,
    RankDidNotCome,
    communication_failure,
    first_line,
    is_out_of_memory,
)
from common.ranks.watch.lines import LineSocket
from common.ranks.watch.local_processes import this_process
from common.ranks.watch.member import OTHER_RANK_FAILED

# ---------------------------------------------------------------------------------------------------------
# Places
# ---------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fresh_place(monkeypatch):
    monkeypatch.setattr(watchdog, "_place", watchdog.Place())
    monkeypatch.setattr(watchdog, "_reason", "")


def test_phases_are_nested():
    assert str(watchdog._place) == "in the start-up"
    with watchdog.phase("the rollout", 3):
        assert str(watchdog._place) == "at step 3 in the rollout"
        with watchdog.phase("the checkpoint step-000003"):
            assert str(watchdog._place) == "at step 3 in the checkpoint step-000003"
        assert str(watchdog._place) == "at step 3 in the rollout"
    assert str(watchdog._place) == "at step 3 after the rollout"


def test_an_error_keeps_the_innermost_place():
    error = ValueError("no")
    with pytest.raises(ValueError), watchdog.phase("the step", 2), watchdog.phase("the update"):
        raise error
    assert str(error.rank_place) == "at step 2 in the update"
    assert str(watchdog._place) == "at step 2 after the step"


# ---------------------------------------------------------------------------------------------------------
# Kinds of failures
# ---------------------------------------------------------------------------------------------------------

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError(GLOO + "Connection closed by peer [::1]:38079"), CLOSED),
        (RuntimeError(GLOO + "Timed out waiting 6000ms for recv operation to complete"), TIMEOUT),
        (RuntimeError(GLOO + "op.preamble.length <= op.nbytes. 8 vs 4"), OTHER),
        (torch.distributed.DistBackendError("NCCL error: remote process exited or network error"), CLOSED),
        (torch.distributed.DistStoreError("wait timeout after 5000ms, keys: /a"), TIMEOUT),
        (RankDidNotCome("rank 1"), TIMEOUT),
        (RuntimeError("Connection closed by peer, says a server of rewards"), None),
        (ValueError("timed out"), None),
    ],
)  # fmt: skip
def test_whose_failure_it_is(error, kind):
    assert communication_failure(error) == kind
    wrapped = KeyError("cleaning up")
    wrapped.__context__ = error
    assert communication_failure(wrapped) == kind


def test_want_of_memory():
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_out_of_memory(RuntimeError("a bug"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert (
        first_line(ValueError("one\ntwo")) == "ValueError: one" and first_line(MemoryError()) == "MemoryError"
    )


class Left(BaseException):
    """In the place of the end of the process."""


@pytest.fixture
def exits(monkeypatch):
    """Let an end of this process raise Left with the exit code."""

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)


def test_a_lone_process_leaves_as_ever(exits, capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    watchdog.leave_after(ValueError("the interpreter shows it"))
    assert capfd.readouterr().err == ""
    with pytest.raises(Left, match="3"):
        watchdog.leave_after(MemoryError("lower the batch size"))
    assert capfd.readouterr().err == "error: lower the batch size\n"


def test_without_a_hub_the_rank_speaks_for_itself(exits, capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(Left, match=str(OTHER_RANK_FAILED)):
        watchdog.leave_after(RuntimeError(GLOO + "Connection closed by peer"))
    assert capfd.readouterr().err.startswith(
        "error: rank 1 has lost other ranks in the start-up: RuntimeError"
    )


# ---------------------------------------------------------------------------------------------------------
# Processes and connections
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_local_processes():
    mine = this_process()
    assert mine.is_here() and mine.is_alive()
    assert not mine._replace(machine="another").is_alive() and not mine._replace(machine="").is_here()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open(f"/proc/{child.pid}/stat") as file:
        started = file.read().rpartition(")")[2].split()[19]
    other = mine._replace(pid=child.pid, started=started)
    child.send_signal(signal.SIGSTOP)
    assert other.is_alive()
    other._replace(started="1").kill()  # the number belongs to another process now
    assert child.poll() is None
    other.kill()
    assert child.wait(10) == -signal.SIGKILL and not other.is_alive()


def pair() -> tuple[LineSocket, LineSocket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return LineSocket(one, 10.0), LineSocket(listener.accept()[0], 10.0)


def test_lines():
    """Any number of objects in any number of pieces; nothing is raised once the reader is gone."""
    one, other = pair()
    one.send(a=1)
    one.send(text="ä" * 100_000)
    found: list = []
    while len(found) < 2:
        found += other.receive()
    assert found == [{"a": 1}, {"text": "ä" * 100_000}]
    one.end_sending()
    assert other.receive() is None
    other.close()
    one.send(b=2)


FORKS = """
import os, socket, sys
from common.ranks.watch.lines import LineSocket
with socket.create_server(("127.0.0.1", 0)) as listener:
    one = LineSocket(socket.create_connection(listener.getsockname()), 10.0)
    other = LineSocket(listener.accept()[0], 10.0)
reading, writing = os.pipe()
child = os.fork()
if not child:
    os.close(writing)
    os.read(reading, 1)  # lives until the pipe is closed
    os._exit(0)
one.close()
other.connection.settimeout(10)
assert other.receive() is None
os.close(writing)
os.waitpid(child, 0)
"""


def test_a_forked_child_does_not_keep_the_connection():
    """Else nobody would notice that its parent is dead. (This process may be too big for a fork.)"""
    root = Path(__file__).resolve().parents[2]
    subprocess.run([sys.executable, "-c", FORKS], cwd=root, check=True, timeout=120)


def test_a_reader_that_stands_still_holds_up_nobody(monkeypatch):
    monkeypatch.setattr("common.ranks.watch.lines.SEND_SECONDS", 0.2)
    one, _other = pair()
    started = time.monotonic()
    for _ in range(100):
        one.send(text="x" * 1_000_000)
    assert one.is_broken and time.monotonic() - started < 5
