"""A run between its models and the disk: it begins or resumes, saves where it is due, stops when asked to."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.ranks import distributed, watchdog
from common.ranks.failures import StepRefused, TooManyBadSteps
from common.runs.bad_steps import BadSteps
from common.runs.checkpoints import (
    FOLDER,
    Checkpoint,
    SaveFailed,
    checkpoint_order,
    load_newest,
    save_checkpoint,
)
from common.runs.durable_files import remove_leftovers, write_file
from common.runs.resume import LENGTH_FLAGS, EarlierRun
from common.runs.run_description import OF_CHECKPOINTS, describe_run, installed_versions
from common.runs.run_files import ARGS_FILE, FINISHED_FILE, RUN_FILE
from common.runs.run_logger import RunLogger
from common.runs.saved_state import Progress, RandomState, Stateful
from common.runs.stop_request import Stopped, StopRequest

SUPERSEDED = ".superseded"


class Run:
    """What every program keeps of a run beside its models. Every rank must make and use one together."""

    def __init__(
        self,
        args: Any,
        earlier: EarlierRun,
        logger: RunLogger,
        progress: Progress,
        parts: Mapping[str, Stateful],
    ) -> None:
        self.args, self.earlier, self.logger, self.progress = args, earlier, logger, progress
        self.bad_steps = BadSteps(args.output_dir, args.max_bad_steps, logger)
        own = {"progress": progress, "bad_steps": self.bad_steps, "random": RandomState(), "log": logger}
        self.parts = dict(parts) | own
        self.folder = Path(args.output_dir) if args.output_dir else None
        self.flags = dataclasses.asdict(args) | {"resolved_dtype": distributed.dtype_name(args.dtype)}
        self.stop, self.last_saved = StopRequest(), ""

    def begin(self) -> None:
        """Take the newest whole checkpoint, or clear the folder for a beginning.

        Raises ValueError when no checkpoint is whole, or it is not of this run.
        """
        taken: Checkpoint | None = None
        is_resumed = bool(self.earlier.checkpoints) and not self.earlier.is_elsewhere
        if self.earlier.checkpoints:
            parts = dict(self.parts)
            if not is_resumed:
                del parts["log"]  # this folder's files have nothing of that run
            with watchdog.phase("the loading of the checkpoint"):
                taken = load_newest(self.earlier.checkpoints, parts)
            self.last_saved = taken.name
        if not is_resumed:
            self.logger.open()
        if distributed.is_main() and self.folder:
            self._clear(taken if is_resumed else None)
        distributed.barrier()
        if not is_resumed:
            self.logger.begin_anew()
        if distributed.is_main() and self.folder:
            about = describe_run(
                self.folder, self.args, self.parts, num_steps=self.logger.num_steps, is_resumed=is_resumed
            )
            write_file(self.folder / ARGS_FILE, json.dumps(self.flags, indent=2, sort_keys=True) + "\n")
            write_file(self.folder / RUN_FILE, json.dumps(about, indent=2) + "\n")
        for note in self.earlier.notes:
            self.logger.note(f"note: {note}")
        if taken:
            self.logger.note(f"resumes from {taken.folder}")
        if self.folder:
            self.stop.install()

    def _clear(self, taken: Checkpoint | None) -> None:
        """Remove what is unfinished, and the checkpoints of another run; rename those after `taken`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        remove_leftovers(self.folder / FOLDER)
        (self.folder / FINISHED_FILE).unlink(missing_ok=True)
        if taken is None:
            shutil.rmtree(self.folder / FOLDER, ignore_errors=True)
            return
        for folder in list(taken.folder.parent.iterdir()):
            order = checkpoint_order(folder.name)
            if order and order > checkpoint_order(taken.name):  # another future
                aside = folder.with_name(folder.name + SUPERSEDED)
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)

    def is_due(self, step: int) -> bool:
        """Return whether --save_interval wants a checkpoint of this step."""
        interval = self.args.save_interval
        return interval > 0 and (step % interval == 0 or step == self.logger.num_steps)

    def point(self, name: str, *, is_due: bool) -> None:
        """Save here if it is due, or if the run was asked to stop; then leave. Every rank must call this.

        `name` is from `checkpoint_name`. Raises Stopped, and SaveFailed when the checkpoint of a run that
        was asked to stop could not be written.
        """
        must_stop = self.folder is not None and self.stop.is_asked_anywhere()
        if is_due or must_stop:
            self._save(name, must_stop=must_stop)
        if must_stop:
            raise Stopped(f"stopped after {name}, saved in {self.folder / FOLDER}; the same command resumes")

    def _save(self, name: str, *, must_stop: bool = False) -> None:
        if self.folder is None or self.last_saved == name:
            return
        about = {"args": self.flags, "versions": installed_versions(OF_CHECKPOINTS)}
        try:
            with watchdog.phase(f"the checkpoint {name}", clock="save"):
                save_checkpoint(self.folder, name, self.parts, about, self.args.save_total_limit)
            self.last_saved = name
        except SaveFailed as error:
            kept = f"the last good one is {self.last_saved}" if self.last_saved else "there is none before it"
            text = f"checkpoint {self.folder / FOLDER / name} could not be written ({error}); {kept}"
            if must_stop:
                raise SaveFailed(text) from error
            self.logger.note(f"warning: {text}; the run continues")

    def refuse(self, step: int, error: StepRefused, name: str) -> None:
        """Count a refused step; one too many raises TooManyBadSteps, with the state saved under `name`."""
        try:
            self.bad_steps.refuse(step, error)
        except TooManyBadSteps:
            self._save(name)
            raise

    def finish(self) -> None:
        """Note that nothing is left to do: all exports are written."""
        if distributed.is_main() and self.folder:
            lengths = {name: getattr(self.args, name, None) for name in LENGTH_FLAGS}
            told = {"steps": self.logger.num_steps, "args": lengths}
            write_file(self.folder / FINISHED_FILE, json.dumps(told))
