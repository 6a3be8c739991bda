"""Where a rank is, whose failure an error is, how a rank leaves, and which rank failed first."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from common.ranks import failure_detector, watchdog
from common.ranks.failure_detector import (
    SETTLE_SECONDS,
    SILENT_SECONDS,
    FailureDetector,
    Verdict,
    is_dead,
    kill,
    this_machine,
)
from common.ranks.failures import has_lost_ranks, is_out_of_memory

# ---- positions


@pytest.fixture(autouse=True)
def fresh_position(monkeypatch):
    monkeypatch.setattr(watchdog, "_position", watchdog.Position())
    monkeypatch.setattr(failure_detector, "count_collectives", dict)  # a World changes it


def test_phases_nest_and_restore_the_outer_position():
    assert str(watchdog._position) == "in the start-up"
    with watchdog.phase("the rollout", 3):
        assert str(watchdog._position) == "at step 3 in the rollout"
        with watchdog.phase("the checkpoint step-000003"):
            assert str(watchdog._position) == "at step 3 in the checkpoint step-000003"
        assert str(watchdog._position) == "at step 3 in the rollout"
    assert str(watchdog._position) == "at step 3 after the rollout"


def test_phase_error_keeps_the_innermost_position():
    error = ValueError("no")
    with pytest.raises(ValueError), watchdog.phase("the step", 2), watchdog.phase("the update"):
        raise error
    assert str(error.rank_position) == "at step 2 in the update"
    assert str(watchdog._position) == "at step 2 after the step"


# ---- kinds of failures

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(GLOO + "Connection closed by peer [::1]:38079"), True),
        (torch.distributed.DistBackendError("NCCL error: remote process exited or network error"), True),
        (torch.distributed.DistStoreError("wait timeout after 5000ms, keys: /a"), True),
        (RuntimeError("Connection closed by peer, says a server of rewards"), False),
        (ValueError("timed out"), False),
    ],
)  # fmt: skip
def test_has_lost_ranks_by_error_and_its_context(error, is_lost):
    wrapped = KeyError("cleaning up")
    wrapped.__context__ = error
    assert has_lost_ranks(error) == has_lost_ranks(wrapped) == is_lost


def test_is_out_of_memory_recognises_allocator_errors():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_out_of_memory(RuntimeError("a bug"))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)


def test_leave_after_in_a_lone_process_prints_memory_errors_alone(capfd, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("WORLD_SIZE", "1")
    watchdog.exit_on_error(ValueError("the interpreter shows it"))
    assert capfd.readouterr().err == ""
    with pytest.raises(SystemExit, match="3"):
        watchdog.exit_on_error(MemoryError("lower the batch size"))
    assert capfd.readouterr().err == "error: lower the batch size\n"


# ---- which rank failed first

LIMIT = 60.0
CLOSED = GLOO + "Connection closed by peer"


class World:
    """Ranks of one process and one store, that look where they are told to."""

    def __init__(self, world_size: int = 3) -> None:
        self.silent, self.positions = set(), ["at step 3 in the rollout"] * world_size
        self.calls = [{"world": 7} for _ in range(world_size)]
        store = dist.HashStore()
        self.ranks = [
            FailureDetector(rank, world_size, LIMIT, lambda r=rank: self.positions[r], (store, store))
            for rank in range(world_size)
        ]
        for detector in self.ranks:
            detector.join = lambda seconds: None  # no threads: the test looks

    def wait(self, seconds: float) -> list[Verdict | None]:
        """Let the ranks look twice a second; return their verdicts once all that look have one."""
        verdicts = []
        for _ in range(int(2 * seconds) + 1):
            verdicts = []
            for detector in self.ranks:
                if detector.rank not in self.silent:
                    failure_detector.count_collectives = lambda r=detector.rank: dict(self.calls[r])
                    verdicts.append(detector.check())
            if all(verdicts):
                break
        return verdicts

    def lose(self, rank: int) -> None:
        """Let a rank's collective fail."""
        self.ranks[rank].lost, self.ranks[rank].lost_at = CLOSED, self.ranks[rank]._num_checks


@pytest.fixture
def world():
    world = World()
    assert world.wait(5) == [None, None, None]
    return world


