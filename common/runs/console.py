"""The console of a run: a line per logged step under a heading, a table per evaluation, the time left."""

import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rich.table import Column, Table

from common.ranks.passes import BAR, SCREEN, format_seconds

LINES_PER_HEADING = 20  # without a terminal
NUMBER_WIDTH = 9
NUM_STEPS_READ = 50  # last ones, for the estimate of the time left
LABELS = {  # of metrics; else the last part of the name
    "perf/tokens_per_second": "tokens/s",
    "perf/generate_tokens_per_second": "sampled/s",
    "policy/loss": "policy_loss",
    "value/loss": "value_loss",
}


class TimeLeft:
    """Estimate of the remaining seconds of a run: its steps, evaluations and checkpoints still to come.

    The start counts for nothing, and the first step of a process only until there is another one.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.events: dict[str, list[int]] = {}  # steps after which each timer of `StepCosts` runs
        self.event_seconds: dict[str, float] = {}  # of the last one
        self.outside = 0.0  # seconds outside the steps
        self.ends: deque[tuple[int, float]] = deque(maxlen=NUM_STEPS_READ)  # step, time without `outside`
        self.step_seconds = 0.0

    def expect(self, name: str, is_due: Callable[[int], bool]) -> None:
        """Expect the timer `name` to run after the last step and after those that are due."""
        steps = range(1, self.num_steps + 1)
        self.events[name] = [step for step in steps if step == self.num_steps or is_due(step)]

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step that has just ended."""
        events = {name: metrics.get(f"perf/{name}_seconds", 0.0) for name in self.events}
        self.event_seconds |= {name: seconds for name, seconds in events.items() if seconds}
        self.outside += sum(events.values())
        end = time.monotonic() - self.outside
        self.ends.append((step, end))
        first_step, first_end = self.ends[0]
        self.step_seconds = metrics.get("perf/step_seconds", 0.0)
        if step > first_step:
            self.step_seconds = (end - first_end) / (step - first_step)

    def seconds(self) -> float:
        """Seconds from the last step that was added to the end of the run."""
        step = self.ends[-1][0]
        counts = {name: len(steps) - bisect(steps, step) for name, steps in self.events.items()}
        events = sum(count * self.event_seconds.get(name, 0.0) for name, count in counts.items())
        return events + self.step_seconds * (self.num_steps - step)


class StepTable:
    """Texts of a run's console; `columns` are the metrics of a step's line."""

    def __init__(self, columns: Sequence[str], num_steps: int) -> None:
        self.labels = {name: LABELS.get(name, name.rpartition("/")[2]) for name in columns}
        self.num_steps = num_steps
        self.shown: list[str] = []
        self.num_lines = 0  # printed since the heading
        self.last: dict[str, float] = {}  # metrics of events

    def step_lines(self, step: int, metrics: Mapping[str, float], seconds_left: float) -> str:
        """The line of a step, below the heading where that is due: once per screen, and with a new metric."""
        shown = [name for name in self.labels if name in metrics or name in self.shown]
        cells = {"step": f"{step:{len(str(self.num_steps))}}/{self.num_steps}"}
        cells |= {self.labels[name]: format_number(metrics.get(name)) for name in shown}
        cells["left"] = format_seconds(seconds_left)
        line = "  ".join(text.rjust(max(len(label), NUMBER_WIDTH)) for label, text in cells.items())
        height = SCREEN.height - 3 if BAR.live.is_started else LINES_PER_HEADING
        if shown == self.shown and 0 < self.num_lines < height:
            return line
        self.shown = shown
        self.num_lines = -1  # the heading does not count
        widths = {label: max(len(text), NUMBER_WIDTH) for label, text in cells.items()}
        return "  ".join(label.rjust(width) for label, width in widths.items()) + "\n" + line

    def event(self, step: int, metrics: Mapping[str, float]) -> str:
        """A table of metrics, with their changes since the last event that had them."""
        columns = [Column(name, justify="right", min_width=NUMBER_WIDTH) for name in ("value", "change")]
        table = Table(f"after step {step}/{self.num_steps}", *columns, box=None, pad_edge=False)
        for name, value in metrics.items():
            change = format_number(value - self.last[name], "+") if name in self.last else ""
            table.add_row(f"  {name}", format_number(value), change)
        self.last |= metrics
        return "".join(segment.text for segment in SCREEN.render(table)).rstrip("\n")


def format_number(value: float | None, sign: str = "") -> str:
    """A number in at most nine characters; "-" for None."""
    if value is None:
        return "-"
    if 1000 <= abs(value) < 1e6:
        return f"{value:{sign},.0f}"
    texts = f"{value:{sign}.4g}", f"{value:{sign}.2e}"
    return min(texts, key=lambda text: len(text) > NUMBER_WIDTH)
