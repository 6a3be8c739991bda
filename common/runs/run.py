"""Lifecycle of a run on disk: start or resume, checkpoints when due, stop on request."""

import contextlib
import dataclasses
import json
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from common.data.packed_batch import ROW_IDS, PackedBatch
from common.data.stage_datasets import StageData
from common.flags.args import default_of
from common.flags.config_file import text_of_config
from common.flags.value_forms import Interval
from common.models.fingerprint import changed_models, fingerprint
from common.models.four_bit import whole_shape
from common.ranks import distributed, passes, watchdog
from common.ranks.failures import StepSkipped, TooManyBadSteps, say
from common.runs import run_files
from common.runs.checkpoints import FOLDER, checkpoint_name, checkpoint_order, load_newest, save_checkpoint
from common.runs.digest_log import DigestLog
from common.runs.durable_files import (
    SaveFailed,
    json_line,
    read_if_whole,
    remove_leftovers,
    without_nan,
    write_file,
)
from common.runs.export import METADATA_FILE
from common.runs.resume import EarlierRun, program_of
from common.runs.run_logger import ROOT, RunLogger
from common.runs.saved_state import RandomState, Stateful, TensorReader

# Ctrl-C in a terminal reaches every rank, and the launcher sends another signal: both are one request.
SAME_REQUEST_SECONDS = 2.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)
PACKAGES = ("torch", "deepspeed", "transformers", "tokenizers", "datasets", "numpy", "peft", "flash-attn")


class Stopped(Exception):  # noqa: N818  (not an error)
    """The run was stopped on request with its state saved; the message says where. Raised on every rank."""


