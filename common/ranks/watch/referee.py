"""Which rank failed first: judges what it hears of all ranks, and touches nothing. PURE.

Times are seconds of one clock, the one of the process that judges.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from common.ranks.failures import CLOSED, TIMEOUT

SILENT_SECONDS = 2.5  # without a beat, of which there are two a second: when one rank is looked for
GONE_SECONDS = 0.3  # a connection that ended without a word; others may end at the same moment, all by Ctrl-C
SETTLE_SECONDS = (
    3.0  # between the first rank that lost another and the verdict: a beat must have time to fail
)
LEFT_SECONDS = 30.0  # between a rank that left with an exit code and others that do not follow it
PAUSE_SECONDS = 2.0  # between two looks: it was this process that stood still, not the others


class Verdict(NamedTuple):
    """Why all ranks leave."""

    text: str  # names the first rank to fail and where it was
    silent_rank: int | None = None  # one that cannot hear of it


def died(rank: int, place: str) -> str:
    """Return what to say of a process that is gone."""
    return (
        f"rank {rank} died {place}: its process, or its machine, is gone without a word. The launcher names "
        "the signal; the kernel's log (dmesg) says whether memory had run out"
    )


def stuck(rank: int, place: str, seconds: float) -> str:
    """Return what to say of a process that stands still."""
    return f"rank {rank} is stuck: no sign of life for {seconds:.0f} s; last seen {place}"


def left(rank: int, place: str, code: int, reason: str) -> str:
    """Return what to say of a process that left before the others."""
    why = f": {reason}" if reason else ""
    return f"rank {rank} left before the others, with exit code {code}, {place}{why}"


def lost(rank: int, place: str, text: str, kind: str) -> str:
    """Return what to say where a rank cannot reach others that are all well."""
    if kind == CLOSED:
        hint = "; every other rank is there: look at the network between the machines"
    else:
        hint = "; where ranks send each other different things, --check_collectives shows the first"
    return f"rank {rank} failed first, {place}: {text}{hint}"


@dataclass
class RankRecord:
    """What is known of a rank."""

    place: str
    seen: float  # the last beat
    num_phases: int = 0  # that it has entered
    calls: dict[str, int] = field(default_factory=dict)  # collectives that it has begun, by group
    timed: list[str] = field(default_factory=list)  # the groups whose limit is --collective_timeout
    behind_since: float | None = None
    code: int | None = None  # that it left with
    reason: str = ""
    left_at: float = 0.0
    gone_at: float | None = None


class Referee:
    """Hears of ranks from the connections to them, and names the one that failed first."""

    def __init__(self, world_size: int, collective_timeout: float, place: str, now: float) -> None:
        self.ranks = {rank: RankRecord(place, now) for rank in range(world_size)}
        self.collective_timeout = collective_timeout
        self.suspects: dict[int, tuple[str, str]] = {}  # rank -> how and by what words it lost another
        self.suspected_at = 0.0
        self.failure: Verdict | None = None
        self._last_look = now

    # -----------------------------------------------------------------------------------------------------
    # Hearing
    # -----------------------------------------------------------------------------------------------------

    def hear_beat(self, rank: int, beat: dict[str, Any], now: float) -> None:
        """Take a sign of life."""
        record = self.ranks[rank]
        moved = (record.num_phases, record.calls) != (beat["num_phases"], beat["calls"])
        record.place, record.num_phases = beat["place"], beat["num_phases"]
        record.calls, record.timed, record.seen = beat["calls"], beat["timed"], now
        if moved:
            record.behind_since = None

    def hear_suspicion(self, rank: int, kind: str, text: str, now: float) -> None:
        """Take that a rank has lost another."""
        if not self.suspects:
            self.suspected_at = now
        self.suspects.setdefault(rank, (kind, text))

    def hear_failure(self, rank: int, place: str, text: str) -> None:
        """Take that a rank ends by its own failure; the first one counts."""
        if self.failure is None:
            self.failure = Verdict(f"rank {rank} failed first, {place}: {text}")

    def hear_goodbye(self, rank: int, code: int, reason: str, now: float) -> None:
        """Take that a rank leaves by its own will."""
        record = self.ranks[rank]
        record.code, record.reason, record.left_at = code, reason, now

    def hear_end(self, rank: int, now: float) -> None:
        """Take that the connection to a rank has ended."""
        record = self.ranks[rank]
        if record.code is None and record.gone_at is None:
            record.gone_at = now

    # -----------------------------------------------------------------------------------------------------
    # Judging
    # -----------------------------------------------------------------------------------------------------

    @property
    def present(self) -> dict[int, RankRecord]:
        """Return the ranks that have not left."""
        return {rank: record for rank, record in self.ranks.items() if record.code is None}

    def judge(self, now: float) -> Verdict | None:
        """Return the verdict, or None while all is well or not clear yet."""
        self._forgive_pause(now)
        return self.failure or self._judge_ends(now) or self._judge_suspicion(now) or self._judge_wait(now)

    def _forgive_pause(self, now: float) -> None:
        """Add the time that this process stood still (Ctrl-Z, one long call) to all clocks."""
        pause = now - self._last_look
        self._last_look = now
        if pause < PAUSE_SECONDS:
            return
        self.suspected_at += pause
        for record in self.ranks.values():
            record.seen += pause
            record.left_at += pause
            record.gone_at = None if record.gone_at is None else record.gone_at + pause
            record.behind_since = None

    def _judge_ends(self, now: float) -> Verdict | None:
        gone = [(r.gone_at, rank) for rank, r in self.present.items() if r.gone_at is not None]
        if gone:
            at, rank = min(gone)
            if now - at >= GONE_SECONDS:
                return Verdict(died(rank, self.ranks[rank].place))
        bad = [(r.left_at, rank) for rank, r in self.ranks.items() if r.code]
        if bad and self.present:
            at, rank = min(bad)
            # Those that wait for it know sooner than the clock.
            if self.suspects or now - at >= min(LEFT_SECONDS, self.collective_timeout):
                return self._left(rank)
        return None

    def _judge_suspicion(self, now: float) -> Verdict | None:
        if not self.suspects or now - self.suspected_at < SETTLE_SECONDS:
            return None
        return self._silent(now) or self._early_leaver() or self._latecomer(now) or self._loser()

    def _silent(self, now: float) -> Verdict | None:
        silent = [
            (r.seen, rank)
            for rank, r in self.present.items()
            if now - r.seen >= SILENT_SECONDS and rank not in self.suspects
        ]
        if not silent:
            return None
        seen, rank = min(silent)
        return Verdict(stuck(rank, self.ranks[rank].place, now - seen), silent_rank=rank)

    def _early_leaver(self) -> Verdict | None:
        gone = [(r.left_at, rank) for rank, r in self.ranks.items() if r.code is not None]
        if not gone:
            return None
        return self._left(min(gone)[1])

    def _left(self, rank: int) -> Verdict:
        record = self.ranks[rank]
        return Verdict(left(rank, record.place, record.code, record.reason))

    def _latecomer(self, now: float) -> Verdict | None:
        """Return the rank that the others wait for, where they waited too long."""
        if not any(kind == TIMEOUT for kind, _ in self.suspects.values()):
            return None
        waited_for = set(self.present) - set(self.suspects)
        behind = self._behind(timed_only=False) & waited_for
        return self._did_not_come(behind or waited_for) if waited_for else None

    def _loser(self) -> Verdict:
        rank, (kind, text) = next(iter(self.suspects.items()))
        return Verdict(lost(rank, self.ranks[rank].place, text, kind))

    def _did_not_come(self, ranks: set[int]) -> Verdict:
        late = min(ranks, key=lambda r: (self.ranks[r].num_phases, sum(self.ranks[r].calls.values()), r))
        place = self.ranks[late].place
        return Verdict(
            f"rank {late} is stuck {place}: others wait for it in a collective, longer than "
            f"--collective_timeout {self.collective_timeout:g} s; raise that where the work needs it"
        )

    def _behind(self, *, timed_only: bool) -> set[int]:
        """Return the ranks that have begun fewer collectives of a group than another one of it."""
        most: dict[str, int] = {}
        for record in self.present.values():
            for group, count in record.calls.items():
                most[group] = max(most.get(group, 0), count)
        return {
            rank
            for rank, record in self.present.items()
            for group, count in record.calls.items()
            if count < most[group] and (group in record.timed or not timed_only)
        }

    def _judge_wait(self, now: float) -> Verdict | None:
        """Return a verdict where a rank lets others wait beyond the limit, also if these cannot say so."""
        behind = self._behind(timed_only=True)
        for rank, record in self.present.items():
            if rank not in behind:
                record.behind_since = None
            elif record.behind_since is None:
                record.behind_since = now
        late = {rank for rank in behind if now - self.ranks[rank].behind_since >= self.collective_timeout}
        if not late:
            return None
        silent = [rank for rank in sorted(late) if now - self.ranks[rank].seen >= SILENT_SECONDS]
        if silent:
            record = self.ranks[silent[0]]
            return Verdict(stuck(silent[0], record.place, now - record.seen), silent_rank=silent[0])
        return self._did_not_come(late)
