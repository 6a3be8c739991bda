"""Logging of a run: its console, metrics, samples, rollouts; TensorBoard, wandb, mlflow, trackio.

Only the first process prints and writes; on the others every call does nothing. Trackers get the names and
step numbers of metrics.jsonl, through accelerate. TRACKERS_FILE has the id of each tracker's run and the last
metrics sent to it, so that a resumed run continues its tracker run without duplicate points.
"""

import contextlib
import gzip
import importlib.util
import json
import logging
import math
import os
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from common.flags.groups import RunArguments
from common.ranks import distributed, passes
from common.ranks.failures import kind_and_line
from common.ranks.step_costs import COSTS
from common.runs.console import StepTable, TimeLeft, outcome_line
from common.runs.durable_files import WRITING, json_line, read_if_whole, sync, without_nan
from common.runs.run_files import DIGESTS, METRICS, REPORT, ROLLOUTS, SAMPLES, TRACKERS_FILE
from common.runs.saved_state import Stateful, TensorReader

ROOT = Path(__file__).resolve().parents[2]
REPORT_SECONDS = 300
PROJECT = "triptych"
TENSORBOARD = "tensorboard"  # no run to resume: purge_step hides the points of repeated steps
_OWN_PROJECT = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "trackio": "TRACKIO_PROJECT"}
_RUN_ID = {TENSORBOARD: "log_dir", "wandb": "id", "mlflow": "info.run_id", "trackio": "name"}


