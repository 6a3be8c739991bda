"""Where a run's numbers go beside metrics.jsonl: TensorBoard, wandb, mlflow, trackio, through one interface.

Names and step numbers are those of metrics.jsonl. TRACKERS_FILE in the run's folder has the id of each
tracker's run and the last numbers that were sent to it: a run that goes on goes on there, and what comes a
second time, bit for bit, is not sent again.
"""

import contextlib
import importlib.util
import json
import logging
import math
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from common.ranks.failures import first_line

TRACKERS_FILE = "trackers.json"  # the runs in --trackers, and how far they are
PROJECT = "triptych"
MAX_TEXT = 500  # of a flag; mlflow leaves out what is longer than it takes
_OWN_PROJECT = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_EXPERIMENT_NAME", "trackio": "TRACKIO_PROJECT"}


class Tracker(Protocol):
    """A run in a tracker. Only the first rank has one."""

    is_purged: bool  # whether it drops, when opened, what was sent for the steps that come again

    def known_step(self) -> int | None:
        """Return the newest step that the service itself knows of; None when it does not say."""

    def open(self, run_id: str, config: Mapping[str, Any], first_step: int) -> str:
        """Begin a run, or go on with `run_id` from `first_step`; return its id. `config` is for a new one."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send numbers of a step."""

    def close(self) -> None:
        """Send what waits."""


class TensorBoardTracker:
    """Event files in a folder. Events of an earlier try from the first step on are no longer shown."""

    is_purged = True

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.writer: Any = None

    def open(self, run_id: str, config: Mapping[str, Any], first_step: int) -> str:
        """Make the writer; what it had from `first_step` on is hidden."""
        from torch.utils.tensorboard import SummaryWriter  # slow to import, rarely asked for

        self.writer = SummaryWriter(self.folder, purge_step=first_step or None)
        return self.folder

    def known_step(self) -> int | None:
        """Return None: it is purged."""
        return None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one event a number. Raises OSError for good once its thread has stopped."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Bring the events to the file."""
        self.writer.close()


class _PlainLogger(logging.LoggerAdapter):
    """For accelerate's classes: its own logger asks for a process state, which joins the group once more."""

    def warning_once(self, *args: Any, **options: Any) -> None:
        """Warn; ours are called once where it matters."""
        self.warning(*args, **options)


class AccelerateTracker:
    """A run of a service that accelerate has a class for; its package is imported when it is opened."""

    is_purged = False

    def __init__(self, kind: str, run_name: str, folder: str) -> None:
        self.kind, self.run_name, self.folder = kind, run_name, folder
        self.tracker: Any = None

    def open(self, run_id: str, config: Mapping[str, Any], first_step: int) -> str:
        """Begin a run named after the output folder, or go on with `run_id`."""
        from accelerate import tracking

        tracking.logger = _PlainLogger(tracking.logger.logger, {})
        project = os.environ.get(_OWN_PROJECT[self.kind]) or PROJECT
        name = f"{self.run_name}-{uuid.uuid4().hex[:6]}"
        plain = {name: _plain(value) for name, value in config.items()}
        if self.kind == "wandb":
            options = {"id": run_id, "resume": "allow"} if run_id else {"name": self.run_name}
            if self.folder:
                options["dir"] = self.folder
            self.tracker = tracking.WandBTracker(project, **options)
        elif self.kind == "mlflow":
            self.tracker = tracking.MLflowTracker(project, run_id=run_id or None, run_name=self.run_name)
        else:  # its runs have no id but their name
            resume = "must" if run_id else "never"
            options = {} if run_id else {"config": plain}  # it keeps what it is told at the start alone
            self.tracker = tracking.TrackioTracker(project, name=run_id or name, resume=resume, **options)
        # Nobody but the first rank comes here, so accelerate need not find out which one is.
        self.tracker.main_process_only = False
        self.tracker.start()
        if not run_id:
            self.tracker.store_init_configuration(plain)
        run = self.tracker.tracker
        return {"wandb": lambda: run.id, "mlflow": lambda: run.info.run_id}.get(self.kind, lambda: run.name)()

    def known_step(self) -> int | None:
        """Return wandb's newest step where it has a server: a killed process may not have sent its last."""
        run = self.tracker.tracker
        return run.step - 1 if self.kind == "wandb" and not run.offline else None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Hand the numbers over; the service sends them when it likes."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}  # null in our file
        self.tracker.log(finite, step=step)

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
    return {
        kind: TensorBoardTracker(tensorboard_dir)
        if kind == "tensorboard"
        else AccelerateTracker(kind, name, output_dir)
        for kind in dict.fromkeys(kinds)
    }


