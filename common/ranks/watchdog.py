"""The phase that each rank is in, for messages and timers; and the exit of a rank when it or another one
fails.

Nothing is monitored in a world of one.
"""

import atexit
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist

from common.ranks.failure_detector import FailureDetector
from common.ranks.failures import first_line, has_lost_ranks, is_out_of_memory, kind_and_line, say
from common.ranks.step_costs import COSTS

OWN_FAILURE, NO_MEMORY = 1, 3


class Position(NamedTuple):
    """The phase that a rank is in."""

    phase: str = "the start-up"
    step: int | None = None
    is_over: bool = False

    def __str__(self) -> str:
        where = f"{'after' if self.is_over else 'in'} {self.phase}"
        return where if self.step is None else f"at step {self.step} {where}"


_position = Position()
_depth = 0
_detector: FailureDetector | None = None
_printed_phases: set[str] | None = None  # outermost phases that rank 0 has printed; None: it prints none
_began = time.monotonic()


def _forget() -> None:
    """Reset the state in a forked child, which is not a rank."""
    global _detector
    _detector = None


os.register_at_fork(after_in_child=_forget)


def print_progress_lines() -> None:
    """Make the first rank print each kind of phase when it first starts."""
    global _printed_phases
    _printed_phases = set()


def print_progress(text: str) -> None:
    """Print a line with the seconds since the start, on the first rank, after `print_progress_lines`."""
    if _printed_phases is not None and os.environ.get("RANK", "0") == "0":
        say(f"[{time.monotonic() - _began:4.0f} s] {text}")


def current_phase() -> str:
    """Name of the innermost phase that this rank is in."""
    return _position.phase


@contextlib.contextmanager
def phase(name: str, step: int | None = None, *, clock: str = "") -> Iterator[None]:
    """Context that sets this rank's phase ("the rollout") for messages.

    With a `clock` its seconds are logged as perf/CLOCK_seconds (`StepCosts.clock`).
    """
    global _position, _depth
    kind = clock or name
    if _printed_phases is not None and not _depth and kind not in _printed_phases:
        _printed_phases.add(kind)
        print_progress(name)
    before = _position
    _position = current = Position(name, before.step if step is None else step)
    _depth += 1
    if _detector:
        _detector.send_position()
    try:
        with COSTS.clock(clock) if clock else contextlib.nullcontext():
            yield
    except BaseException as error:
        if not hasattr(error, "rank_position"):
            error.rank_position = _position  # innermost phase; the handler runs outside it
        raise
    finally:
        _depth -= 1
        _position = before if _depth else current._replace(is_over=True)


def start(store: dist.Store, rank: int, world_size: int, collective_timeout: float) -> None:
    """Start monitoring. Every rank of a world larger than one must call this after it joined the store."""
    global _detector
    stores = tuple(dist.PrefixStore("triptych", store.clone()) for _ in range(2))
    detector = FailureDetector(rank, world_size, collective_timeout, lambda: str(_position), stores)
    detector.send_position()  # a rank without a first heartbeat is not monitored
    detector.read_rank_0()
    detector.start()
    _detector = detector  # only now: if rank 0 is lost before, there is no thread to wait for
    # For programs that do not use run_program.
    atexit.register(lambda: shut_down(int(hasattr(sys, "last_value"))))


def shut_down(code: int, cause: BaseException | None = None) -> None:
    """Exit voluntarily together with the other ranks, which receive the cause."""
    global _detector, _position
    if _detector:
        _position = getattr(cause, "rank_position", _position)
        detector = _detector
        _detector = None
        detector.shut_down(code, first_line(cause) if cause else "")


def exit_on_error(error: Exception) -> None:
    """Exit after an uncaught exception and shut down the other ranks.

    An out-of-memory error is printed as one line, another rank's failure as the line that names it, anything
    else with a traceback. Returns in a world of one, where the interpreter prints the error.
    """
    global _position
    _position = getattr(error, "rank_position", _position)  # later heartbeats report it too
    text = kind_and_line(error)
    rank = os.environ.get("RANK")
    no_memory = is_out_of_memory(error)
    if _detector is None:
        if no_memory:
            say(f"error: {first_line(error)}")
            os._exit(NO_MEMORY)
        return
    if has_lost_ranks(error) and not no_memory:
        _detector.exit_after_others(text)
    if no_memory and rank != "0":  # rank 0 prints the verdict
        say(f"error: rank {rank} ran out of memory {_position}: {text}")
    elif not no_memory:
        traceback.print_exception(error)
        sys.stderr.flush()
    _detector.report_failure(f"rank {rank} failed first, {_position}: {text}")
    os._exit(NO_MEMORY if no_memory else OWN_FAILURE)