class _GrowingFile:
    """A file that a run appends to; lines that cannot be written are kept in memory."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self.path, self.note = path, note
        self.size = 0  # bytes written
        self.waiting = b""

    def append(self, data: bytes = b"") -> None:
        """Write a line after the waiting ones, all or nothing; truncate a torn line, and lines that a resumed
        run repeats.
        """
        is_first_to_wait = not self.waiting
        self.waiting += data
        if not self.waiting and not self.size and not self.path.exists():
            return
        try:
            with open(self.path, "ab", buffering=0) as file:
                if file.tell() < self.size:
                    self.note(f"warning: {self.path} has lost lines: it is shorter than when it was written")
                    self.size = file.tell()
                file.truncate(self.size)
                if file.write(self.waiting) != len(self.waiting):
                    file.truncate(self.size)
                    raise OSError("no space left")
        except OSError as error:
            if is_first_to_wait:
                self.note(f"warning: {self.path} cannot be written ({error}); its lines are kept in memory")
            return
        self.size += len(self.waiting)
        self.waiting = b""


class RunLogger(Stateful):
    """Logging of a program's metrics; part of a checkpoint, because it records the length of its files.

    `columns` are the metrics of a step's line; metrics.jsonl has all metrics. Call `open`
    before the first metric, after `load` in a resumed run. A full disk does not end the run.
    """

    def __init__(self, args: RunArguments, columns: Sequence[str], num_steps: int) -> None:
        self.table = StepTable(columns, num_steps)
        self.time_left = TimeLeft(num_steps)
        self.first: dict[str, float] = {}  # first value of each metric
        self.last: dict[str, float] = {}
        self.log_interval = args.log_interval
        self.num_steps = num_steps
        self.is_on = distributed.is_main()
        self.folder = Path(args.output_dir) if args.output_dir and self.is_on else None
        self.started = time.monotonic()
        self.trackers = TrackerGroup(args, self.note)
        names = (METRICS, SAMPLES, ROLLOUTS, DIGESTS) if self.folder else ()
        self.files = {name: _GrowingFile(self.folder / name, self.note) for name in names}

    def open(self, last_step: int | None = None) -> None:
        """Start a run in the trackers and the files, or resume after `last_step`.

        Raises ValueError if a tracker fails, before anything of an earlier run is removed.
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
        """Lengths of the files, after syncing them to the disk."""
        for file in self.files.values():
            file.append()
            if file.waiting:
                raise OSError(f"{file.path} cannot be written")
            if file.size:
                sync(file.path)
        sizes = {name: file.size for name, file in self.files.items()}
        seconds = time.monotonic() - self.started
        return {"sizes": sizes, "seconds": seconds, "first": without_nan(self.first)}

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Truncate the files to their saved lengths, so that repeated steps occur once."""
        self.started = time.monotonic() - state["seconds"]
        self.first = state.get("first", {})  # earlier versions did not save it
        for name, file in self.files.items():
            file.size = state["sizes"].get(name, 0)
            file.append()

    def note(self, text: str) -> None:
        """Print a line; it is dropped if the stream has no reader any more."""
        if self.is_on:
            with contextlib.suppress(OSError):  # a full disk, or a pipe without a reader
                print(text, flush=True)
            self.table.num_lines += text.count("\n") + 1

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step everywhere; `step` counts from 1."""
        metrics = {**metrics, "perf/peak_memory_gib": peak_memory_gib()}
        self._keep(metrics)
        seconds = time.monotonic() - self.started
        self._write(METRICS, step, {"seconds": round(seconds, 3), **metrics})
        self.trackers.log(metrics, step)
        self.time_left.add(step, metrics)
        left = self.time_left.seconds()
        passes.show_run(step, self.num_steps, left)
        if step % self.log_interval == 0 or step == self.num_steps:
            self.note(self.table.step_lines(step, metrics, left))

    def log_event(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of an occasional event (an evaluation), as a table of their own."""
        self._keep(metrics)
        self._write(METRICS, step, metrics)
        self.trackers.log(metrics, step)
        self.note(self.table.event(step, metrics))

    def _keep(self, metrics: Mapping[str, float]) -> None:
        self.first = {**metrics, **self.first}
        self.last |= metrics

    def sample(self, step: int, **fields: Any) -> None:
        """Write a sample to samples.jsonl."""
        self._write(SAMPLES, step, fields)

    def rollout(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the responses of a step to rollouts.jsonl.gz."""
        self._write(ROLLOUTS, step, *rows)

    def digests(self, step: int, **fields: Any) -> None:
        """Write the digests of a step to digests.jsonl.gz."""
        self._write(DIGESTS, step, fields)

    def close(self) -> None:
        """Print the outcome of the run, close the trackers, and write waiting lines."""
        if outcome := outcome_line(self.first, self.last):
            self.note(outcome)
        self.trackers.close()
        for file in self.files.values():
            file.append()

    def write_report(self) -> None:
        """Write report.html from the files; a failure is a note."""
        if self.folder:
            try:
                draw_run(self.folder)
            except Exception as error:  # of any kind: models and metrics are saved
                failure = f"note: {REPORT} was not written ({type(error).__name__}: {error})"
                self.note(f"{failure}; python -m tools.report {self.folder} writes the report")

    def _write(self, name: str, step: int, *rows: Mapping[str, Any]) -> None:
        if self.folder:
            # json_line, because the gradient norm is infinite in a step that fp16 skips.
            lines = "".join(json_line({"step": step, **row}) for row in rows).encode()
            if name.endswith(".gz"):  # a member of its own, so that a resumed run can truncate the file
                lines = gzip.compress(lines, mtime=0)
            self.files[name].append(lines)


def draw_run(folder: Path) -> None:
    """Write report.html of a run in a separate process, so that no rank imports plotting libraries.

    Raises OSError or a timeout if it cannot be written.
    """
    command = [sys.executable, "-m", "tools.report", folder.resolve()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, errors="replace", timeout=REPORT_SECONDS)
    if done.returncode:
        last_line = done.stderr.strip().rpartition("\n")[2]
        raise OSError(last_line.removeprefix("  - ") or f"exit code {done.returncode}")


def peak_memory_gib() -> float:
    """Peak memory of this process: of the GPU if there is one, else resident memory."""
    if distributed.has_gpu():
        COSTS.take_peak()
        return COSTS.peak / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def missing_trackers(kinds: Sequence[str]) -> list[str]:
    """A problem for each tracker whose package is not installed."""
    return [
        f"--trackers {kind}: the package {kind} is not installed; pip install {kind}, or leave it out"
        for kind in dict.fromkeys(kinds)
        if importlib.util.find_spec(kind) is None
    ]


def start_tracker(kind: str, run_id: str, args: RunArguments, last_step: int | None) -> tuple[Any, str]:
    """Start a run named after the output folder, or resume `run_id` after `last_step`; return tracker and id.

    The tracker is accelerate's `GeneralTracker`; its `tracker` is the run. Raises whatever the library
    raises.
    """
    from accelerate import tracking  # slow to import

    # accelerate's logger needs a process state, which would join the process group again.
    tracking.logger = logging.getLogger(tracking.__name__)
    project = os.environ.get(_OWN_PROJECT.get(kind, "")) or PROJECT
    run_name = Path(args.output_dir).resolve().name if args.output_dir else "run"
    lists = {name: " ".join(map(str, value)) for name, value in vars(args).items() if isinstance(value, list)}
    flags = vars(args) | lists
    if kind == TENSORBOARD:
        folder = args.tensorboard_path or f"{args.output_dir or '.'}/tensorboard"
        purge_step = None if last_step is None else last_step + 1
        tracker = tracking.TensorBoardTracker("", folder, purge_step=purge_step)
    elif kind == "wandb":
        options = {"id": run_id, "resume": "allow"} if run_id else {"name": run_name}
        tracker = tracking.WandBTracker(project, dir=args.output_dir or None, **options)
    elif kind == "mlflow":
        tracker = tracking.MLflowTracker(project, run_id=run_id or None, run_name=run_name)
    else:  # trackio: a run's id is its name, and its configuration is set at the start
        name = run_id or f"{run_name}-{uuid.uuid4().hex[:6]}"
        tracker = tracking.TrackioTracker(project, name=name, resume="allow", config=flags)
    # Only the first rank calls this, so accelerate need not check.
    tracker.main_process_only = False
    tracker.start()
    if not run_id and kind != TENSORBOARD:
        tracker.store_init_configuration(flags)
    return tracker, attrgetter(_RUN_ID[kind])(tracker.tracker)


class TrackerGroup:
    """Trackers of a run, on its first rank. One that fails is dropped with a warning; the run continues."""

    def __init__(self, args: RunArguments, note: Callable[[str], None]) -> None:
        self.args, self.note = args, note
        self.file = Path(args.output_dir) / TRACKERS_FILE if args.output_dir else None
        self.trackers: dict[str, Any] = {}  # accelerate's GeneralTracker
        # By tracker: its run_id, the newest step sent to it, and the metric names sent for that step.
        self.sent: dict[str, dict[str, Any]] = {}

    def open(self, last_step: int | None) -> None:
        """Start a run in each tracker, or resume after `last_step`. Raises ValueError with the tracker's
        name.
        """
        if self.file and last_step is None:
            self.file.unlink(missing_ok=True)  # from an earlier run in this folder
        known = read_if_whole(self.file) if self.file else {}
        for kind in dict.fromkeys(self.args.trackers):
            sent = {} if kind == TENSORBOARD else known.get(kind, {})
            try:
                tracker, run_id = start_tracker(kind, sent.get("run_id", ""), self.args, last_step)
            except Exception as error:  # library-specific: no server, no login, a deleted run
                what = f"--trackers {kind} cannot start"
                raise ValueError(f"{what} ({kind_and_line(error)}); log in, or leave it out") from error
            run = tracker.tracker
            if sent and kind == "wandb" and not run.offline and run.step <= sent["step"]:
                sent |= {"step": run.step, "names": []}  # a killed process had not sent its last metrics
            self.trackers[kind] = tracker
            self.sent[kind] = sent or {"run_id": run_id, "step": -1, "names": []}
        self._write()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send each tracker the metrics that it has not received yet: steps arrive in order, the metrics of a
        step in parts.
        """
        for kind, tracker in list(self.trackers.items()):
            sent = self.sent[kind]
            if step > sent["step"]:
                sent |= {"step": step, "names": []}
            if step < sent["step"]:
                continue
            new = {n: v for n, v in metrics.items() if n not in sent["names"] and math.isfinite(v)}
            sent["names"] += new
            try:
                if new:
                    tracker.log(new, step=step)
            except Exception as error:  # metrics.jsonl has all metrics
                del self.trackers[kind]
                self.note(f"warning: {kind} accepts no more metrics ({error}); no more are sent")
        self._write()

    def close(self) -> None:
        """Wait until everything is sent."""
        for kind, tracker in self.trackers.items():
            try:
                tracker.finish()
            except Exception as error:  # metrics sent before remain
                self.note(f"warning: {kind} did not close cleanly ({error})")
        self.trackers = {}

    def _write(self) -> None:
        """Record the progress of the trackers atomically, without waiting for the disk."""
        if self.file and self.trackers.keys() - {TENSORBOARD}:
            temporary = self.file.with_name(self.file.name + WRITING)
            with contextlib.suppress(OSError):  # a full disk: a step may then be sent twice
                temporary.write_text(json.dumps(self.sent))
                temporary.replace(self.file)