@dataclass
class Sent:
    """How far a tracker is: its run, the newest step, and the names that were sent for that step."""

    run_id: str
    step: int = -1
    names: list[str] = field(default_factory=list)

    def unsent(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Return the numbers that it has not had yet: steps come in order, a step's numbers in parts."""
        if step < self.step:
            return {}
        known = set(self.names) if step == self.step else set()
        return {name: value for name, value in metrics.items() if name not in known}

    def add(self, metrics: Mapping[str, float], step: int) -> None:
        """Remember that these were sent."""
        if step > self.step:
            self.step, self.names = step, []
        self.names.extend(metrics)


class TrackerGroup:
    """All trackers of a run. One that fails is given up with a word; the run goes on."""

    def __init__(self, trackers: Mapping[str, Tracker], folder: Path | None, note: Any) -> None:
        self.trackers, self.note = dict(trackers), note
        self.file = folder / TRACKERS_FILE if folder else None
        self.sent: dict[str, Sent] = {}

    def open(self, config: Mapping[str, Any], last_step: int | None) -> None:
        """Begin a run in each tracker, or go on after `last_step`. Raises ValueError, naming the tracker."""
        known = self._read() if last_step is not None else {}
        if self.file and last_step is None:
            self.file.unlink(missing_ok=True)  # of an earlier run in this folder
        first_step = 0 if last_step is None else last_step + 1
        for kind, tracker in self.trackers.items():
            before = known.get(kind)
            try:
                run_id = tracker.open(before.run_id if before else "", config, first_step)
            except Exception as error:  # not logged in, no server, a run that was deleted: the service's own
                why = first_line(error, "no reason given")
                raise ValueError(
                    f"--trackers {kind} cannot begin ({type(error).__name__}: {why}); log in, or leave it out"
                ) from error
            known_step = tracker.known_step()
            if before and known_step is not None and known_step < before.step:
                before = Sent(run_id, known_step + 1)
            self.sent[kind] = before if before and not tracker.is_purged else Sent(run_id)
        self._write()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send to each tracker what it has not had."""
        for kind, tracker in list(self.trackers.items()):
            new = self.sent[kind].unsent(metrics, step)
            if not new:
                continue
            try:
                tracker.log(new, step)
            except Exception as error:  # metrics.jsonl has everything
                del self.trackers[kind]
                self.note(f"warning: {kind} takes no more numbers ({error}); they are not sent any more")
            else:
                self.sent[kind].add(new, step)
        self._write()

    def close(self) -> None:
        """Close all of them."""
        for kind, tracker in self.trackers.items():
            try:
                tracker.close()
            except Exception as error:  # what was sent is there
                self.note(f"warning: {kind} was not closed well ({error})")
        self.trackers = {}

    def _read(self) -> dict[str, Sent]:
        """Return how far each tracker was; a file that is gone or torn means new runs in them."""
        try:
            found = json.loads(self.file.read_text()) if self.file else {}
            return {kind: Sent(of["run_id"], of["step"], of["names"]) for kind, of in found.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            self.note(f"warning: {self.file} cannot be read: new runs begin in the trackers")
            return {}

    def _write(self) -> None:
        """Note how far they are: seen whole or as before, but not waited for until it is on the disk."""
        if not self.file or not any(not tracker.is_purged for tracker in self.trackers.values()):
            return
        told = {kind: vars(sent) for kind, sent in self.sent.items()}
        temporary = self.file.with_name(self.file.name + ".writing")
        with contextlib.suppress(OSError):  # a full disk: a step may then be sent twice
            temporary.write_text(json.dumps(told))
            temporary.replace(self.file)
