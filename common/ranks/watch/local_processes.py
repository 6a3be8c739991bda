"""Processes of this machine, known by number and start: a number alone may belong to another one later."""

import contextlib
import os
import signal
from pathlib import Path
from typing import NamedTuple


class LocalProcess(NamedTuple):
    """A process and the machine it runs on; where there is no /proc nothing is known of it."""

    machine: str  # changes with the machine, its boots and its containers; empty where that is not known
    pid: int
    started: str  # in ticks since the machine's start

    def is_here(self) -> bool:
        """Return whether this is a process of the machine that asks."""
        return bool(self.machine) and self.machine == _machine()

    def is_alive(self) -> bool:
        """Return whether the process of this machine is there; a stopped one is, a zombie is not."""
        state, started = _state_and_start(self.pid)
        return self.is_here() and started == self.started and state not in ("", "Z", "X")

    def kill(self) -> None:
        """End the process, if it is one of this machine, by a signal that a stopped one obeys too."""
        if self.is_alive():
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


def this_process() -> LocalProcess:
    """Return the process that asks."""
    return LocalProcess(_machine(), os.getpid(), _state_and_start(os.getpid())[1])


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _state_and_start(pid: int) -> tuple[str, str]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may hold anything
    except OSError:
        return "", ""
    return fields[0], fields[19]
