"""Failure detection: names the first rank to fail on all ranks, which then exit with code 4.

Twice a second, a thread of each rank writes a heartbeat (`Beat`) with the rank's position to the process
group's store, and reads the verdict, after which all ranks exit. Rank 0 checks the heartbeats of all ranks,
every other rank those of rank 0 and of the rank before it. A rank that fails writes the verdict itself; a
rank whose collective failed because others were lost checks all ranks.
"""

import contextlib
import functools
import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import psutil
import torch.distributed as dist

from common.ranks.failures import say

OTHER_RANK_FAILED = 4
CHECK_SECONDS = 0.5
DEAD_SECONDS = 1.0  # since the last heartbeat of a dead process: Ctrl-C ends all at about the same time
SILENT_SECONDS = 2.5  # since the last heartbeat of a rank that others wait for
SETTLE_SECONDS = 3.0  # from a failed collective to the verdict: a missing heartbeat must be noticed first
EXIT_SECONDS = 30.0  # for the others to exit after a rank that left with an exit code
READ_SECONDS = 3.0  # for the others to read the verdict before rank 0, which hosts the store, exits
VERDICT = "verdict"
PATIENT = "patient"  # group_desc of groups whose collectives may exceed the limit
DEATH_MESSAGE = (
    "its process disappeared without an error message. The launcher names the signal; the kernel's log "
    "(dmesg) shows whether memory had run out"
)

Process = tuple[str, int]  # (machine, process id)


class Beat(NamedTuple):
    """The heartbeat of a rank."""

    number: int
    position: str  # for example "at step 3 in the rollout"
    calls: dict[str, int]  # collectives started so far, by group
    process: Process


class Verdict(NamedTuple):
    """The reason for a shutdown of all ranks."""

    text: str  # names the first rank to fail and where it was
    rank: int
    stuck: Process | None = None  # a rank on its machine kills it: it cannot read the verdict
    by: int = -1  # rank that posted it