class Run(Stateful):
    """Lifecycle of a program's run. Every rank must create one and call its methods together.

    Its own part of a checkpoint is its progress; `parts` are the others. `rows` has the numbers of rows per
    step and per optimizer step over all ranks, each keyed by the flags whose product with the number of ranks
    it is. `frozen` has the path of each model that is not in a checkpoint, keyed by its flag.
    """

    def __init__(
        self,
        args: Any,
        earlier: EarlierRun,
        logger: RunLogger,
        data: StageData,
        rows: dict[str, int],
        parts: Mapping[str, Stateful],
        *,
        steps_per_epoch: int,
        frozen: Mapping[str, str] | None = None,
    ) -> None:
        self.args = args
        self.earlier = earlier
        self.logger = logger
        self.data = data
        self.rows = rows
        self.step = 0  # steps done
        self.evaluated_step = -1  # the last one after which an evaluation, if it was due, has been made
        self.num_refused = 0  # skipped steps and evaluations
        self.num_updates = 0  # steps that changed a model
        self.models: dict[str, str] = {}  # fingerprints of the frozen models
        self.facts: dict[str, Any] = {}  # metadata for the export
        self.parts = dict(parts) | {"progress": self, "random": RandomState(), "log": logger}
        self.digests = DigestLog(args.digest_interval * bool(args.output_dir), logger, self.parts)
        self.frozen = frozen or {}
        self.folder = Path(args.output_dir) if args.output_dir else None
        self.flags = dataclasses.asdict(args) | {"resolved_dtype": distributed.dtype_name(args.dtype)}
        self.stop = StopRequest()
        self.last_saved = ""
        self.save_clock = IntervalClock(args.save_interval, steps_per_epoch)
        if args.save_interval:
            is_due = args.save_interval.is_due
            logger.time_left.expect("save", lambda step: is_due(step, steps_per_epoch, seconds=0))

    def json_state(self) -> dict[str, Any]:
        """Progress of the run, and the digest of its data."""
        return {
            "step": self.step,
            "evaluated_step": self.evaluated_step,
            "num_refused": self.num_refused,
            "num_updates": self.num_updates,
            "facts": without_nan(self.facts),
            "data_key": self.data.key,
            "rows": self.rows,
            "models": self.models,
            "digests": self.digests.pending(),
        }

    def load(self, reader: TensorReader, state: dict[str, Any]) -> None:
        """Load the progress. Raises ValueError if the data, a frozen model, or the rows of a step or update
        differ.
        """
        if state["data_key"] != self.data.key:
            raise ValueError(
                "the data have changed since it was saved, or this version reads them in another way, so its "
                "position in them is invalid; restore the old data or version, or start a new run from its "
                "export"
            )
        for problem in changed_models(state.get("models", {}), self.models):
            raise ValueError(problem)
        for flags, now in self.rows.items():
            before = state["rows"][flags]
            if now != before:
                raise ValueError(
                    f"{flags} x number of ranks was {before} and is now {now}, which changes the updates; "
                    f"choose them so that their product stays {before}"
                )
        self.step, self.facts = state["step"], state["facts"]
        self.evaluated_step = state.get("evaluated_step", self.step)  # absent in older checkpoints
        self.num_refused = state.get("num_refused", 0)  # stored elsewhere in older checkpoints
        self.num_updates = state.get("num_updates", max(self.step - self.num_refused, 0))
        self.digests.restore(state.get("digests", []))

    def begin(self) -> None:
        """Load the newest complete checkpoint, or clear the folder for a new run.

        Raises ValueError if no checkpoint is complete, or it belongs to another run.
        """
        earlier = self.earlier
        loaded = None
        self.models = distributed.run_together(self._fingerprints)[0]
        if distributed.is_main() and self.folder and not (self.folder / run_files.ARGS_FILE).exists():
            # Before all other files: without it, a rerun would take them for another run's.
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write_json(run_files.ARGS_FILE, self.flags)
        if earlier.checkpoints:
            parts = dict(self.parts)
            if earlier.is_elsewhere:
                del parts["log"]  # this folder's log files are not of that run
            with watchdog.phase("the loading of the checkpoint"):
                loaded = load_newest(earlier.checkpoints, parts)
        if loaded and not earlier.is_elsewhere:
            self.last_saved = loaded.folder.name
            self.logger.open(self.step)
        else:
            self.logger.open()
        if distributed.is_main() and self.folder:
            self._clear()
            self._write_json(run_files.ARGS_FILE, self.flags)
            text = text_of_config(self.args, default_of, program_of(self.flags))
            write_file(self.folder / run_files.CONFIG_FILE, text)
            self._write_json(run_files.RUN_FILE, self.describe())
        distributed.barrier()
        for note in earlier.notes:
            self.logger.note(f"note: {note}")
        if loaded:
            self.logger.note(f"resumes from {loaded.folder}")
        if self.folder:
            self.stop.install()

    def _fingerprints(self) -> dict[str, str]:
        paths = self.frozen if distributed.is_main() else {}
        return {flag: fingerprint(path) for flag, path in paths.items()}

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        write_file(self.folder / name, json.dumps(content, indent=2, sort_keys=True) + "\n")

    def _clear(self) -> None:
        """Remove unfinished files; rename checkpoints later than the loaded one, and remove all for a new
        run.
        """
        checkpoints = self.folder / FOLDER
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        remove_leftovers(checkpoints)
        (self.folder / run_files.FINISHED_FILE).unlink(missing_ok=True)
        if not self.last_saved:
            shutil.rmtree(checkpoints, ignore_errors=True)
            return
        for folder in list(checkpoints.iterdir()):
            order = checkpoint_order(folder.name)
            if order and order > checkpoint_order(self.last_saved):  # superseded by this resume
                aside = folder.with_name(folder.name + ".superseded")
                shutil.rmtree(aside, ignore_errors=True)
                folder.rename(aside)

    def describe(self) -> dict[str, Any]:
        """Contents of run.json: steps, defaults, and the starts so far, this one last.

        A run that does not resume has no earlier starts.
        """
        earlier = read_if_whole(self.folder / run_files.RUN_FILE, starts=list) if self.last_saved else {}
        engines = {name: part.engine for name, part in self.parts.items() if hasattr(part, "engine")}
        start = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "from_step": self.step,
            "world_size": distributed.world_size(),
            "device": torch.cuda.get_device_name() if distributed.has_gpu() else f"CPU {platform.machine()}",
            "threads": torch.get_num_threads(),
            "dtype": self.flags["resolved_dtype"],
            "data_key": self.data.key,
            "models": self.models,
            "global_rows": next(iter(self.rows.values())),  # per step
            "data": self.data.report.facts(),
            "parameters": {name: _count_parameters(engine.module) for name, engine in engines.items()},
            "code": _code_version(),
            "versions": _versions(),
        }
        defaults = vars(type(self.args)())
        fields = dataclasses.fields(self.args)
        return {
            "num_steps": self.logger.num_steps,
            "may_change": sorted(field.name for field in fields if field.metadata.get("may_change")),
            "defaults": defaults,
            "starts": [*earlier.get("starts", []), start],
        }

    def checkpoint_if_due(self, step: int, position: str = "") -> None:
        """Save the state after a step if --save_interval requires it. Every rank must call this.

        After a request to stop, also saves at a `position` within the step and exits: raises Stopped, or
        SaveFailed if that checkpoint could not be written.
        """
        name = checkpoint_name(step, position)
        is_due = False
        must_stop = self.folder is not None and self.stop.is_asked_anywhere()
        if self.args.save_interval and step > 0 and not position:
            is_due = step == self.logger.num_steps or self.save_clock.is_due(step)
        if must_stop or is_due:
            self._save(name, must_stop=must_stop)
        if must_stop:
            raise Stopped(
                f"stopped after {name}, saved in {self.folder / FOLDER}; rerun the same command to resume"
            )

    @contextlib.contextmanager
    def stoppable(self, undo: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Context whose passes a request to stop ends: then the state, which after `undo` is that after the
        steps done, is saved and Stopped raised, as by `checkpoint_if_due`. Every rank must enter it.
        """
        passes.must_stop = self.stop.is_asked_anywhere
        passes.is_asked = lambda: bool(self.stop.name)
        try:
            yield
        except passes.Interrupted:
            undo()
            self.checkpoint_if_due(self.step)
            raise
        finally:
            passes.must_stop = passes.is_asked = bool

    def _save(self, name: str, *, must_stop: bool = False) -> None:
        """Save; a failure is a warning, unless the run `must_stop`."""
        if self.folder is None:
            return
        try:
            with watchdog.phase(f"the checkpoint {name}", clock="save"):
                save_checkpoint(self.folder, name, self.parts, self.flags, self.args.save_total_limit)
            self.last_saved = name
        except SaveFailed as error:
            kept = f"the last good one is {self.last_saved}" if self.last_saved else "there is none before it"
            text = f"checkpoint {self.folder / FOLDER / name} could not be written ({error}); {kept}"
            if must_stop:
                raise SaveFailed(text) from error
            self.logger.note(f"warning: {text}; the run continues")

    def record_bad_step(self, step: int, error: StepSkipped, position: str = "") -> None:
        """Count a skipped step and write its batch to disk. Every rank must call this, for the same step.

        Beyond --max_bad_steps raises TooManyBadSteps, caused by the error, with the state saved as by
        `checkpoint_if_due`.
        """
        self.num_refused += 1
        count = self.num_refused
        where = ""
        if self.folder:
            file = f"step-{step:06d}-{count:03d}-rank-{distributed.rank():05d}.jsonl"
            where = _write_batches(self.folder / "bad_batches" / file, step, error)
        self.logger.note(f"step {step} skipped: {error}{where}")
        self.logger.log_event(step, {"perf/bad_steps": count})
        if count > self.args.max_bad_steps:
            self._save(checkpoint_name(step, position))
            limit = f"skipped {count} steps, --max_bad_steps allows {self.args.max_bad_steps}"
            raise TooManyBadSteps(f"{error}\n{limit}") from error

    def finish(self) -> run_files.RunResult:
        """Record that the run is complete, and its exports, which have all been written."""
        last = without_nan(self.logger.last)
        metrics = {name: value for name, value in last.items() if not name.startswith("perf/")}
        export = self.folder and self.folder / "export"
        if distributed.is_main() and self.folder:
            exports = sorted(path.parent.name for path in self.folder.glob(f"*/{METADATA_FILE}"))
            facts = {"steps": self.logger.num_steps, "exports": exports, "metrics": metrics}
            write_file(self.folder / run_files.FINISHED_FILE, json.dumps(facts))
        return run_files.RunResult(self.folder, export, metrics)


def _write_batches(path: Path, step: int, error: StepSkipped) -> str:
    """Write this rank's batches as JSON lines, null for NaN and infinity; return their path."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(json_line({"step": step, "reason": str(error)}))
            file.writelines(json_line(row) for batch in error.batches for row in _rows(batch))
    except OSError as failure:
        return f"; its batch could not be written to {path} ({failure.strerror})"
    return f"; its batch is in {path}"


def _rows(batch: PackedBatch) -> Iterator[dict[str, Any]]:
    """Yield the items of a batch as rows."""
    columns = {key: [sequence.tolist() for sequence in batch.sequences(key)] for key in batch.data}
    if ROW_IDS in columns:
        columns[ROW_IDS] = batch.texts(ROW_IDS)
    for index, item_id in enumerate(batch.ids):
        yield {"id": str(item_id)} | {key: of_items[index] for key, of_items in columns.items()}


class IntervalClock:
    """Whether an interval has passed since the last time, or since its creation.

    For a time interval the first rank's clock decides for all ranks; ranks that saved at different steps
    would wait for each other forever.
    """

    def __init__(self, interval: Interval, steps_per_epoch: int) -> None:
        self.interval, self.steps_per_epoch = interval, steps_per_epoch
        self._last = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether the interval has passed at the end of `step` (from 1). Every rank must call this."""
        seconds = time.monotonic() - self._last if self.interval.seconds else 0.0
        is_due = self.interval.is_due(step, self.steps_per_epoch, seconds)
        if self.interval.seconds:
            is_due = distributed.max_float(float(is_due and distributed.is_main())) > 0
        self._last += seconds if is_due else 0.0
        return is_due


class StopRequest:
    """A request by SIGTERM or SIGINT to save and exit; a second signal exits at once.

    Python calls a signal handler between two bytecode instructions, and a rank that waits in a collective
    executes none. So a thread reads the signal number from the interpreter's wake-up descriptor.
    """

    def __init__(self) -> None:
        self.name = ""
        self._asked_at = 0.0

    def install(self) -> None:
        """Handle the signals, some of which a shell may have set to be ignored."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        threading.Thread(target=self._watch, args=(reading,), daemon=True, name="signals").start()

    def _watch(self, reading: int) -> None:
        while True:
            for number in os.read(reading, 64):
                if number in SIGNALS:
                    self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if not self.name:
            self.name = number.name
            self._asked_at = now
            if distributed.is_main():
                say(f"{number.name}: saving, then exiting; send it again to exit at once")
        elif now - self._asked_at > SAME_REQUEST_SECONDS:
            say(f"{number.name} again: exiting at once")
            run_files.release_lock(128 + number)
            os._exit(128 + number)

    def is_asked_anywhere(self) -> bool:
        """Whether any rank received a request. Every rank must call this."""
        return distributed.max_float(float(bool(self.name))) > 0


def _versions() -> dict[str, str]:
    """{package: version} of Python and of the packages that affect a run's numbers."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def _count_parameters(module: torch.nn.Module) -> dict[str, int]:
    """Number of parameters of a model and number of trained ones, sharded or not."""
    counts = [(whole_shape(p).numel(), p.requires_grad) for p in module.parameters()]
    return {"all": sum(n for n, _ in counts), "trained": sum(n for n, is_trained in counts if is_trained)}


def _code_version() -> str:
    """Commit of these files, with a plus if they were changed; "" without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=5.0)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if (ROOT / ".git").exists() else ""
