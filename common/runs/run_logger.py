"""What a run shows: a line a step, metrics, samples, rollouts, trackers.

Only the first process prints and writes; on the others every call does nothing.
"""

import contextlib
import gzip
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch

from common.flags.args import RunArguments
from common.ranks import distributed
from common.runs.durable_files import json_line, sync
from common.runs.run_files import METRICS, REPORT, ROLLOUTS, SAMPLES
from common.runs.saved_state import Stateful, TensorReader
from common.runs.trackers import TrackerGroup

ROOT = Path(__file__).resolve().parents[2]
REPORT_SECONDS = 300
GZIP_START = gzip.compress(b"", mtime=0)[:8]  # of each member, in no other place


class _GrowingFile:
    """A file that a run appends to; what cannot be written waits in memory."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self.path, self.note = path, note
        self.size = 0  # bytes that have been written
        self.waiting = b""

    def append(self, data: bytes = b"") -> None:
        """Write it behind what waits, all or nothing, in a file that is as long as what was written."""
        is_first_to_wait = not self.waiting
        self.waiting += data
        if not self.waiting and not self.size and not self.path.exists():
            return
        try:
            with open(self.path, "ab", buffering=0) as file:
                self._match_size(file)
                if file.write(self.waiting) != len(self.waiting):
                    file.truncate(self.size)
                    raise OSError("no space left")
        except OSError as error:
            if is_first_to_wait:
                self.note(f"warning: {self.path} cannot be written ({error}); its lines wait in memory")
            return
        self.size += len(self.waiting)
        self.waiting = b""

    def _match_size(self, file: IO[bytes]) -> None:
        """Cut off what is too much, of a line that was torn; of a file that was cut keep whole lines."""
        found = file.tell()
        if found < self.size:
            self.note(f"warning: {self.path} has lost lines: {found} bytes, where {self.size} were written")
            data = self.path.read_bytes()
            whole = data.rfind(GZIP_START) if self.path.name == ROLLOUTS else data.rfind(b"\n") + 1
            self.size = max(whole, 0)
        if found != self.size:
            file.truncate(self.size)


class RunLogger(Stateful):
    """The one place a program's numbers go to: a part of a checkpoint, for it knows how far its files are.

    `columns` are the metric names of the console line, in order; metrics.jsonl has all of them. `open` or
    `load` comes before the first number. A disk that is full does not end a run: lines wait.
    """

    def __init__(self, args: RunArguments, columns: Sequence[str], num_steps: int) -> None:
        groups = {name.split("/")[0] + "/" for name in columns} - {"perf/"}
        self.prefix = groups.pop() if len(groups) == 1 else ""  # steps 1 and 2 have one kind of number each
        self.columns, self.log_interval, self.num_steps = list(columns), args.log_interval, num_steps
        self.is_on = distributed.is_main()
        self.folder = Path(args.output_dir) if args.output_dir and self.is_on else None
        self.started = time.monotonic()
        self.trackers = TrackerGroup(args, self.note)
        names = (METRICS, SAMPLES, ROLLOUTS) if self.folder else ()
        self.files = {name: _GrowingFile(self.folder / name, self.note) for name in names}
        self._last_step = 0

    def open(self, last_step: int | None = None) -> None:
        """Begin a run in the trackers and the files, or resume after `last_step`.

        Raises ValueError when a tracker cannot, before anything of an earlier run is removed.
        """
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
        if self.is_on:
            self.trackers.open(last_step)
        if self.folder and last_step is None:
            for file in self.files.values():
                file.path.unlink(missing_ok=True)
            (self.folder / METRICS).touch()

    def json_state(self) -> dict[str, Any]:
        """Return how far the files are, once they are on the disk so far."""
        for file in self.files.values():
            file.append()
            if file.waiting:
                raise OSError(f"{file.path} cannot be written")
            if file.size:
                sync(file.path)
        sizes = {name: file.size for name, file in self.files.items()}
        return {"sizes": sizes, "seconds": time.monotonic() - self.started, "step": self._last_step}

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Cut the files where they were, so that what comes again is there once."""
        self.started = time.monotonic() - state["seconds"]
        self._last_step = state["step"]
        for name, file in self.files.items():
            file.size = state["sizes"].get(name, 0)
            file.append()
        self.open(state["step"])

    def note(self, text: str) -> None:
        """Print a line; where nobody can take it any more, it is lost."""
        if self.is_on:
            with contextlib.suppress(OSError):  # a full disk, or a pipe whose reader has gone
                print(text, flush=True)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's numbers everywhere; `step` counts from 1."""
        if not self.is_on:
            return
        self._last_step = step
        metrics = {**metrics, "perf/peak_memory_gib": peak_memory_gib()}
        seconds = time.monotonic() - self.started
        self._write(METRICS, step, {"seconds": round(seconds, 3), **metrics})
        self.trackers.log(metrics, step)
        if step % self.log_interval == 0 or step == self.num_steps:
            shown = {n.removeprefix(self.prefix): metrics[n] for n in self.columns if n in metrics}
            left = timedelta(seconds=round(seconds / step * (self.num_steps - step)))
            self._print(step, shown, f"  left {left}")

    def log_event(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write numbers that come now and then (an evaluation), with a line of their own."""
        if self.is_on:
            self._write(METRICS, step, metrics)
            self.trackers.log(metrics, step)
            self._print(step, metrics)

    def sample(self, step: int, **fields: Any) -> None:
        """Write one sample answer to samples.jsonl."""
        self._write(SAMPLES, step, fields)

    def rollout(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a step's responses to rollouts.jsonl.gz: a gzip member, which a resumed run can cut off."""
        if self.folder:
            lines = "".join(json_line({"step": step, **row}) for row in rows)
            self.files[ROLLOUTS].append(gzip.compress(lines.encode(), mtime=0))

    def close(self) -> None:
        """Close the trackers and draw report.html from the files."""
        self.trackers.close()
        for file in self.files.values():
            file.append()
        if self.folder:
            try:
                draw_run(self.folder)
            except Exception as error:  # whatever it is: models and metrics are there
                told = f"note: {REPORT} was not written ({type(error).__name__}: {error})"
                self.note(f"{told}; python -m tools.report {self.folder} writes the report")

    def _write(self, name: str, step: int, fields: Mapping[str, Any]) -> None:
        if self.folder:
            # A gradient's norm is infinite in a step that fp16 skips.
            self.files[name].append(json_line({"step": step, **fields}).encode())

    def _print(self, step: int, metrics: Mapping[str, float], end: str = "") -> None:
        cells = "  ".join(f"{name} {_short(value)}" for name, value in metrics.items())
        self.note(f"step {step:>5}/{self.num_steps}  {cells}{end}")


def draw_run(folder: Path) -> None:
    """Write report.html of a run, in a process of its own: no rank imports what draws.

    Raises OSError or a timeout when it cannot be written.
    """
    command = [sys.executable, "-m", "tools.report", folder.resolve()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, errors="replace", timeout=REPORT_SECONDS)
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise OSError(last_line.removeprefix("  - ") or f"exit code {done.returncode}")


def peak_memory_gib() -> float:
    """Return the most memory this process has held so far: the GPU's if there is one, else resident."""
    if distributed.has_gpu():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _short(value: float) -> str:
    if isinstance(value, int):
        return f"{value:>6}"
    return f"{value:>8.2e}" if value and (abs(value) < 1e-3 or abs(value) >= 1e5) else f"{value:>8.4f}"
