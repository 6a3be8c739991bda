"""A rank's side of the watch: a thread that beats, listens to the hub in rank 0, and ends the process."""

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from common.ranks.failures import RankDidNotCome
from common.ranks.watch.collective_schedule import Schedules
from common.ranks.watch.hub import BEAT_SECONDS, DRAIN_SECONDS, MACHINE_GONE_SECONDS, Hub
from common.ranks.watch.lines import LineSocket
from common.ranks.watch.local_processes import LocalProcess, this_process
from common.ranks.watch.referee import GONE_SECONDS, LEFT_SECONDS, SETTLE_SECONDS, Verdict, died, left, stuck

OTHER_RANK_FAILED = 4
CONNECT_SECONDS = 30.0


def say(text: str) -> None:
    """Write a line at once: the process is about to end, and another thread may hold sys.stderr's lock."""
    line = f"\n{text}\n" if os.isatty(2) else f"{text}\n"  # a progress bar may stand there
    os.write(2, line.encode(errors="replace"))


class Member(threading.Thread):
    """A rank's thread. `place()` says where the rank is, and how many phases it has entered."""

    def __init__(
        self,
        rank: int,
        address: dict[str, Any],
        collective_timeout: float,
        place: Callable[[], tuple[str, int]],
        hub: Hub | None,
        schedules: Schedules | None,
    ) -> None:
        super().__init__(daemon=True, name="watch")
        self.rank, self.hub, self.place = rank, hub, place
        self.schedules = schedules  # to hear of this rank and of rank 0
        self.collective_timeout, self.address = collective_timeout, address
        self.line: LineSocket | None = None
        self.processes: list[LocalProcess] = []
        self.hub_place, self.hub_seen = place()[0], time.monotonic()
        self.suspected_at: float | None = None  # that another rank is lost
        self.left_code: int | None = None  # this rank's
        self._hub_code: int | None = None
        self._hub_reason = ""
        self._fails = False
        self._heard_verdict, self._is_connected = threading.Event(), threading.Event()
        self._checked = threading.Semaphore(0)

    # -----------------------------------------------------------------------------------------------------
    # For the main thread
    # -----------------------------------------------------------------------------------------------------

    def wait_until_connected(self) -> None:
        """Return when the hub is reached, or cannot be."""
        self._is_connected.wait(2 * CONNECT_SECONDS)

    def tell_place(self) -> None:
        """Let the others know where this rank is."""
        self._beat()
        if self.hub:
            self.hub.tell_place()

    def suspect(self, how: str, text: str) -> None:
        """Say that another rank is lost: the thread leaves when it is known which one."""
        self.suspected_at = time.monotonic()
        if self.line:
            self.line.send(kind="suspicion", how=how, text=text)

    def report_failure(self, place: str, text: str) -> bool:
        """Say that this rank fails; return, when the others know it, whether the first to fail was named."""
        self._fails = True
        if self.line:
            self.line.send(kind="failure", place=place, text=text)
            self._heard_verdict.wait(2 * DRAIN_SECONDS)
        if self.hub:
            self.hub.is_done.wait(2 * DRAIN_SECONDS)
        return self._heard_verdict.is_set()

    def say_goodbye(self, code: int, reason: str) -> None:
        """Say that this rank leaves by its own will."""
        self.wait_until_connected()
        self.left_code = code
        if self.line:
            self.line.send(kind="goodbye", code=code, reason=reason)
            self.line.end_sending()
        if self.hub:
            self.hub.close(code, reason)
        self.join(DRAIN_SECONDS)

    def tell_call(self, group: str, what: str, where: str) -> None:
        """Let the others know of a collective before it begins."""
        call = {"group": group, "what": what, "where": where}
        if self.line:
            self.line.send(kind="call", **call)
        if self.hub:
            self.hub.tell_call(**call)
        else:
            self.schedules.add(self.rank, **call)

    def check_schedule(self, step: int) -> None:
        """Wait until all ranks have come to the end of a step and their collectives are found equal.

        Raises RankDidNotCome.
        """
        if self.line is None:
            return
        self.line.send(kind="step end", step=step)
        if not self._checked.acquire(timeout=self.collective_timeout):
            raise RankDidNotCome(f"not all ranks came to the end of step {step}")

    # -----------------------------------------------------------------------------------------------------
    # The thread
    # -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Beat, and listen to the hub, until this rank leaves or must."""
        self.line, messages = self._connect()
        self._is_connected.set()
        next_beat = 0.0
        while self.line:
            for message in messages:
                self._hear(message)
            if self._heard_verdict.is_set():
                return  # the main thread ends this process, which fails too
            self._judge_hub()
            now = time.monotonic()
            if now >= next_beat and self.left_code is None:
                next_beat = now + BEAT_SECONDS
                self._beat()
            readable, _, _ = select.select([self.line], [], [], BEAT_SECONDS / 2)
            messages = self.line.receive() if readable else []
            if messages is None:
                self.line.close()
                self._lose_hub()
                return

    def _beat(self) -> None:
        if self.line:
            place, num_phases = self.place()
            calls, timed = _count_collectives()
            self.line.send(kind="beat", place=place, num_phases=num_phases, calls=calls, timed=timed)

    def _connect(self) -> tuple[LineSocket | None, list[dict[str, Any]]]:
        """Return the connection to the hub and what it said first; None where it cannot be reached."""
        dead_seconds = min(self.collective_timeout, MACHINE_GONE_SECONDS)
        deadline = time.monotonic() + CONNECT_SECONDS
        while time.monotonic() < deadline:
            for host in self.address["hosts"]:
                with contextlib.suppress(OSError, ValueError):
                    connection = socket.create_connection((host, self.address["port"]), timeout=3.0)
                    line = LineSocket(connection, dead_seconds)
                    line.send(token=self.address["token"], rank=self.rank, process=this_process())
                    messages = line.receive()
                    if messages:  # a stranger on that port says something else, or nothing
                        return line, messages
                    line.close()
            time.sleep(BEAT_SECONDS)
        say(
            f"note: rank {self.rank} cannot reach rank 0 on port {self.address['port']} of "
            f"{' or '.join(self.address['hosts'])}: it is not told which rank fails first"
        )
        return None, []

    def _hear(self, message: dict[str, Any]) -> None:
        kind = message["kind"]
        self.hub_seen = time.monotonic()
        if kind == "beat":
            self.hub_place = message["place"]
        elif kind == "roster":
            self.processes = [LocalProcess(*facts) for facts in message["processes"]]
        elif kind == "checked":
            self._checked.release()
        elif kind == "call":
            self.schedules.add(0, message["group"], message["what"], message["where"])
        elif kind == "closed":
            self._hub_code, self._hub_reason = message["code"], message["reason"]
        elif kind == "verdict":
            self._leave(Verdict(message["text"], message["silent_rank"]), speaks=self.rank == 0)

    def _lose_hub(self) -> None:
        """The connection has ended: rank 0 has left, or died."""
        if self.left_code is not None or self._fails or self._heard_verdict.is_set():
            return
        if self._hub_code is None:
            time.sleep(GONE_SECONDS)  # all may be on their way out, by a signal
            found = self.schedules.first_difference(set()) if self.schedules else None
            differ = f"the ranks' collectives differ {self.hub_place}: {found}"
            self._leave(Verdict(differ if found else died(0, self.hub_place)), speaks=self._is_lowest())
            return
        patience = min(LEFT_SECONDS, self.collective_timeout) if self._hub_code else math.inf
        deadline = time.monotonic() + patience
        while self.suspected_at is None and self.left_code is None and time.monotonic() < deadline:
            time.sleep(BEAT_SECONDS / 5)
        if self.left_code is None:
            text = left(0, self.hub_place, self._hub_code, self._hub_reason)
            self._leave(Verdict(text), speaks=self._is_lowest())

    def _judge_hub(self) -> None:
        """Leave when another rank is lost and rank 0, which should say which one, stands still."""
        if self.suspected_at is None or self.hub:
            return
        now = time.monotonic()
        silent = now - self.hub_seen
        if min(silent, now - self.suspected_at) > SETTLE_SECONDS:
            verdict = Verdict(stuck(0, self.hub_place, silent), silent_rank=0)
            self._leave(verdict, speaks=self._is_lowest())

    # -----------------------------------------------------------------------------------------------------
    # Leaving
    # -----------------------------------------------------------------------------------------------------

    def _is_lowest(self) -> bool:
        """Return whether no living rank of this machine but rank 0, which is lost, comes before this one."""
        before = self.processes[1 : self.rank]
        return not any(process.is_here() and process.is_alive() for process in before)

    def _leave(self, verdict: Verdict, *, speaks: bool) -> None:
        """End this process for another rank's failure; `speaks`: with the message."""
        self._heard_verdict.set()
        if speaks:
            say(f"error: {verdict.text}")
        if verdict.silent_rank is not None and self.processes:
            self.processes[verdict.silent_rank].kill()
        if self.line:
            self.line.close()
        if self._fails:
            return  # the main thread ends this process with a code of its own
        if self.hub:
            self.hub.is_done.wait(2 * DRAIN_SECONDS)
        elif speaks:
            time.sleep(DRAIN_SECONDS)  # the others see that this one is there, and keep quiet
        os._exit(OTHER_RANK_FAILED)


def _count_collectives() -> tuple[dict[str, int], list[str]]:
    """Return the collectives that this rank has begun, by group, and the groups with the usual time limit."""
    calls, timed = {}, []
    with contextlib.suppress(RuntimeError, ValueError):  # the main thread makes and ends groups meanwhile
        for group, name in list(dist.distributed_c10d._world.pg_names.items()):
            calls[name] = group._get_sequence_number_for_group()
            if group is dist.group.WORLD or dist.get_backend(group) == "nccl":
                timed.append(name)
    return calls, timed
