"""Which rank failed first, told to all ranks, which then end with exit code 4.

A thread of each rank writes twice a second into the process group's store where its rank is (a `Beat`) and
reads the verdict. The coordinator, rank 0, looks at the beats of all ranks, every other rank at those of rank
0 and of the rank before it. A rank that fails writes the verdict itself; one that lost another looks at all.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
import torch.distributed as dist

from common.ranks.failures import CLOSED, TIMEOUT, say

OTHER_RANK_FAILED = 4
BEAT_SECONDS = 0.5
SILENT_SECONDS = 2.5  # without a beat: matters where a collective has failed, or others wait for the rank
SETTLE_SECONDS = 3.0  # between a failed collective and the verdict: a beat must have time to fail
LEFT_SECONDS = 30.0  # between a rank that left with an exit code and others that do not follow it
DRAIN_SECONDS = 1.5  # for the others to hear before this process ends
VERDICT = "verdict"

Process = tuple[str, int, float]  # machine, number, start: a number alone may belong to another process later


class Beat(NamedTuple):
    """What a rank tells of itself."""

    number: int
    position: str  # such as "at step 3 in the rollout"
    num_phases: int  # begun so far
    calls: dict[str, int]  # collectives begun so far, by group
    process: Process
    lost: str = ""  # how it has lost another rank: TIMEOUT, CLOSED, OTHER
    code: int | None = None  # that it leaves with
    reason: str = ""


class Verdict(NamedTuple):
    """Why all ranks leave."""

    text: str  # names the first rank to fail and where it was
    rank: int
    stuck: Process | None = None  # it cannot hear of it: who is on its machine kills it
    by: int = 0  # the rank whose verdict it is


@dataclass
class Watched:
    """What is known here of a rank; times are numbers of looks."""

    beat: Beat
    moved_at: int  # the last change of its beat
    behind_since: int | None = None  # others wait for it
    left_at: int | None = None
    was_dead: bool = False  # at the last look: others may end at the same moment, all by Ctrl-C


class FailureDetector(threading.Thread):
    """A rank's thread. `position()` says where the rank is, and how many phases it has begun.

    `stores`: two clients of the group's store, for the thread and for the main thread, which waits for no
    answer: one that waits blocks its other callers. Time is counted in looks, one every BEAT_SECONDS: where
    this process stands still (Ctrl-Z, the interpreter's lock) it does not pass.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        collective_timeout: float,
        position: Callable[[], tuple[str, int]],
        stores: tuple[dist.Store, dist.Store],
    ) -> None:
        super().__init__(daemon=True, name="failure detector")
        self.rank, self.world_size, self.position = rank, world_size, position
        self.collective_timeout = collective_timeout
        self.store, self.main_store = stores
        self.process = this_process()
        self.watched: dict[int, Watched] = {}
        self.failure: Verdict | None = None  # this rank's own
        self.lost: tuple[str, str] | None = None  # how this rank has lost another, and by what words
        self.lost_at = 0
        self.code: int | None = None  # that this rank leaves with by its own will
        self.reason = ""
        self.heard, self._is_over, self._leaving = threading.Event(), threading.Event(), threading.Lock()
        self._num_beats = self._num_looks = 0

    def tell_position(self) -> None:
        """Let the others know where this rank is."""
        with contextlib.suppress(dist.DistError):  # the thread finds out why
            self._beat(self.main_store)

    def report_failure(self, text: str) -> bool:
        """Say that this rank fails; return, when the others know it, whether it could be said."""
        self.failure = Verdict(text, self.rank)
        return self.heard.wait(4 * DRAIN_SECONDS)

    def leave_with_others(self, how: str, text: str) -> None:
        """Leave after another rank was lost, once it is known which one."""
        self.lost_at, self.lost = self._num_looks, (how, text)
        before, silent_seconds = self._num_looks, 0.0
        while not self.heard.wait(BEAT_SECONDS):  # the thread ends the process
            silent_seconds = silent_seconds + BEAT_SECONDS if before == self._num_looks else 0.0
            before = self._num_looks
            if silent_seconds > 2 * SETTLE_SECONDS:  # the store does not answer the thread
                process = self.watched[0].beat.process if 0 in self.watched else None
                self.leave(self._about_first(stuck(0, self.position()[0], silent_seconds, process)))

    def say_goodbye(self, code: int, reason: str) -> None:
        """Say that this rank leaves by its own will. Rank 0, which holds the store, leaves last."""
        self.code, self.reason = code, reason
        self.tell_position()
        self._wait_for_others(LEFT_SECONDS + DRAIN_SECONDS if code else float("inf"))
        self._is_over.set()
        self.join(DRAIN_SECONDS)

    def run(self) -> None:
        """Beat and look until this rank leaves or must."""
        while not self._is_over.wait(BEAT_SECONDS):
            try:
                verdict = self.look()
            except dist.DistError:  # the store is gone, and rank 0 with it
                time.sleep(SETTLE_SECONDS / 10)  # all may be on their way out, by a signal
                verdict = self._about_first(died(0, self.position()[0]))
            if verdict and not self._is_over.is_set():
                self.leave(verdict)
                return

    def look(self) -> Verdict | None:
        """Beat, look at others, and return the verdict, None while all is well or not clear yet."""
        self._num_looks += 1
        first = self.watched.get(0)
        is_store_of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's
        if first and first.beat.code is None and is_dead(first.beat.process) and not is_store_of_launcher:
            raise dist.DistStoreError("it was in rank 0")
        self._beat(self.store)
        if self.failure:
            return self._post(self.failure)
        told = self.store.compare_set(VERDICT, "", "")
        if told:
            return Verdict(*json.loads(told))
        looks_at_all = self.rank == 0 or self.lost is not None
        for rank, beat in self._read(range(self.world_size) if looks_at_all else {0, self.rank - 1}).items():
            self._note(rank, beat)
        found = self._judge_ends() or self._judge_waits()
        return self._post(found) if found else None

    def _beat(self, store: dist.Store) -> None:
        self._num_beats += 1
        lost = self.lost[0] if self.lost else ""
        beat = Beat(
            self._num_beats, *self.position(), count_collectives(), self.process, lost, self.code, self.reason
        )
        store.set(f"beat/{self.rank}", json.dumps(beat))

    def _post(self, verdict: Verdict) -> Verdict:
        """Return the verdict that counts: the first one."""
        counts = self.store.compare_set(VERDICT, "", json.dumps(verdict._replace(by=self.rank)))
        return Verdict(*json.loads(counts))

    def _read(self, ranks: Iterable[int]) -> dict[int, Beat]:
        """Return the beats of other ranks, of those that have begun."""
        others = [rank for rank in ranks if rank != self.rank]
        known = [rank for rank in others if rank in self.watched or self.store.check([f"beat/{rank}"])]
        texts = self.store.multi_get([f"beat/{rank}" for rank in known]) if known else []
        return {rank: Beat(*json.loads(text)) for rank, text in zip(known, texts, strict=True)}

    def _note(self, rank: int, beat: Beat) -> None:
        known = self.watched.setdefault(rank, Watched(beat, self._num_looks))
        if beat.number != known.beat.number:
            known.moved_at = self._num_looks
        if (beat.num_phases, beat.calls) != (known.beat.num_phases, known.beat.calls):
            known.behind_since = None
        if beat.code is not None and known.left_at is None:
            known.left_at = self._num_looks
        known.beat = beat

    def _seconds_since(self, look: int) -> float:
        return (self._num_looks - look) * BEAT_SECONDS

    def _judge_ends(self) -> Verdict | None:
        """Return a verdict on a rank whose process is gone, or that left and others do not follow."""
        for rank, known in sorted(self.watched.items()):
            if known.beat.code is None:
                was_dead, known.was_dead = known.was_dead, is_dead(known.beat.process)
                if was_dead and known.was_dead:
                    return died(rank, known.beat.position)
            elif known.beat.code:
                if self._seconds_since(known.left_at) >= min(LEFT_SECONDS, self.collective_timeout):
                    return left(rank, known.beat)
        return None

    def _judge_waits(self) -> Verdict | None:
        """Return why this rank has lost another, when the others have had time to tell.

        Else a verdict on a rank for which others wait beyond the limit, also if these cannot say so.
        """
        late = self._find_late()
        if self.lost is None or self._seconds_since(self.lost_at) < SETTLE_SECONDS:
            return self._find_silent(late) or (self._did_not_come(late) if late else None)
        gone = {rank: known.beat for rank, known in self.watched.items() if known.beat.code is not None}
        there = {r: known for r, known in self.watched.items() if r not in gone and not known.beat.lost}
        silent = self._find_silent(there)
        if silent:
            return silent
        if gone:
            rank = min(gone, key=lambda rank: (not gone[rank].code, rank))
            return left(rank, gone[rank])
        how, text = self.lost
        if there and how == TIMEOUT:
            return self._did_not_come(there)
        hint = "where ranks send each other different things, TORCH_DISTRIBUTED_DEBUG=DETAIL shows the first"
        if how == CLOSED:
            hint = "every other rank is there: look at the network between the machines"
        return Verdict(f"rank {self.rank} failed first, {self.position()[0]}: {text}; {hint}", self.rank)

    def _find_late(self) -> dict[int, Watched]:
        """Return the ranks that have begun fewer collectives than another for longer than the limit."""
        there = {rank: known for rank, known in self.watched.items() if known.beat.code is None}
        most = count_collectives()
        for known in there.values():
            most |= {group: max(n, most.get(group, 0)) for group, n in known.beat.calls.items()}
        late = {}
        for rank, known in there.items():
            if all(n == most[group] for group, n in known.beat.calls.items()):
                known.behind_since = None
                continue
            known.behind_since = known.behind_since or self._num_looks
            if self._seconds_since(known.behind_since) >= self.collective_timeout:
                late[rank] = known
        return late

    def _find_silent(self, ranks: dict[int, Watched]) -> Verdict | None:
        for rank, known in sorted(ranks.items()):
            seconds = self._seconds_since(known.moved_at)
            if seconds >= SILENT_SECONDS:
                return stuck(rank, known.beat.position, seconds, known.beat.process)
        return None

    def _did_not_come(self, ranks: dict[int, Watched]) -> Verdict:
        rank = min(ranks, key=lambda r: (ranks[r].beat.num_phases, sum(ranks[r].beat.calls.values()), r))
        return Verdict(
            f"rank {rank} is stuck {ranks[rank].beat.position}: others wait for it in a collective, longer "
            f"than --collective_timeout {self.collective_timeout:g} s; raise that where the work needs it",
            rank,
        )

    def leave(self, verdict: Verdict) -> None:
        """End this process, unless its main thread is about to. Rank 0 says why, or who judged rank 0."""
        if not self._leaving.acquire(blocking=False):
            return
        is_speaker = verdict.rank == 0 and verdict.by == self.rank
        if self.rank == 0 or is_speaker:
            say(f"error: {verdict.text}")
        if verdict.stuck:
            kill(verdict.stuck)
        if not self.failure and not self.code:
            self.code = OTHER_RANK_FAILED
            self.tell_position()
            self._wait_for_others(2 * DRAIN_SECONDS, but=verdict.rank)
            if is_speaker:
                time.sleep(DRAIN_SECONDS)  # those that speak only after this rank see that it is there
            os._exit(OTHER_RANK_FAILED)
        self._wait_for_others(2 * DRAIN_SECONDS, but=verdict.rank)
        self.heard.set()

    def _wait_for_others(self, seconds: float, but: int = 0) -> None:
        """Let the others hear before rank 0, which holds the store, ends."""
        deadline = time.monotonic() + seconds
        others = set(range(1, self.world_size)) - {but}
        while self.rank == 0 and not self.heard.is_set() and time.monotonic() < deadline:
            beats = self._read(others)
            if len(beats) == len(others) and all(beat.code is not None for beat in beats.values()):
                return
            time.sleep(BEAT_SECONDS / 5)

    def _about_first(self, verdict: Verdict) -> Verdict:
        """Return a verdict on rank 0, whose store is gone: the first rank left on each machine tells it."""
        is_first = self.rank == 1 or os.environ.get("LOCAL_RANK") == "0"
        if not is_first:
            time.sleep(DRAIN_SECONDS / 2)
        return verdict._replace(by=self.rank if is_first else -1)


