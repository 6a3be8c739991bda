"""The watch over the ranks: where each of them is, which one failed first, and that all leave then.

Every rank has a thread with a connection to a hub in rank 0. A rank that fails says so, one that dies ends
its connection, one that others wait for in vain is looked for. All that are left then end with exit code 4,
and one of them names the first to fail. Nothing of it is there in a world of one.
"""

import atexit
import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from common.ranks.failures import communication_failure, first_line, is_out_of_memory, kind_and_line
from common.ranks.step_costs import COSTS
from common.ranks.watch.collective_schedule import CollectiveRecorder, Schedules
from common.ranks.watch.hub import Hub
from common.ranks.watch.member import OTHER_RANK_FAILED, Member, say
from common.ranks.watch.referee import LEFT_SECONDS, SETTLE_SECONDS

OWN_FAILURE, NO_MEMORY = 1, 3
ADDRESS_KEY = "triptych/watch"


class Place(NamedTuple):
    """What a rank does."""

    phase: str = "the start-up"
    step: int | None = None
    is_over: bool = False

    def __str__(self) -> str:
        where = f"{'after' if self.is_over else 'in'} {self.phase}"
        return where if self.step is None else f"at step {self.step} {where}"


_place = Place()
_num_phases = _depth = 0
_reason = ""
_member: Member | None = None


def _forget() -> None:
    """A child that is forked is no rank."""
    global _member
    _member = None


os.register_at_fork(after_in_child=_forget)


_told: set[str] | None = None  # outermost phases that the first rank has printed; None: it prints none
_began = time.monotonic()


def tell_phases() -> None:
    """Let the first rank print each kind of phase when it begins for the first time."""
    global _told
    _told = set()


def tell(text: str) -> None:
    """Print what the first rank is doing, with the seconds since the start, once `tell_phases` was called."""
    if _told is not None and os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # nobody reads it any more
            print(f"[{time.monotonic() - _began:4.0f} s] {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def phase(name: str, step: int | None = None, *, clock: str = "") -> Iterator[None]:
    """Let messages say that this rank is in `name` ("the rollout") while the block runs.

    With a `clock` its seconds are logged as perf/CLOCK_seconds (`StepCosts.clock`).
    """
    global _place, _num_phases, _depth
    kind = clock or name
    if _told is not None and not _depth and kind not in _told:
        _told.add(kind)
        tell(name)
    before = _place
    _place = mine = Place(name, before.step if step is None else step)
    _num_phases, _depth = _num_phases + 1, _depth + 1
    if _member:
        _member.tell_place()
    try:
        with COSTS.clock(clock) if clock else contextlib.nullcontext():
            yield
    except BaseException as error:
        if not hasattr(error, "rank_place"):
            error.rank_place = _place  # the innermost; who takes the error has left it
        raise
    finally:
        _depth -= 1
        _place = before if _depth else mine._replace(is_over=True)


def start(collective_timeout: float, host: str, recorder: CollectiveRecorder | None = None) -> None:
    """Begin to watch. Every rank of a world of more than one must call this, once it is in the group.

    `host` is where the hub in rank 0 listens, empty for all addresses of its machine.
    """
    global _member
    store, world_size = dist.distributed_c10d._get_default_store(), dist.get_world_size()
    hub = None
    if dist.get_rank() == 0:
        checks = recorder is not None
        hub = Hub(host, world_size, collective_timeout, lambda: str(_place), checks_collectives=checks)
        hub.start()
        hosts = [host] if host else [os.environ["MASTER_ADDR"], _own_address(), socket.gethostname()]
        hosts = list(dict.fromkeys(hosts))  # any of them may be the one that other machines reach
        store.set(ADDRESS_KEY, json.dumps({"hosts": hosts, "port": hub.port, "token": hub.token}))
    address = json.loads(store.get(ADDRESS_KEY))
    _member = Member(
        dist.get_rank(),
        address,
        collective_timeout,
        lambda: (str(_place), _num_phases),
        hub,
        Schedules(world_size) if recorder else None,
    )
    _member.start()
    if recorder:
        _member.wait_until_connected()  # it is to hear of the first collective
        recorder.tell = _member.tell_call
    atexit.register(say_goodbye, 0)  # a program that does not go through run_program


def _own_address() -> str:
    """Return this machine's address in the net of the process group's store."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))  # sends nothing
        return probe.getsockname()[0]
    return socket.gethostname()


def say_goodbye(code: int, reason: str = "") -> None:
    """Let the others know that this rank leaves by its own will, before it does; the first reason counts."""
    global _member
    if _member:
        member, _member = _member, None
        member.say_goodbye(code, (_reason or reason).strip().partition("\n")[0])


def keep_reason(text: str) -> None:
    """Remember why this rank is about to leave: the others may not have the same reason."""
    global _reason
    _reason = _reason or text


def check_schedule(step: int) -> None:
    """Compare the collectives of all ranks up to here, under --check_collectives.

    Every rank must call this. Where they differ all leave, and the message names the first that does.
    """
    if _member and _member.schedules:
        _member.check_schedule(step)


def leave_after(error: Exception) -> None:
    """Leave this rank after an error that nobody took, and let all others leave.

    Without memory it ends in one line, after another rank's failure in the line that names that one, else
    with a traceback. Returns in a world of one, where the interpreter is to show the error.
    """
    global _place
    _place = getattr(error, "rank_place", _place)  # the beats go on telling it
    how = communication_failure(error) if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None
    if is_out_of_memory(error):
        _report(error, in_one_line=True)
        os._exit(NO_MEMORY)
    if how:
        _wait_for_verdict(error, how)
    if _member:
        traceback.print_exception(error)
        _report(error, in_one_line=False)
        os._exit(OWN_FAILURE)


def _report(error: Exception, *, in_one_line: bool) -> None:
    """Say what ended this rank, to the others and to the user."""
    sys.stderr.flush()
    if _member is None:
        say(f"error: {first_line(error)}")
        return
    is_told = _member.report_failure(str(_place), kind_and_line(error))
    if in_one_line and (_member.rank or not is_told):  # the first rank has said it for all
        say(f"error: rank {_member.rank} ran out of memory {_place}: {kind_and_line(error)}")


def _wait_for_verdict(error: Exception, how: str) -> NoReturn:
    """Leave with the others once it is known which of them failed first."""
    if _member and _member.line:
        _member.suspect(how, kind_and_line(error))
        time.sleep(2 * SETTLE_SECONDS + LEFT_SECONDS)  # the thread ends the process long before
    rank = os.environ["RANK"]
    say(f"error: rank {rank} has lost other ranks {_place}: {kind_and_line(error)}")
    os._exit(OTHER_RANK_FAILED)