class FailureDetector(threading.Thread):
    """The monitoring thread of a rank. `position()` returns the phase that the rank is in.

    `stores`: two clients of the group's store, for this thread and the main thread, because a client that
    waits for a reply blocks its other callers. Time is counted in checks, one every CHECK_SECONDS, so it does
    not pass while this process is stopped (Ctrl-Z, the interpreter's lock).
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        collective_timeout: float,
        position: Callable[[], str],
        stores: tuple[dist.Store, dist.Store],
    ) -> None:
        super().__init__(daemon=True, name="failure detector")
        self.rank = rank
        self.world_size = world_size
        self.position = position
        self.collective_timeout = collective_timeout
        self.store, self.main_store = stores
        self.process = (this_machine(), os.getpid())
        self.beats: dict[int, Beat] = {}
        self.moved_at: dict[int, int] = {}  # check at which each rank's last heartbeat arrived
        self.front: dict[str, tuple[int, int]] = {}  # by group: max collectives started, since which check
        self.lost: str | None = None  # error with which this rank lost others
        self.lost_at = 0
        self.code = 0  # exit code of a voluntary exit
        self._is_over = threading.Event()
        self._num_beats = self._num_checks = 0

    # ---- the main thread

    def send_position(self) -> None:
        """Publish this rank's position without waiting for a reply."""
        with contextlib.suppress(dist.DistError):  # the monitoring thread finds the cause
            self._beat(self.main_store)

    def read_rank_0(self) -> None:
        """Wait for rank 0's first heartbeat: to end it if it stalls, its process must be known before."""
        self.store.wait(["beat/0"])
        self._read([0])

    def report_failure(self, text: str) -> None:
        """Shut down all ranks because this rank failed."""
        self._is_over.set()
        self.join(READ_SECONDS)
        with contextlib.suppress(dist.DistError):  # rank 0 has already exited
            self._print_verdict(self._post(Verdict(text, self.rank), self.main_store))
        self._announce_exit(0.0 if self.rank else READ_SECONDS)

    def exit_after_others(self, text: str) -> None:
        """Exit after other ranks were lost. The monitoring thread ends the process; if it stalls because its
        store does not reply, this call does.
        """
        self.lost_at = self._num_checks
        self.lost = text
        num_checks = -1
        while num_checks != self._num_checks:
            num_checks = self._num_checks
            self.join(2 * SETTLE_SECONDS)
        self._is_over.set()
        process = self.beats[0].process if 0 in self.beats else None
        self._exit(self._without_rank_0(stuck(0, self.position(), 2 * SETTLE_SECONDS, process)))

    def shut_down(self, code: int, reason: str) -> None:
        """Exit voluntarily, together with all other ranks; after a non-zero code they must follow within
        EXIT_SECONDS.
        """
        self.code = code
        if not self._announce_exit(min(EXIT_SECONDS, self.collective_timeout / 2) if code else float("inf")):
            text = f"rank {self.rank} left before the others, with exit code {code}, {self.position()}"
            self.report_failure(f"{text}: {reason}" if reason else text)
        self._is_over.set()
        self.join(READ_SECONDS)

    # ---- the thread

    def run(self) -> None:
        """Send heartbeats and check the others until this rank exits."""
        while not self._is_over.wait(CHECK_SECONDS):
            try:
                verdict = self.check()
            except dist.DistError:  # the store has disappeared, and rank 0 with it
                verdict = self._without_rank_0(Verdict(f"rank 0 died {self.position()}: {DEATH_MESSAGE}", 0))
            if verdict and not self._is_over.is_set():
                self._exit(verdict)
                return

    def check(self) -> Verdict | None:
        """Send a heartbeat, check the others, and return the verdict; None while all is well or undecided."""
        self._num_checks += 1
        is_store_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # set by torchrun
        if 0 in self.beats and is_dead(self.beats[0].process) and not is_store_of_launcher:
            raise dist.DistStoreError("it was in rank 0")  # its children may keep its sockets open
        self._beat(self.store)
        posted = self.store.compare_set(VERDICT, "", "")
        if posted:
            return Verdict(*json.loads(posted))
        reads_all = self.rank == 0 or self.lost is not None
        self._read(range(self.world_size) if reads_all else {0, self.rank - 1})
        verdict = self._diagnose()
        return self._post(verdict, self.store) if verdict else None

    def _beat(self, store: dist.Store) -> None:
        self._num_beats += 1
        beat = Beat(self._num_beats, self.position(), count_collectives(), self.process)
        store.set(f"beat/{self.rank}", json.dumps(beat))

    def _post(self, verdict: Verdict, store: dist.Store) -> Verdict:
        """Post a verdict; return the first one posted, which counts."""
        counts = store.compare_set(VERDICT, "", json.dumps(verdict._replace(by=self.rank)))
        return Verdict(*json.loads(counts))

    def _read(self, ranks: Iterable[int]) -> None:
        """Read the heartbeats of other ranks that have started."""
        known = [r for r in ranks if r != self.rank and (r in self.beats or self.store.check([f"beat/{r}"]))]
        texts = self.store.multi_get([f"beat/{rank}" for rank in known]) if known else []
        for rank, text in zip(known, texts, strict=True):
            beat = Beat(*json.loads(text))
            if rank not in self.beats or beat.number != self.beats[rank].number:
                self.moved_at[rank] = self._num_checks
            self.beats[rank] = beat

    def _seconds_since(self, check: int) -> float:
        return (self._num_checks - check) * CHECK_SECONDS

    def _diagnose(self) -> Verdict | None:
        """Verdict if all ranks must exit: a process died; a rank that others wait for sends no heartbeat, or
        did not join a collective; or this rank's collective failed although all ranks are alive.
        """
        is_lost = self.lost is not None and self._seconds_since(self.lost_at) >= SETTLE_SECONDS
        late = self._find_late()
        for rank, beat in sorted(self.beats.items()):
            seconds = self._seconds_since(self.moved_at[rank])
            if seconds >= DEAD_SECONDS and is_dead(beat.process):
                return Verdict(f"rank {rank} died {beat.position}: {DEATH_MESSAGE}", rank)
            if seconds >= SILENT_SECONDS and (is_lost or rank in late):
                return stuck(rank, beat.position, seconds, beat.process)
        if late:
            rank = min(late, key=lambda rank: sum(self.beats[rank].calls.values()))
            position = self.beats[rank].position
            return Verdict(
                f"rank {rank} is stuck {position}: others wait for it in a collective, longer "
                f"than --collective_timeout {self.collective_timeout:g} s; raise that where work needs it",
                rank,
            )
        if is_lost:
            return Verdict(
                f"rank {self.rank} failed first, {self.position()}: {self.lost}; look at the network "
                "between the machines; if ranks disagree on a collective, "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL names the first",
                self.rank,
            )
        return None

    def _find_late(self) -> list[int]:
        """Ranks that have started fewer collectives than another rank, which has waited beyond the limit."""
        most = Counter(count_collectives())
        for beat in self.beats.values():
            most |= Counter(beat.calls)  # maximum per group
        for group, n in most.items():
            if n != self.front.get(group, (0, 0))[0]:
                self.front[group] = (n, self._num_checks)
        limit = self.collective_timeout
        awaited = {g: n for g, (n, check) in self.front.items() if self._seconds_since(check) >= limit}
        return [
            rank
            for rank, beat in sorted(self.beats.items())
            if any(n < awaited.get(group, 0) for group, n in beat.calls.items())
        ]

    # ---- exit

    def _print_verdict(self, verdict: Verdict) -> None:
        """Print the reason for the shutdown (rank 0, or the rank that declared rank 0 dead)."""
        if self.rank == (0 if verdict.rank else verdict.by):
            say(f"error: {verdict.text}")

    def _exit(self, verdict: Verdict) -> None:
        """End this process."""
        self._print_verdict(verdict)
        if verdict.stuck:
            kill(verdict.stuck)
        self._announce_exit(0.0 if self.rank else READ_SECONDS)
        os._exit(self.code or OTHER_RANK_FAILED)

    def _announce_exit(self, seconds: float) -> bool:
        """Announce that this rank exits, rank 0 last because it hosts the store; return whether all ranks
        exit.
        """
        deadline = time.monotonic() + seconds
        own_key = f"left/{self.rank}"
        others = [f"left/{rank}" for rank in range(1, self.world_size)] if self.rank == 0 else ["left/0"]
        with contextlib.suppress(dist.DistError):  # rank 0 has already exited
            if self.rank:
                self.main_store.set(own_key, "")
            while time.monotonic() < deadline:
                if self.main_store.check(others):
                    self.main_store.set(own_key, "")
                    return True
                time.sleep(CHECK_SECONDS / 5)
            return False
        return True

    def _without_rank_0(self, verdict: Verdict) -> Verdict:
        """Verdict on rank 0, whose store has disappeared; the first other rank on each machine prints it."""
        is_first = self.rank == 1 or os.environ.get("LOCAL_RANK") == "0"
        time.sleep(CHECK_SECONDS if is_first else 2 * CHECK_SECONDS)  # a signal may be ending all ranks
        return verdict._replace(by=self.rank if is_first else -1)


