"""Where a run's metrics go beside metrics.jsonl: TensorBoard, wandb, mlflow, trackio, through accelerate.

Names and step numbers are those of metrics.jsonl. TRACKERS_FILE in the run's folder has the id of each
tracker's run and the last metrics that were sent to it: a resumed run continues its tracker run without
duplicate points.
"""

import contextlib
import dataclasses
import importlib.util
import json
import logging
import math
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from common.flags.args import RunArguments
from common.ranks.failures import first_line
from common.runs.durable_files import WRITING, read_object

TRACKERS_FILE = "trackers.json"  # the runs in --trackers, and how far they are
PROJECT = "triptych"
TENSORBOARD = "tensorboard"  # has no runs to resume: it hides what was sent for the steps that come again
MAX_TEXT = 500  # of a flag; mlflow leaves out what is longer than it takes
_OWN_PROJECT = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "trackio": "TRACKIO_PROJECT"}
_RUN_ID = {TENSORBOARD: "log_dir", "wandb": "id", "mlflow": "info.run_id", "trackio": "name"}


def missing_trackers(kinds: Sequence[str]) -> list[str]:
    """Return a problem for each tracker whose package is not installed."""
    return [
        f"--trackers {kind}: the package {kind} is not installed; pip install {kind}, or leave it out"
        for kind in dict.fromkeys(kinds)
        if importlib.util.find_spec(kind) is None
    ]


def start_tracker(kind: str, run_id: str, args: RunArguments, last_step: int | None) -> tuple[Any, str]:
    """Begin a run named after the output folder, or resume `run_id` after `last_step`; return tracker and id.

    The tracker is accelerate's `GeneralTracker`, its `tracker` the run. Raises what it raises.
    """
    from accelerate import tracking  # slow to import

    # Its own logger asks for a process state, which joins the group once more.
    tracking.logger = logging.getLogger(tracking.__name__)
    project = os.environ.get(_OWN_PROJECT.get(kind, "")) or PROJECT
    run_name = Path(args.output_dir).resolve().name if args.output_dir else "run"
    flags = {name: _plain(value) for name, value in dataclasses.asdict(args).items()}
    if kind == TENSORBOARD:
        folder = args.tensorboard_path or f"{args.output_dir or '.'}/tensorboard"
        purge_step = None if last_step is None else last_step + 1
        tracker = tracking.TensorBoardTracker("", folder, purge_step=purge_step)
    elif kind == "wandb":
        options = {"id": run_id, "resume": "allow"} if run_id else {"name": run_name}
        tracker = tracking.WandBTracker(project, dir=args.output_dir or None, **options)
    elif kind == "mlflow":
        tracker = tracking.MLflowTracker(project, run_id=run_id or None, run_name=run_name)
    elif run_id:  # trackio's runs have no id but their name
        tracker = tracking.TrackioTracker(project, name=run_id, resume="must")
    else:  # it keeps only the configuration it is begun with
        name = f"{run_name}-{uuid.uuid4().hex[:6]}"
        tracker = tracking.TrackioTracker(project, name=name, resume="never", config=flags)
    # Nobody but the first rank comes here, so accelerate need not find out which one is.
    tracker.main_process_only = False
    tracker.start()
    if not run_id and kind != TENSORBOARD:
        tracker.store_init_configuration(flags)
    return tracker, attrgetter(_RUN_ID[kind])(tracker.tracker)


def _plain(value: Any) -> Any:
    text = " ".join(map(str, value)) if isinstance(value, list) else value
    return text[:MAX_TEXT] if isinstance(text, str) else text


class TrackerGroup:
    """All trackers of a run, on its first rank. One that fails is given up with a word; the run continues."""

    def __init__(self, args: RunArguments, note: Callable[[str], None]) -> None:
        self.args, self.note = args, note
        self.file = Path(args.output_dir) / TRACKERS_FILE if args.output_dir else None
        self.trackers: dict[str, Any] = {}  # accelerate's
        # By tracker: its run_id, the newest step that it was sent, and the names sent for that step.
        self.sent: dict[str, dict[str, Any]] = {}

    def open(self, last_step: int | None) -> None:
        """Begin a run in each tracker, or resume after `last_step`. Raises ValueError, naming the tracker."""
        known = read_object(self.file) if self.file and last_step is not None else {}
        if self.file and last_step is None:
            self.file.unlink(missing_ok=True)  # of an earlier run in this folder
        for kind in dict.fromkeys(self.args.trackers):
            sent = {} if kind == TENSORBOARD else known.get(kind, {})
            try:
                tracker, run_id = start_tracker(kind, sent.get("run_id", ""), self.args, last_step)
            except Exception as error:  # no server, not logged in, a deleted run: its own
                why = first_line(error, "no reason given")
                raise ValueError(
                    f"--trackers {kind} cannot begin ({type(error).__name__}: {why}); log in, or leave it out"
                ) from error
            run = tracker.tracker
            if sent and kind == "wandb" and not run.offline and run.step <= sent["step"]:
                sent |= {"step": run.step, "names": []}  # a killed process had not sent its last
            self.trackers[kind] = tracker
            self.sent[kind] = sent or {"run_id": run_id, "step": -1, "names": []}
        self._write()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send to each tracker what it has not had: steps come in order, a step's metrics in parts."""
        for kind, tracker in list(self.trackers.items()):
            sent = self.sent[kind]
            if step > sent["step"]:
                sent |= {"step": step, "names": []}
            if step < sent["step"]:
                continue
            new = {name: value for name, value in metrics.items() if name not in sent["names"]}
            sent["names"] += new
            if kind != TENSORBOARD:  # only it shows what is not finite
                new = {name: value for name, value in new.items() if math.isfinite(value)}
            try:
                if new:
                    tracker.log(new, step=step)
            except Exception as error:  # metrics.jsonl has everything
                del self.trackers[kind]
                self.note(f"warning: {kind} takes no more metrics ({error}); they are not sent any more")
        self._write()

    def close(self) -> None:
        """Wait until all is sent."""
        for kind, tracker in self.trackers.items():
            try:
                tracker.finish()
            except Exception as error:  # what was sent is there
                self.note(f"warning: {kind} was not closed well ({error})")
        self.trackers = {}

    def _write(self) -> None:
        """Note how far they are: seen whole or as before, but not waited for until it is on the disk."""
        if self.file and self.trackers.keys() - {TENSORBOARD}:
            temporary = self.file.with_name(self.file.name + WRITING)
            with contextlib.suppress(OSError):  # a full disk: a step may then be sent twice
                temporary.write_text(json.dumps(self.sent))
                temporary.replace(self.file)
