"""The hub of the watch: a thread of rank 0 to which every rank keeps a connection.

A connection ends when its process does, whatever ended it, and lasts while the process computes, holds the
interpreter's lock, or stands still: that one is dead is never guessed from silence.
"""

import contextlib
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from common.ranks.watch.collective_schedule import Schedules
from common.ranks.watch.lines import LineSocket
from common.ranks.watch.referee import Referee, Verdict

LOOK_SECONDS, BEAT_SECONDS = 0.1, 0.5
DRAIN_SECONDS = 1.5  # for the ranks to read the last word
COMPARE_SECONDS = 1.0  # between two looks at the collectives amid a step
MACHINE_GONE_SECONDS = 120.0  # without an answer by the kernel at the other end


def _listen(host: str, backlog: int) -> socket.socket:
    """Return a listening socket of a host, or of all addresses of this machine."""
    listener = None
    if not host:
        with contextlib.suppress(OSError, ValueError):  # IPv6 may not be there
            listener = socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True
            )
    listener = listener or socket.create_server((host, 0), backlog=backlog)
    listener.setblocking(False)
    return listener


class Hub(threading.Thread):
    """Hears of all ranks, tells all of them the verdict. `place()` says where rank 0 is."""

    def __init__(
        self,
        host: str,
        world_size: int,
        collective_timeout: float,
        place: Callable[[], str],
        *,
        checks_collectives: bool = False,
    ) -> None:
        super().__init__(daemon=True, name="watch hub")
        self.world_size, self.place, self.token = world_size, place, secrets.token_hex(8)
        self.schedules = Schedules(world_size) if checks_collectives else None
        self.dead_seconds = min(collective_timeout, MACHINE_GONE_SECONDS)
        self.listener = _listen(host, min(world_size, 4096))
        self.port = self.listener.getsockname()[1]
        self.referee = Referee(world_size, collective_timeout, place(), time.monotonic())
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.members: dict[int, LineSocket] = {}
        self.processes: dict[int, list[Any]] = {}
        self.is_done = threading.Event()
        self._closing: dict[str, Any] | None = None
        self._drain_until: float | None = None
        self._step_ends: dict[int, int] = {}  # rank -> step, of those that wait at its end
        self._compared_at = 0.0

    # -----------------------------------------------------------------------------------------------------
    # For rank 0's other threads
    # -----------------------------------------------------------------------------------------------------

    def tell_place(self) -> None:
        """Let the other ranks know where rank 0 is, and that it is alive."""
        for member in list(self.members.values()):
            member.send(kind="beat", place=self.place())

    def tell_call(self, **call: str) -> None:
        """Let the other ranks know of a collective of rank 0: when it dies of it, this hub is gone too."""
        for rank, member in list(self.members.items()):
            if rank:
                member.send(kind="call", **call)

    def close(self, code: int, reason: str) -> None:
        """Tell the ranks that rank 0 leaves by its own will; return when they know."""
        self._closing = {"code": code, "reason": reason}
        self.is_done.wait(2 * DRAIN_SECONDS)

    # -----------------------------------------------------------------------------------------------------
    # The thread
    # -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Hear and judge until there is a verdict or rank 0 leaves."""
        next_beat = 0.0
        try:
            while not self._is_drained():
                self._hear_all()
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + BEAT_SECONDS
                    self.tell_place()
                if self._drain_until is None:
                    self._look(now)
            for each in (self.selector, self.listener, *self.members.values()):
                each.close()  # not after an error in here: it would look like the death of this process
        finally:
            self.is_done.set()

    def _hear_all(self) -> None:
        """Take in all that was said: who is judged must have been heard."""
        events = self.selector.select(LOOK_SECONDS)
        deadline = time.monotonic() + BEAT_SECONDS
        while events:
            for key, _ in events:
                if key.fileobj is self.listener:
                    self._accept()
                else:
                    self._read(key.fileobj, key.data, time.monotonic())
            events = self.selector.select(0) if time.monotonic() < deadline else ()

    def _look(self, now: float) -> None:
        verdict = self._judge_schedules(now) or self.referee.judge(now)
        if verdict:
            self._say_last(kind="verdict", text=verdict.text, silent_rank=verdict.silent_rank)
        elif self._closing is not None:
            self._say_last(kind="closed", **self._closing)

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        member = LineSocket(connection, self.dead_seconds, may_wait=False)
        self.selector.register(member, selectors.EVENT_READ, data={"rank": None})

    def _read(self, member: LineSocket, who: dict[str, Any], now: float) -> None:
        try:
            messages = member.receive()
        except ValueError:  # a stranger at the door
            messages = None
        if messages is None:
            self.selector.unregister(member)
            member.close()
            if who["rank"] is not None:
                del self.members[who["rank"]]
                self.referee.hear_end(who["rank"], now)
            return
        for message in messages:
            if who["rank"] is None:
                if not isinstance(message, dict) or message.get("token") != self.token:
                    member.end_sending()
                    return
                self._welcome(member, who, message)
            else:
                self._hear(who["rank"], message, now)

    def _welcome(self, member: LineSocket, who: dict[str, Any], message: dict[str, Any]) -> None:
        rank = who["rank"] = message["rank"]
        self.members[rank], self.processes[rank] = member, message["process"]
        member.send(kind="welcome")
        if len(self.processes) == self.world_size:
            roster = [self.processes[rank] for rank in range(self.world_size)]
            for each in self.members.values():
                each.send(kind="roster", processes=roster)

    def _hear(self, rank: int, message: dict[str, Any], now: float) -> None:
        kind, referee = message["kind"], self.referee
        if kind == "beat":
            referee.hear_beat(rank, message, now)
        elif kind == "suspicion":
            referee.hear_suspicion(rank, message["how"], message["text"], now)
        elif kind == "failure":
            referee.hear_failure(rank, message["place"], message["text"])
        elif kind == "goodbye":
            referee.hear_goodbye(rank, message["code"], message["reason"], now)
        elif kind == "call":
            self.schedules.add(rank, message["group"], message["what"], message["where"])
        elif kind == "step end":
            self._step_ends[rank] = message["step"]

    # -----------------------------------------------------------------------------------------------------
    # The last word
    # -----------------------------------------------------------------------------------------------------

    def _say_last(self, **message: Any) -> None:
        for member in self.members.values():
            member.send(**message)
            member.end_sending()
        self._drain_until = time.monotonic() + DRAIN_SECONDS

    def _is_drained(self) -> bool:
        return self._drain_until is not None and (
            not set(self.members) - {0} or time.monotonic() > self._drain_until
        )

    # -----------------------------------------------------------------------------------------------------
    # --check_collectives
    # -----------------------------------------------------------------------------------------------------

    def _judge_schedules(self, now: float) -> Verdict | None:
        """Return a verdict where ranks have begun different collectives.

        They are compared at the end of a step, where those that wait go on if they are equal. Between the
        ends it is looked for a difference now and then: it may be why they do not come to the next one.
        """
        if self.schedules is None:
            return None
        is_step_end = len(self._step_ends) == self.world_size
        if is_step_end and self.schedules.are_equal():
            step = self._step_ends[0]
            self._step_ends = {}
            for member in self.members.values():
                member.send(kind="checked", step=step)
            return None
        has_trouble = self.referee.suspects or any(r.gone_at is not None for r in self.referee.ranks.values())
        interval = COMPARE_SECONDS / 4 if has_trouble else COMPARE_SECONDS
        if not is_step_end and now - self._compared_at < interval:
            return None
        self._compared_at = now
        found = self.schedules.first_difference(set(self._step_ends))
        if found is None and is_step_end:
            found = "one of the first, which are no longer kept"
        if found is None:
            return None
        place = f"at step {next(iter(self._step_ends.values()))}" if self._step_ends else self.place()
        return Verdict(f"the ranks' collectives differ {place}: {found}")