def stuck(rank: int, position: str, seconds: float, process: Process | None) -> Verdict:
    """Verdict on a process that is stopped, or a machine that cannot be reached."""
    text = f"rank {rank} is stuck: no sign of life for {seconds:.0f} s; last seen {position}"
    return Verdict(text, rank, process)


@functools.cache
def this_machine() -> str:
    """Name of this machine, which changes when it or its container restarts."""
    with contextlib.suppress(OSError):  # not on Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot + os.readlink("/proc/self/ns/pid")
    return socket.gethostname()


def is_dead(process: Process) -> bool:
    """Whether a process of this machine is dead; a zombie is, a stopped process is not."""
    machine, number = process
    try:
        is_here = machine == this_machine()
        return is_here and psutil.Process(number).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def kill(process: Process) -> None:
    """End a process of this machine with SIGKILL, which also ends a stopped process."""
    machine, number = process
    if machine == this_machine():
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def count_collectives() -> dict[str, int]:
    """Number of collectives that this rank has started, by group, without patient groups."""
    calls = {}
    with contextlib.suppress(RuntimeError, ValueError):  # the main thread may create or destroy groups
        for group, name in list(dist.distributed_c10d._world.pg_names.items()):
            if group.group_desc != PATIENT:
                calls[name] = group._get_sequence_number_for_group()
    return calls
