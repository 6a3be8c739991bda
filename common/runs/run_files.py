"""Names of the files in a run's folder, and the lock that keeps a second run out of it. PURE.

OUTPUT_DIR/lock.json names the process of a run and, once it has ended, its exit code. The lock itself is the
kernel's POSIX lock on that file: it ends with its process, so it is never stale. Network file systems with
POSIX locks hold it across machines.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from common.runs.durable_files import read_if_whole

ARGS_FILE = "args.json"  # the flags, and the dtype they resolve to
CONFIG_FILE = "config.yaml"  # the flags that differ from their defaults, for --config
RUN_FILE = "run.json"  # default flags; time, versions, device, data digest of each start
FINISHED_FILE = "finished.json"  # written when nothing is left to do
LOCK_FILE = "lock.json"  # process that writes here, and its exit code
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"  # one line per step, evaluation, sample
DIGESTS = "digests.jsonl.gz"  # see digest_log.py
ROLLOUTS = "rollouts.jsonl.gz"  # --save_rollouts: one gzip member per step, one line per response
REPORT = "report.html"
PLAN_FILE = "plan.json"  # seconds and memory as planned, and the flags that --auto chose
TRACKERS_FILE = "trackers.json"  # run ids in --trackers, and their newest steps

STOPPED = 75  # exit code, EX_TEMPFAIL of <sysexits.h>: rerun the same command to resume
_TAKEN = (errno.EACCES, errno.EAGAIN)
_REJECTED = 2
# The open lock file of the folder that this process holds, its contents, and its previous contents. Closing
# any other handle of the file in this process also releases the lock.
_held: tuple[IO[str], dict[str, Any], dict[str, Any]] | None = None


class RunResult(NamedTuple):
    """Outcome of a finished run; the paths are None without --output_dir."""

    folder: Path | None
    export: Path | None
    metrics: dict[str, float]  # last values by name, without times and speeds


def read_result(output_dir: str) -> RunResult | None:
    """Outcome of the finished run in a folder; None if there is none."""
    folder = Path(output_dir)
    finished = read_if_whole(folder / FINISHED_FILE)
    if not (output_dir and finished):
        return None
    return RunResult(folder, folder / "export", finished.get("metrics", {}))


def read_lock(folder: Path) -> dict[str, Any]:
    """Contents of lock.json, about the last run; {} if it is missing or unreadable."""
    return read_if_whole(folder / LOCK_FILE)


def held_message(folder: Path) -> str:
    """Why a second run must not start in a folder; "" if no other process writes to it."""
    try:
        with open(folder / LOCK_FILE, "r+") as file:
            _lock(file)
    except OSError as error:
        if error.errno in _TAKEN:
            lock = read_lock(folder)
            holder = f"process {lock.get('process')} on {lock.get('host')}, since {lock.get('since')}"
            text = f"--output_dir {folder} belongs to a run that has not ended ({holder})"
            return f"{text}; wait for it, stop it, or give another folder"
    return ""


def take_lock(output_dir: str) -> None:
    """Keep other runs out of a folder until this process ends; only the first rank may call this.

    Raises ValueError if another run is in it, OSError if it cannot be written.
    """
    global _held
    release_lock(None)
    if not output_dir:
        return
    folder = Path(output_dir)
    before = read_lock(folder)
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / LOCK_FILE, "a+")
    try:
        _lock(file)
    except OSError as error:
        if error.errno in _TAKEN:
            file.close()
            raise ValueError(held_message(folder)) from error
        print(f"note: {folder} is on a disk without locks: do not start a second run in it", file=sys.stderr)
    since = datetime.now(UTC).isoformat(timespec="seconds")
    lock = {"host": socket.gethostname(), "process": os.getpid(), "since": since, "exit_code": None}
    _held = file, lock, before
    _write(file, lock)


def release_lock(exit_code: int | None) -> None:
    """Record the exit code of this process, and release the lock of its folder, if any.

    A run that is rejected leaves the file unchanged, and removes a folder that is empty.
    """
    global _held
    if not _held:
        return
    file, lock, before = _held
    if exit_code == _REJECTED and not before:
        Path(file.name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty
            Path(file.name).parent.rmdir()
    elif exit_code is not None:
        _write(file, before if exit_code == _REJECTED else lock | {"exit_code": exit_code})
    file.close()
    _held = None


def _lock(file: IO[str]) -> None:
    # Not flock, which a forked child would still hold after this process has died.
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _write(file: IO[str], lock: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock is held anyway
        file.truncate(0)
        file.write(json.dumps(lock))
        file.flush()
