"""Saves a run when it is due or asked to, and brings it back. Every rank must make and use these together."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.flags.refusal import StepRefused, TooManyBadSteps
from common.ranks import distributed, watchdog
from common.runs.bad_steps import BadSteps
from common.runs.checkpoints import (
    FOLDER,
    Checkpoint,
    CheckpointWriter,
    SaveFailed,
    checkpoint_order,
    load_newest,
)
from common.runs.durable_files import remove_leftovers, write_file
from common.runs.resume import LENGTH_FLAGS, EarlierRun
from common.runs.run_description import (
    OF_CHECKPOINTS,
    count_parameters,
    describe_run,
    describe_start,
    installed_versions,
)
from common.runs.run_files import ARGS_FILE, FINISHED_FILE, RUN_FILE
from common.runs.run_logger import RunLogger
from common.runs.saved_state import Progress, RandomState, Stateful
from common.runs.stop_request import Stopped, StopRequest

SUPERSEDED = ".superseded"


class RunSaver:
    """The checkpoints of a run."""

    def __init__(
        self, args: Any, dtype: str, earlier: EarlierRun, parts: Mapping[str, Stateful], logger: RunLogger
    ) -> None:
        self.args, self.earlier, self.logger = args, earlier, logger
        self.parts = dict(parts) | {"log": logger}
        self.folder = Path(args.output_dir) if args.output_dir else None
        self.stop = StopRequest()
        self.flags = dataclasses.asdict(args) | {"resolved_dtype": dtype}
        about = {"args": self.flags, "versions": installed_versions(OF_CHECKPOINTS)}
        self.writer = CheckpointWriter(self.folder, args.save_total_limit, about) if self.folder else None
        self.last_saved = ""

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether --save_interval wants a checkpoint of this step."""
        interval = self.args.save_interval
        return interval > 0 and (step % interval == 0 or step == num_steps)

    def begin(self) -> None:
        """Take the newest whole checkpoint, or clear the folder for a beginning. Every rank must call this.

        Raises ValueError when no checkpoint is whole, or it is not of this run.
        """
        taken: Checkpoint | None = None
        if self.earlier.checkpoints:
            parts = dict(self.parts)
            if self.earlier.is_elsewhere:
                del parts["log"]  # this folder's files have nothing of that run
            with watchdog.phase("the loading of the checkpoint"):
                taken = load_newest(self.earlier.checkpoints, parts)
            self.last_saved = taken.name
        if taken is None or self.earlier.is_elsewhere:
            self.logger.open_trackers()
        if distributed.is_main() and self.folder and self.writer:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.writer.clean()
            remove_leftovers(self.folder)
            (self.folder / FINISHED_FILE).unlink(missing_ok=True)
            if taken is None:
                shutil.rmtree(self.folder / FOLDER, ignore_errors=True)
            elif not self.earlier.is_elsewhere:
                self._set_newer_aside(taken)
        distributed.barrier()
        if taken is None or self.earlier.is_elsewhere:
            self.logger.begin_anew()
        self.logger.write_json(ARGS_FILE, json.dumps(self.flags, indent=2, sort_keys=True))
        if distributed.is_main() and self.folder:
            self._describe(is_resumed=taken is not None and not self.earlier.is_elsewhere)
        for note in self.earlier.notes:
            self.logger.note(f"note: {note}")
        if taken:
            self.logger.note(f"resumes from {taken.folder}")
        if self.folder:
            self.stop.install()

    def _describe(self, *, is_resumed: bool) -> None:
        engines = {name: part.engine for name, part in self.parts.items() if hasattr(part, "engine")}
        parameters = {name: count_parameters(engine) for name, engine in engines.items()}
        start = describe_start(self.parts["progress"], self.flags["resolved_dtype"], parameters)
        about = describe_run(
            self.folder, self.args, num_steps=self.logger.num_steps, start=start, is_resumed=is_resumed
        )
        self.logger.write_json(RUN_FILE, json.dumps(about, indent=2))

    def _set_newer_aside(self, taken: Checkpoint) -> None:
        """Rename what was saved after the checkpoint that this run resumes: another future."""
        for folder in list(taken.folder.parent.iterdir()):
            order = checkpoint_order(folder.name)
            if order and order > checkpoint_order(taken.name):
                aside = folder.with_name(folder.name + SUPERSEDED)
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)

    def point(self, name: str, *, is_due: bool) -> None:
        """Save here if it is due, or if the run was asked to stop; then leave. Every rank must call this.

        `name` is from `checkpoint_name`. Raises Stopped, and SaveFailed when a
        checkpoint could not be written and the run is to stop then.
        """
        if self.writer is None:
            return
        must_stop = self.stop.is_asked_anywhere()
        if (is_due or must_stop) and self.last_saved != name:
            self._save(name, must_stop)
        if must_stop:
            raise Stopped(f"stopped after {name}, saved in {self.folder / FOLDER}; the same command resumes")

    def _save(self, name: str, must_stop: bool) -> None:
        try:
            with watchdog.phase(f"the checkpoint {name}", clock="save"):
                self.writer.save(name, self.parts)
            self.last_saved = name
        except SaveFailed as error:
            kept = f"the last good one is {self.last_saved}" if self.last_saved else "there is none before it"
            text = f"checkpoint {self.folder / FOLDER / name} could not be written ({error}); {kept}"
            if must_stop or self.args.on_save_error == "stop":
                raise SaveFailed(text) from error
            self.logger.note(f"warning: {text}; the run continues")

    def save_before_leaving(self, name: str) -> None:
        """Save, whether due or not, for a run that ends early. Every rank must call this."""
        if self.writer is not None and self.last_saved != name:
            self._save(name, must_stop=False)

    def finish(self, num_steps: int) -> None:
        """Note that nothing is left to do: all exports are written."""
        if distributed.is_main() and self.folder:
            lengths = {name: getattr(self.args, name, None) for name in LENGTH_FLAGS}
            write_file(self.folder / FINISHED_FILE, json.dumps({"steps": num_steps, "args": lengths}))


class Run:
    """What every program keeps of a run beside its models."""

    def __init__(
        self,
        args: Any,
        earlier: EarlierRun,
        logger: RunLogger,
        progress: Progress,
        parts: Mapping[str, Stateful],
    ) -> None:
        self.progress, self.logger = progress, logger
        self.bad_steps = BadSteps(args.output_dir, args.max_bad_steps, logger)
        own = {"progress": progress, "bad_steps": self.bad_steps, "random": RandomState()}
        dtype = distributed.dtype_name(args.dtype)
        self.saver = RunSaver(args, dtype, earlier, dict(parts) | own, logger)

    def refuse(self, step: int, error: StepRefused, name: str) -> None:
        """Count a refused step; one too many raises TooManyBadSteps, with the state saved under `name`."""
        try:
            self.bad_steps.refuse(step, error)
        except TooManyBadSteps:
            self.saver.save_before_leaving(name)
            raise
