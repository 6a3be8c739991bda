"""The lock of a run's folder: who holds it, what the last holder left, disks without locks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.runs import run_files

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_lock_of_an_earlier_test():
    run_files.release_lock(None)


def holding(folder: Path, more: str = "") -> subprocess.Popen:
    """A process that holds a folder."""
    code = "import os, sys, time; from common.runs import run_files; run_files.take_lock(sys.argv[1]);"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}{more} print('held', flush=True); time.sleep(60)", str(folder)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_told_of_the_first_until_that_is_dead(tmp_path):
    """Killed, and with a forked child that lives on."""
    first = holding(tmp_path, "os.fork() or time.sleep(5) or os._exit(0);")
    try:
        message = run_files.held_message(tmp_path)
        since = run_files.read_lock(tmp_path)["since"]
        assert f"process {first.pid} on {os.uname().nodename}, since {since}" in message
        with pytest.raises(ValueError, match="belongs to a run that has not ended"):  # whatever --resume says
            run_files.take_lock(str(tmp_path))
        assert run_files.read_lock(tmp_path)["process"] == first.pid
    finally:
        first.kill()
        first.wait()
    run_files.take_lock(str(tmp_path))
    run_files.release_lock(4)
    told = json.loads((tmp_path / "lock.json").read_text())
    assert told["process"] == os.getpid() and told["exit_code"] == 4
    run_files.take_lock(str(tmp_path))
    run_files.release_lock(2)
    assert run_files.read_lock(tmp_path) == told, "as it was before a run that was refused"
    run_files.take_lock(str(tmp_path / "new"))
    run_files.release_lock(2)
    assert not (tmp_path / "new").exists()
    assert run_files.held_message(tmp_path) == ""


def test_a_disk_without_locks_is_said_to_be_one(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    run_files.take_lock(str(tmp_path))
    assert "is on a disk without locks" in capsys.readouterr().err
    assert run_files.held_message(tmp_path) == "" and run_files.read_lock(tmp_path)["exit_code"] is None