def died(rank: int, position: str) -> Verdict:
    """Return the verdict on a process that is gone."""
    text = f"rank {rank} died {position}: its process is gone without a word. The launcher names the signal; "
    return Verdict(text + "the kernel's log (dmesg) says whether memory had run out", rank)


def stuck(rank: int, position: str, seconds: float, process: Process | None) -> Verdict:
    """Return the verdict on a process that stands still, or a machine that is gone."""
    text = f"rank {rank} is stuck: no sign of life for {seconds:.0f} s; last seen {position}"
    return Verdict(text, rank, process)


def left(rank: int, beat: Beat) -> Verdict:
    """Return the verdict on a process that left before the others."""
    why = f": {beat.reason}" if beat.reason else ""
    text = f"rank {rank} left before the others, with exit code {beat.code}, {beat.position}{why}"
    return Verdict(text, rank)


def this_process() -> Process:
    """Return the process that asks. The machine's name changes with its boots and containers."""
    machine = socket.gethostname()
    with contextlib.suppress(OSError):  # not on Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = boot + os.readlink("/proc/self/ns/pid")
    return machine, os.getpid(), psutil.Process().create_time()


def find_process(process: Process) -> psutil.Process | None:
    """Return a process if it lives on this machine; a stopped one does, a zombie does not."""
    machine, pid, started = process
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(pid)
        is_same = machine == this_process()[0] and abs(found.create_time() - started) < 1.0
        return found if is_same and found.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) else None
    return None


def is_dead(process: Process) -> bool:
    """Return whether a process of this machine is gone."""
    return process[0] == this_process()[0] and find_process(process) is None


def kill(process: Process) -> None:
    """End a process of this machine, by a signal that a stopped one obeys too."""
    found = find_process(process)
    if found:
        with contextlib.suppress(psutil.Error):
            found.kill()


def count_collectives() -> dict[str, int]:
    """Return the collectives that this rank has begun, by group, of groups with the usual time limit."""
    calls = {}
    with contextlib.suppress(RuntimeError, ValueError):  # the main thread makes and ends groups meanwhile
        for group, name in list(dist.distributed_c10d._world.pg_names.items()):
            if group is dist.group.WORLD or dist.get_backend(group) == "nccl":
                calls[name] = group._get_sequence_number_for_group()
    return calls
