"""A run between its models and the disk: it begins or resumes, saves where it is due, stops when asked to."""

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from common.data.packed_batch import ROW_IDS, PackedBatch
from common.ranks import distributed, watchdog
from common.ranks.failures import StepRefused, TooManyBadSteps, say
from common.runs import run_files
from common.runs.checkpoints import (
    FOLDER,
    SaveFailed,
    checkpoint_name,
    checkpoint_order,
    load_newest,
    save_checkpoint,
)
from common.runs.durable_files import json_line, read_object, remove_leftovers, write_file
from common.runs.resume import LENGTH_FLAGS, EarlierRun, flag_defaults
from common.runs.run_logger import RunLogger
from common.runs.saved_state import Progress, RandomState, Stateful, TensorReader

SUPERSEDED = ".superseded"
BAD_BATCHES = "bad_batches"
STOPPED = 75  # EX_TEMPFAIL of <sysexits.h>: the same command resumes
# A terminal's Ctrl-C reaches every rank, and the launcher passes on a signal of its own: that is one request.
SAME_REQUEST_SECONDS = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)
PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "datasets", "numpy", "peft", "flash-attn")


class Stopped(Exception):  # noqa: N818  (nothing went wrong)
    """The run was asked to stop, and its state is saved; the message says where. Raised on every rank."""


class Run(Stateful):
    """What every program keeps of a run beside its models. Every rank must make and use one together.

    Its own part of a checkpoint is how many steps were refused.
    """

    def __init__(
        self,
        args: Any,
        earlier: EarlierRun,
        logger: RunLogger,
        progress: Progress,
        parts: Mapping[str, Stateful],
    ) -> None:
        self.args, self.earlier, self.logger, self.progress = args, earlier, logger, progress
        self.num_refused = 0
        own = {"progress": progress, "bad_steps": self, "random": RandomState(), "log": logger}
        self.parts = dict(parts) | own
        self.folder = Path(args.output_dir) if args.output_dir else None
        self.flags = dataclasses.asdict(args) | {"resolved_dtype": distributed.dtype_name(args.dtype)}
        self.stop, self.last_saved = StopRequest(), ""

    def json_state(self) -> dict[str, Any]:
        """Return how many steps were refused."""
        return {"count": self.num_refused}

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Resume counting."""
        self.num_refused = state["count"]

    def begin(self) -> None:
        """Take the newest whole checkpoint, or clear the folder for a beginning.

        Raises ValueError when no checkpoint is whole, or it is not of this run.
        """
        taken = None
        is_resumed = bool(self.earlier.checkpoints) and not self.earlier.is_elsewhere
        if self.earlier.checkpoints:
            parts = dict(self.parts)
            if not is_resumed:
                del parts["log"]  # this folder's files have nothing of that run
            with watchdog.phase("the loading of the checkpoint"):
                taken = load_newest(self.earlier.checkpoints, parts)
            self.last_saved = taken.folder.name
        if not is_resumed:
            self.logger.open()
        if distributed.is_main() and self.folder:
            self._clear(self.last_saved if is_resumed else "")
            about = describe_run(
                self.folder, self.args, self.parts, num_steps=self.logger.num_steps, is_resumed=is_resumed
            )
            flags = json.dumps(self.flags, indent=2, sort_keys=True)
            write_file(self.folder / run_files.ARGS_FILE, flags + "\n")
            write_file(self.folder / run_files.RUN_FILE, json.dumps(about, indent=2) + "\n")
        distributed.barrier()
        for note in self.earlier.notes:
            self.logger.note(f"note: {note}")
        if taken:
            self.logger.note(f"resumes from {taken.folder}")
        if self.folder:
            self.stop.install()

    def _clear(self, taken: str) -> None:
        """Remove what is unfinished; rename checkpoints after `taken`, or remove all where it is none."""
        checkpoints = self.folder / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        remove_leftovers(checkpoints)
        (self.folder / run_files.FINISHED_FILE).unlink(missing_ok=True)
        if not taken:
            shutil.rmtree(checkpoints, ignore_errors=True)
            return
        for folder in list(checkpoints.iterdir()):
            order = checkpoint_order(folder.name)
            if order and order > checkpoint_order(taken):  # another future
                aside = folder.with_name(folder.name + SUPERSEDED)
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)

    def point(self, step: int, position: str = "") -> None:
        """Save the state after a step if --save_interval wants it. Every rank must call this.

        A run that was asked to stop saves at a `position` within the step too, and leaves: raises Stopped, or
        SaveFailed when that checkpoint could not be written.
        """
        name, interval = checkpoint_name(step, position), self.args.save_interval
        is_due = interval > 0 and step > 0 and (step % interval == 0 or step == self.logger.num_steps)
        must_stop = self.folder is not None and self.stop.is_asked_anywhere()
        if must_stop or (is_due and not position):
            self._save(name, must_stop=must_stop)
        if must_stop:
            raise Stopped(f"stopped after {name}, saved in {self.folder / FOLDER}; the same command resumes")

    def _save(self, name: str, *, must_stop: bool = False) -> None:
        if self.folder is None or self.last_saved == name:
            return
        about = {"args": self.flags, "versions": installed_versions()}
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

    def refuse(self, step: int, error: StepRefused, position: str = "") -> None:
        """Count a refused step and keep its batch. Every rank must call this, for the same step.

        One too many raises TooManyBadSteps, with the error as its cause, the state saved as by `point`.
        """
        self.num_refused += 1
        count, where = self.num_refused, ""
        if self.folder:
            file = f"step-{step:06d}-{count:03d}-rank-{distributed.rank():05d}.jsonl"
            where = _write_batches(self.folder / BAD_BATCHES / file, step, error)
        self.logger.note(f"step {step} refused: {error}{where}")
        self.logger.log_event(step, {"perf/bad_steps": count})
        if count > self.args.max_bad_steps:
            self._save(checkpoint_name(step, position))
            told = f"skipped {count} steps, --max_bad_steps allows {self.args.max_bad_steps}"
            raise TooManyBadSteps(f"{error}\n{told}") from error

    def finish(self) -> None:
        """Note that nothing is left to do: all exports are written."""
        if distributed.is_main() and self.folder:
            lengths = {name: getattr(self.args, name, None) for name in LENGTH_FLAGS}
            told = {"steps": self.logger.num_steps, "args": lengths}
            write_file(self.folder / run_files.FINISHED_FILE, json.dumps(told))


def _write_batches(path: Path, step: int, error: StepRefused) -> str:
    """Write this rank's batches as JSON lines, null for NaN and infinity; return where they are."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(json_line({"step": step, "reason": str(error)}))
            file.writelines(json_line(row) for batch in error.batches for row in _rows(batch))
    except OSError as failure:
        return f"; its batch could not be written to {path} ({failure.strerror})"
    return f"; its batch is in {path}"


