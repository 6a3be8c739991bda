"""Long passes over many items: their progress, and the request to stop that ends one between two items.

The first rank shows progress: in a bar if standard output is a terminal, else in a line every LINE_SECONDS.
"""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from common.ranks import failures, watchdog

LINE_SECONDS = 10.0
BAR_SECONDS = 0.5
ASKED_SECONDS = 0.2
T = TypeVar("T")


class Interrupted(Exception):  # noqa: N818  (not an error)
    """A pass has ended early because of a request to stop. Raised on every rank."""


class _Screen(Console):
    """The terminal. Its cursor stays visible: a killed program could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        return False


SCREEN = _Screen(markup=False, emoji=False, highlight=False, soft_wrap=True)
# Shown in its context. It has one row: `failures.say` replaces it, and it is drawn again below.
BAR = Progress(
    TextColumn("{task.description}", markup=False),
    BarColumn(),
    console=SCREEN,
    refresh_per_second=2,
    transient=True,
    redirect_stderr=os.isatty(2),
    disable=os.environ.get("RANK", "0") != "0" or not os.isatty(1) or SCREEN.is_dumb_terminal,
)
failures.line_start = b"\r\x1b[2K" * (os.isatty(2) and not BAR.disable)
_TASK = BAR.add_task("the start")
_run_state: dict[str, Any] = {"description": "the start", "completed": 0}  # shown between passes
# Whether a request to stop ends a pass; in a world of several ranks they agree. None does by default.
must_stop: Callable[[], bool] = bool
is_asked: Callable[[], bool] = bool  # this rank alone: it need not finish work that is discarded


def _leave_bar() -> None:
    """Restore the streams in a forked child: another thread may have held the lock of the bar's."""
    for name in ("stdout", "stderr"):
        setattr(sys, name, getattr(getattr(sys, name), "rich_proxied_file", getattr(sys, name)))


os.register_at_fork(after_in_child=_leave_bar)


def show_run(step: int, num_steps: int, seconds_left: float) -> None:
    """Let the bar show the progress of the run between its passes."""
    text = f"step {step}/{num_steps}, left {format_seconds(seconds_left)}"
    _run_state.update(description=text, completed=step, total=num_steps)
    BAR.update(_TASK, **_run_state)


class PassProgress:
    """Progress of a pass over `total` items, named after the current phase; a short one is not shown."""

    def __init__(self, total: int, unit: str) -> None:
        self.name = watchdog.current_phase()
        self.total = total
        self.unit = unit
        self.started = self.shown = time.monotonic()

    def show(self, done: int) -> None:
        """Show that so many items are done, unless the progress was shown a moment ago."""
        now = time.monotonic()
        interval = BAR_SECONDS if BAR.live.is_started else LINE_SECONDS
        if not done or self.total == 1 or now - self.shown < interval:
            return
        self.shown = now
        left = format_seconds((now - self.started) * (self.total - done) / done)
        text = f"{self.name}: {done:,} of {self.total:,} {self.unit}, left {left}"
        BAR.update(_TASK, description=text, completed=done, total=self.total)
        if not BAR.live.is_started:
            watchdog.print_progress(text)


def watched(items: Iterable[T], total: int, unit: str) -> Iterator[T]:
    """Yield the items of a pass and show its progress.

    Raises Interrupted before an item if `must_stop`; every rank must then have the same number of items.
    """
    progress = PassProgress(total, unit)
    for number, item in enumerate(items, start=1):
        leave_if_asked()
        yield item
        progress.show(number)
    BAR.update(_TASK, **_run_state)


def leave_if_asked() -> None:
    """Raise Interrupted, on all ranks or none. Every rank must call this."""
    if must_stop():
        raise Interrupted


def finished(work: Future[T]) -> T | None:
    """Result of a thread's work; None if this rank `is_asked` to stop before: then call `leave_if_asked`."""
    while not work.done() and not is_asked():
        wait([work], timeout=ASKED_SECONDS)
    if work.done():
        return work.result()
    return None


def format_seconds(seconds: float) -> str:
    """Text of a duration, such as 1:02:03."""
    return str(timedelta(seconds=max(round(seconds), 0)))