def text_of(verdicts: list[Verdict | None]) -> str:
    """Return the one verdict of all ranks."""
    assert None not in verdicts and all(verdict == verdicts[0] for verdict in verdicts), verdicts
    return verdicts[0].text


def test_failure_detector_tells_all_ranks_the_first_failure(world):
    world.ranks[1].report_failure("rank 1 failed first, in the update: ValueError: no")
    world.ranks[2].report_failure("rank 2 failed first, of rank 1's failure")
    verdicts = world.wait(1)
    assert text_of(verdicts) == "rank 1 failed first, in the update: ValueError: no"
    assert verdicts[0].by == 1


def test_failure_detector_reports_a_dead_process(world):
    """It is looked for twice: all may be about to end, by Ctrl-C. One of another machine is not."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    world.ranks[1].process = ("another", child.pid)
    assert world.wait(10) == [None] * 3
    world.ranks[1].process = (this_machine(), child.pid)
    world.ranks[1].send_position()
    world.silent.add(1)
    assert world.wait(0) == [None, None]
    assert text_of(world.wait(2)).startswith("rank 1 died at step 3 in the rollout")


def test_failure_detector_reports_a_rank_that_exits_early(world, monkeypatch):
    """With an exit code it ends the others, which have time to follow; without one it waits for them."""
    monkeypatch.setattr(failure_detector, "EXIT_SECONDS", 0.3)
    waiting = threading.Thread(target=world.ranks[0].shut_down, args=(0, ""), daemon=True)
    waiting.start()
    waiting.join(0.6)
    assert waiting.is_alive()
    world.ranks[1].shut_down(2, "no such file")
    words = "rank 1 left before the others, with exit code 2, at step 3 in the rollout: no such file"
    assert text_of(world.wait(0)) == words


def test_failure_detector_ignores_ranks_that_exit_together(world):
    leaving = [threading.Thread(target=d.shut_down, args=(2, "no such file")) for d in world.ranks]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(5)
    assert not any(thread.is_alive() for thread in leaving) and world.wait(0) == [None] * 3


def test_failure_detector_reports_a_silent_rank_as_stuck(world):
    world = World(4)
    world.wait(1)
    world.silent.add(1)
    assert world.wait(3 * SILENT_SECONDS) == [None] * 3  # it may hold the interpreter's lock
    world.lose(3)  # it looks at all ranks then
    verdicts = world.wait(SETTLE_SECONDS + 1)
    assert text_of(verdicts).startswith("rank 1 is stuck: no sign of life for ") and verdicts[0].stuck


def test_failure_detector_reports_the_first_error_when_all_ranks_answer(world):
    world.lose(0)
    world.lose(2)
    text = text_of(world.wait(SETTLE_SECONDS + 1))
    assert text.startswith(f"rank 0 failed first, at step 3 in the rollout: {CLOSED}; look at the network")


def test_failure_detector_reports_the_rank_that_a_collective_waits_for(world):
    """Of those that are behind it is the one that has begun the fewest collectives."""
    world.calls[0]["world"] = world.calls[2]["world"] = 8
    assert world.wait(LIMIT - 2) == [None] * 3
    world.calls = [{"world": 9}, {"world": 8}, {"world": 8, "slice": 3}]  # rank 1 has come
    world.positions[1] = "at step 2 after the update"
    assert world.wait(LIMIT - 2) == [None] * 3
    verdicts = world.wait(3)
    assert text_of(verdicts).startswith("rank 1 is stuck at step 2 after the update: others wait for it in a")
    assert f"--collective_timeout {LIMIT:g} s" in verdicts[0].text and not verdicts[0].stuck


def test_a_rank_whose_first_rank_is_lost_at_the_start_still_shuts_down():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError):  # rank 0 sends no heartbeat
        watchdog.start(store, rank=1, world_size=2, collective_timeout=5.0)
    watchdog.shut_down(4)  # there is no thread to wait for
    assert watchdog._detector is None


def test_is_dead_and_kill_of_stopped_zombie_and_remote_processes():
    """A stopped process lives, and ends by kill, a zombie does not live; another machine's is not touched."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = (this_machine(), child.pid)
    child.send_signal(signal.SIGSTOP)
    kill(("another", child.pid))
    assert child.poll() is None and not is_dead(process)
    kill(process)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(process) and not is_dead(("another", child.pid))
    assert child.wait(10) == -signal.SIGKILL and is_dead(process)
