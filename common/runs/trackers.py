"""Where a run's metrics go beside metrics.jsonl: TensorBoard, wandb, mlflow, trackio, through one interface.

Names and step numbers are those of metrics.jsonl. TRACKERS_FILE in the run's folder has the id of each
tracker's run and the last metrics that were sent to it: a resumed run continues its tracker run without
duplicate points.
"""

import contextlib
import importlib.util
import json
import logging
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from common.ranks.failures import first_line
from common.runs.durable_files import WRITING, read_object

TRACKERS_FILE = "trackers.json"  # the runs in --trackers, and how far they are
PROJECT = "triptych"
MAX_TEXT = 500  # of a flag; mlflow leaves out what is longer than it takes
_OWN_PROJECT = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "trackio": "TRACKIO_PROJECT"}
_RUN_ID = {"tensorboard": "log_dir", "wandb": "id", "mlflow": "info.run_id", "trackio": "name"}


class _PlainLogger(logging.LoggerAdapter):
    """For accelerate's classes: its own logger asks for a process state, which joins the group once more."""

    def warning_once(self, *args: Any, **options: Any) -> None:
        """Warn; ours are called once where it matters."""
        self.warning(*args, **options)


class Tracker:
    """A run in a tracker, by accelerate's class for it. Its package is imported when it is opened.

    Only the first rank has one. `folder` is where wandb and TensorBoard write.
    """

    def __init__(self, kind: str, run_name: str, folder: str) -> None:
        self.kind, self.run_name, self.folder = kind, run_name, folder
        self.is_purged = kind == "tensorboard"  # it hides what was sent for the steps that come again
        self.tracker: Any = None

    def open(self, run_id: str, config: Mapping[str, Any], first_step: int) -> str:
        """Begin a run named after the output folder, or resume `run_id` from `first_step`; return its id."""
        from accelerate import tracking  # slow to import

        tracking.logger = _PlainLogger(tracking.logger.logger, {})
        project = os.environ.get(_OWN_PROJECT.get(self.kind, "")) or PROJECT
        plain = {name: _plain(value) for name, value in config.items()}
        if self.kind == "tensorboard":
            self.tracker = tracking.TensorBoardTracker("", self.folder, purge_step=first_step or None)
        elif self.kind == "wandb":
            options = {"id": run_id, "resume": "allow"} if run_id else {"name": self.run_name}
            options |= {"dir": self.folder} if self.folder else {}
            self.tracker = tracking.WandBTracker(project, **options)
        elif self.kind == "mlflow":
            self.tracker = tracking.MLflowTracker(project, run_id=run_id or None, run_name=self.run_name)
        else:  # trackio's runs have no id but their name; it keeps only the configuration it is begun with
            options = {"name": run_id, "resume": "must"}
            if not run_id:
                name = f"{self.run_name}-{uuid.uuid4().hex[:6]}"
                options = {"name": name, "resume": "never", "config": plain}
            self.tracker = tracking.TrackioTracker(project, **options)
        # Nobody but the first rank comes here, so accelerate need not find out which one is.
        self.tracker.main_process_only = False
        self.tracker.start()
        if not run_id and not self.is_purged:
            self.tracker.store_init_configuration(plain)
        return attrgetter(_RUN_ID[self.kind])(self.tracker.tracker)

    def known_step(self) -> int | None:
        """Return wandb's newest step where it has a server: a killed process may not have sent its last."""
        run = self.tracker.tracker
        return run.step - 1 if self.kind == "wandb" and not run.offline else None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand the metrics of a step over; a service sends them when it likes. Raises what it raises."""
        if not self.is_purged:  # only TensorBoard shows what is not finite
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        """Wait until all is sent."""
        self.tracker.finish()


def _plain(value: Any) -> Any:
    text = " ".join(map(str, value)) if isinstance(value, list) else value
    return text[:MAX_TEXT] if isinstance(text, str) else text


def missing_trackers(kinds: Sequence[str]) -> list[str]:
    """Return a problem for each tracker whose package is not installed."""
    return [
        f"--trackers {kind}: the package {kind} is not installed; pip install {kind}, or leave it out"
        for kind in dict.fromkeys(kinds)
        if importlib.util.find_spec(kind) is None
    ]


def build_trackers(kinds: Sequence[str], output_dir: str, tensorboard_dir: str) -> dict[str, Tracker]:
    """Return the trackers of these kinds, not yet opened."""
    name = Path(output_dir).resolve().name if output_dir else "run"
    folders = {"tensorboard": tensorboard_dir}
    return {kind: Tracker(kind, name, folders.get(kind, output_dir)) for kind in dict.fromkeys(kinds)}


class TrackerGroup:
    """All trackers of a run. One that fails is given up with a word; the run continues."""

    def __init__(self, trackers: Mapping[str, Tracker], folder: Path | None, note: Any) -> None:
        self.trackers, self.note = dict(trackers), note
        self.file = folder / TRACKERS_FILE if folder else None
        # By tracker: its run_id, the newest step that it was sent, and the names sent for that step.
        self.sent: dict[str, dict[str, Any]] = {}

    def open(self, config: Mapping[str, Any], last_step: int | None) -> None:
        """Begin a run in each tracker, or resume after `last_step`. Raises ValueError, naming the tracker."""
        known = self._read() if last_step is not None else {}
        if self.file and last_step is None:
            self.file.unlink(missing_ok=True)  # of an earlier run in this folder
        first_step = 0 if last_step is None else last_step + 1
        for kind, tracker in self.trackers.items():
            before = {} if tracker.is_purged else known.get(kind, {})
            try:
                run_id = tracker.open(before.get("run_id", ""), config, first_step)
            except Exception as error:  # not logged in, no server, a run that was deleted: the service's own
                why = first_line(error, "no reason given")
                raise ValueError(
                    f"--trackers {kind} cannot begin ({type(error).__name__}: {why}); log in, or leave it out"
                ) from error
            known_step = tracker.known_step()
            if before and known_step is not None and known_step < before["step"]:
                before |= {"step": known_step + 1, "names": []}
            self.sent[kind] = before or {"run_id": run_id, "step": -1, "names": []}
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
            try:
                if new:
                    tracker.log(new, step)
                sent["names"] += new
            except Exception as error:  # metrics.jsonl has everything
                del self.trackers[kind]
                self.note(f"warning: {kind} takes no more metrics ({error}); they are not sent any more")
        self._write()

    def close(self) -> None:
        """Close all of them."""
        for kind, tracker in self.trackers.items():
            try:
                tracker.close()
            except Exception as error:  # what was sent is there
                self.note(f"warning: {kind} was not closed well ({error})")
        self.trackers = {}

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return how far each tracker was; a file that is gone or torn means new runs in them."""
        if self.file is None or not self.file.exists():
            return {}
        known = read_object(self.file)
        if not known or not all(isinstance(sent, dict) for sent in known.values()):
            self.note(f"warning: {self.file} cannot be read: new runs begin in the trackers")
            return {}
        return known

    def _write(self) -> None:
        """Note how far they are: seen whole or as before, but not waited for until it is on the disk."""
        if self.file and any(not tracker.is_purged for tracker in self.trackers.values()):
            temporary = self.file.with_name(self.file.name + WRITING)
            with contextlib.suppress(OSError):  # a full disk: a step may then be sent twice
                temporary.write_text(json.dumps(self.sent))
                temporary.replace(self.file)