def _rows(batch: PackedBatch) -> Iterator[dict[str, Any]]:
    """Give a batch item by item."""
    columns = {key: [sequence.tolist() for sequence in batch.sequences(key)] for key in batch.data}
    if ROW_IDS in columns:
        columns[ROW_IDS] = batch.texts(ROW_IDS)
    for index, item_id in enumerate(batch.ids):
        yield {"id": str(item_id)} | {key: of_items[index] for key, of_items in columns.items()}


class StopRequest:
    """Whether SIGTERM or SIGINT asked this process to save and leave; a second one makes it leave at once.

    Python calls a signal's handler between two of its own instructions, and a rank that waits for another in
    a collective has none. So the number is read from the interpreter's wake-up descriptor by a thread.
    """

    def __init__(self) -> None:
        self.name = ""
        self._asked_at = 0.0

    def install(self) -> None:
        """Take over the signals, of which a shell may have let this process ignore some."""
        mine = [n for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        if not mine or threading.current_thread() is not threading.main_thread():
            return
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        for number in mine:
            signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, args=(reading, writing), daemon=True, name="signals").start()

    def _watch(self, reading: socket.socket, writing: socket.socket) -> None:
        while writing.fileno() >= 0:
            for number in reading.recv(64):
                if number in SIGNALS:
                    self._take(signal.Signals(number))

    def _take(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self.name:
            self.name, self._asked_at = number.name, now
            if distributed.is_main():
                say(f"{number.name}: saving, then leaving; once more leaves at once")
        elif now - self._asked_at > SAME_REQUEST_SECONDS:
            say(f"{number.name} again: leaving at once")
            run_files.release_lock(128 + number)
            os._exit(128 + number)

    def is_asked_anywhere(self) -> bool:
        """Return whether any rank was asked. Every rank must call this."""
        return distributed.max_float(float(bool(self.name))) > 0


def installed_versions() -> dict[str, str]:
    """Return {package: version} of those that move a run's numbers."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def describe_run(
    folder: Path, args: Any, parts: Mapping[str, Stateful], *, num_steps: int, is_resumed: bool
) -> dict[str, Any]:
    """Return what run.json is to say: steps, defaults, and this start after those that the file has.

    A run that begins anew has no earlier starts.
    """
    starts = read_object(folder / run_files.RUN_FILE).get("starts") if is_resumed else []
    starts = starts if isinstance(starts, list) else []  # what cannot be read decides nothing
    progress: Progress = parts["progress"]
    engines = {name: part.engine for name, part in parts.items() if hasattr(part, "engine")}
    device = distributed.device()
    on_gpu = device.type == "cuda"
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_step": progress.step,
        "world_size": distributed.world_size(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU {platform.machine()}",
        "dtype": distributed.dtype_name(args.dtype),
        "data_key": progress.data_key,
        "global_rows": next(iter(progress.rows.values())),  # of a step
        "data": progress.about_data,
        "parameters": {name: _count_parameters(engine.module) for name, engine in engines.items()},
        "code": _code_version(),
        "versions": {"python": platform.python_version()} | installed_versions(),
    }
    return {"num_steps": num_steps, "defaults": flag_defaults(args), "starts": [*starts, start]}


def _count_parameters(module: torch.nn.Module) -> dict[str, int]:
    """Return how many parameters a model has, and how many of them are trained, whatever is sharded."""
    counts = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in module.parameters()]
    return {"all": sum(n for n, _ in counts), "trained": sum(n for n, is_trained in counts if is_trained)}


def _code_version() -> str:
    """Return the commit of these files, with a plus where they were changed; "" where there is no git."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=5.0)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if (root / ".git").exists() else ""
