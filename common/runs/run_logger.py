"""What a run shows: a line a step, a progress bar, metrics, samples, rollouts, trackers, curves, a report.

Only the first process prints and writes; on the others every call does nothing.
"""

import contextlib
import gzip
import os
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from common.ranks import distributed
from common.runs.durable_files import json_line, sync, write_file
from common.runs.run_files import CURVES, METRICS, REPORT, ROLLOUTS, SAMPLES, build_curves, read_rows
from common.runs.saved_state import Stateful, TensorReader
from common.runs.trackers import Tracker, TrackerGroup

GZIP_START = gzip.compress(b"", mtime=0)[:8]  # of each member, in no other place


class RunLogger(Stateful):
    """The one place a program's numbers go to: a part of a checkpoint, for it knows how far its files are.

    `columns` are the metric names of the console line, in order; metrics.jsonl has all of them. `begin_anew`
    or `load` comes before the first number. A disk that is full does not end a run: lines wait in memory.
    """

    def __init__(
        self,
        output_dir: str,
        *,
        columns: Sequence[str],
        num_steps: int,
        log_interval: int = 1,
        trackers: Mapping[str, Tracker] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        groups = {name.split("/")[0] + "/" for name in columns} - {"perf/"}
        self.prefix = groups.pop() if len(groups) == 1 else ""  # steps 1 and 2 have one kind of number each
        self.columns, self.log_interval, self.num_steps = list(columns), log_interval, num_steps
        self.is_on = distributed.is_main()
        self.folder = Path(output_dir) if output_dir and self.is_on else None
        self.started = time.monotonic()
        self.bar: tqdm | None = None
        self.trackers = TrackerGroup(trackers or {} if self.is_on else {}, self.folder, self.note)
        self.config, self._has_trackers_open = dict(config or {}), False
        self._sizes = dict.fromkeys((METRICS, SAMPLES, ROLLOUTS), 0)
        self._waiting: dict[str, list[bytes]] = {name: [] for name in self._sizes}
        self._last_step = 0

    # -----------------------------------------------------------------------------------------------------
    # Beginning and resuming
    # -----------------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Empty the files of an earlier run."""
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / METRICS).write_text("")
            for name in (SAMPLES, ROLLOUTS):
                (self.folder / name).unlink(missing_ok=True)
        self.open_trackers()
        self._open_bar()

    def open_trackers(self, last_step: int | None = None) -> None:
        """Begin a run in the trackers, or resume after `last_step`; a second call does nothing.

        Raises ValueError when one cannot: it is called before anything of an earlier run is removed.
        """
        if not self._has_trackers_open:
            if self.folder:
                self.folder.mkdir(parents=True, exist_ok=True)
            self.trackers.open(self.config, last_step)
            self._has_trackers_open = True

    def _open_bar(self) -> None:
        if self.is_on and sys.stderr.isatty():
            self.bar = tqdm(total=self.num_steps, unit="step", dynamic_ncols=True, leave=False)

    def json_state(self) -> dict[str, Any]:
        """Return how far the files are, once they are on the disk so far."""
        if self.folder:
            for name in self._sizes:
                self._flush(name)
                if self._waiting[name]:
                    raise OSError(f"{self.folder / name} cannot be written")
                if self._sizes[name]:
                    sync(self.folder / name)
        return {
            "sizes": dict(self._sizes),
            "seconds": time.monotonic() - self.started,
            "step": self._last_step,
        }

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Cut the files where they were, so that what comes again is there once."""
        self.started = time.monotonic() - state["seconds"]
        self._last_step = state["step"]
        for name, size in state["sizes"].items() if self.folder else ():
            path = self.folder / name
            found = path.stat().st_size if path.exists() else 0
            self._sizes[name] = size if found >= size else self._whole_lines(path, found, size)
            if path.exists():
                os.truncate(path, self._sizes[name])
        self.open_trackers(state["step"])
        self._open_bar()

    # -----------------------------------------------------------------------------------------------------
    # Numbers
    # -----------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        """Print a line above the progress bar; where nobody can take it any more, it is lost."""
        if self.is_on:
            with contextlib.suppress(OSError):  # a full disk, or a pipe whose reader has gone
                tqdm.write(text, file=sys.stdout)
                sys.stdout.flush()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's numbers everywhere; `step` counts from 1."""
        if not self.is_on:
            return
        self._last_step = step
        metrics = {**metrics, "perf/peak_memory_gib": peak_memory_gib()}
        row = {"step": step, "seconds": round(time.monotonic() - self.started, 3), **metrics}
        self._append(METRICS, row)
        self.trackers.log(metrics, step)
        if self.bar is not None:
            self.bar.update(step - self.bar.n)
        if step % self.log_interval == 0 or step == self.num_steps:
            shown = [name for name in self.columns if name in metrics]
            cells = [f"{name.removeprefix(self.prefix)} {_short(metrics[name])}" for name in shown]
            self.note(f"step {step:>5}/{self.num_steps}  " + "  ".join(cells))

    def log_event(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write numbers that come now and then (an evaluation), with a line of their own."""
        if not self.is_on:
            return
        self._append(METRICS, {"step": step, **metrics})
        self.trackers.log(metrics, step)
        self.note(
            f"step {step:>5}/{self.num_steps}  " + "  ".join(f"{n} {_short(v)}" for n, v in metrics.items())
        )

    def sample(self, step: int, **fields: Any) -> None:
        """Write one sample answer to samples.jsonl."""
        if self.is_on:
            self._append(SAMPLES, {"step": step, **fields})

    def rollout(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a step's responses to rollouts.jsonl.gz: a gzip member, which a resumed run can cut off."""
        if self.folder:
            lines = "".join(json_line({"step": step, **row}) for row in rows)
            self._write(ROLLOUTS, gzip.compress(lines.encode(), mtime=0))

    def write_json(self, name: str, text: str) -> None:
        """Write a file of the run, such as its arguments."""
        if self.folder:
            write_file(self.folder / name, text + "\n")

    def close(self) -> None:
        """Close the files and draw curves.png and report.html from them."""
        if self.bar is not None:
            self.bar.close()
        self.trackers.close()
        if self.folder:
            for name in self._sizes:
                self._flush(name)
            try:
                draw_run(self.folder)
            except Exception as error:  # whatever it is: models and metrics are there
                told = f"note: {CURVES} or {REPORT} was not written ({type(error).__name__}: {error})"
                self.note(f"{told}; python -m tools.report {self.folder} writes the report")

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        if self.folder:
            # A gradient's norm is infinite in a step that fp16 skips.
            self._write(name, json_line(row).encode())

    def _write(self, name: str, data: bytes) -> None:
        self._waiting[name].append(data)
        self._flush(name)

    def _flush(self, name: str) -> None:
        """Write the lines that wait, all or none of them."""
        data = b"".join(self._waiting[name])
        if not data or self.folder is None:
            return
        path = self.folder / name
        try:
            with open(path, "ab", buffering=0) as file:
                self._match_size(path, file)
                if file.write(data) != len(data):
                    file.truncate(self._sizes[name])
                    raise OSError("no space left")
        except OSError as error:
            if len(self._waiting[name]) == 1:
                self.note(f"warning: {path} cannot be written ({error}); its lines wait in memory")
            return
        self._sizes[name] += len(data)
        self._waiting[name].clear()

    def _match_size(self, path: Path, file: Any) -> None:
        """Cut off what is too much, of a line that was torn; take a file as it is that someone has cut."""
        found, size = file.tell(), self._sizes[path.name]
        if found > size:
            file.truncate(size)
        elif found < size:
            self._sizes[path.name] = self._whole_lines(path, found, size)
            file.truncate(self._sizes[path.name])

    def _whole_lines(self, path: Path, found: int, size: int) -> int:
        """Say that a file is shorter than it was; return the bytes up to the end of what is whole."""
        self.note(f"warning: {path} has lost lines: {found} bytes, where {size} were written")
        data = path.read_bytes() if found else b""
        whole = data.rfind(GZIP_START) if path.name == ROLLOUTS else data.rfind(b"\n") + 1
        return max(whole, 0)


def draw_run(folder: Path) -> None:
    """Write curves.png and report.html of a run. Raises OSError when they cannot be written."""
    from common.runs.report.charts import save_curves  # matplotlib is slow to import: only when a run ends
    from common.runs.report.page import write_report

    save_curves(build_curves(read_rows(folder / METRICS, [])), folder / CURVES)
    write_report([folder], folder / REPORT)


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
