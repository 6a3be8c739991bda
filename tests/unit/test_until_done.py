"""A crashed run is started again, and no other: whatever the launcher makes of its exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.runs import run_files
from tools import until_done

ROOT = Path(__file__).resolve().parents[2]
# A run: at its n-th start it does the n-th of the words it was given.
RUN = """
import os, signal, sys, time
from pathlib import Path
from common.runs import run_files
folder, starts = Path(sys.argv[1]), Path(sys.argv[1] + ".starts")
number = int(starts.read_text()) if starts.exists() else 0
starts.write_text(str(number + 1))
for what in sys.argv[2 + number].split(","):
    if what == "take":
        run_files.take_lock(str(folder))
    elif what == "save":
        (folder / f"checkpoints/step-{number:06d}").mkdir(parents=True)
    elif what == "finish":
        folder.mkdir(exist_ok=True)
        (folder / "finished.json").write_text("{}")
    elif what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "wait":
        signal.signal(signal.SIGTERM, lambda *_: (run_files.release_lock(75), os._exit(75)))
        time.sleep(60)
    else:
        run_files.release_lock(int(what))
        sys.exit(int(what))
"""
PYTHON, TORCHRUN, DEEPSPEED = ("", "; exit 1", "; c=$?; exit $((c > 128 ? 0 : c))")  # codes as they leave


@pytest.fixture(autouse=True)
def no_lock_of_an_earlier_test():
    run_files.release_lock(None)


def command_of(folder: Path, starts: list[str], launcher: str) -> list[str]:
    return ["bash", "-c", f'"$@"{launcher}', "-", sys.executable, "-c", RUN, str(folder), *starts]


@pytest.mark.parametrize(
    ("launcher", "starts", "num_starts", "code"),
    [
        (PYTHON, ["take,save,die", "take,save,die", "take,finish,0"], 3, 0),
        (TORCHRUN, ["take,save,4", "take,die", "take,3", "take,save,die", "take,finish,75"], 5, 75),
        (DEEPSPEED, ["take,die", "take,die", "take,die", "take,finish,0"], 3, 1),
        (PYTHON, ["2"], 1, 2),
        (TORCHRUN, ["take,2"], 1, 1),
        (PYTHON, ["finish,0"], 1, 0),
        (DEEPSPEED, ["die", "take,finish,0"], 2, 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_is_started_again(tmp_path, monkeypatch, launcher, starts, num_starts, code):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "run"
    found = until_done.run_until_done(folder, command_of(folder, starts, launcher), tries=3)
    assert int(Path(f"{folder}.starts").read_text()) == num_starts
    assert found == code


def test_a_signal_is_passed_on_and_ends_it(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tools.until_done", str(folder)]
    process = subprocess.Popen([*command, *command_of(folder, ["take,wait", "take,0"], TORCHRUN)], cwd=ROOT)
    deadline = time.monotonic() + 30
    while not run_files.read_lock(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == until_done.STOPPED
    assert run_files.read_lock(folder)["exit_code"] == 75 and Path(f"{folder}.starts").read_text() == "1"


def test_what_still_saves_is_waited_for(tmp_path):
    """As under a launcher: Bash dies by the signal, and the program that it started takes its time."""
    saving = "trap 'sleep 0.5; touch SAVED; exit' TERM; echo; while true; do sleep 0.05; done"
    code = "import sys; from tools.until_done import run_group; sys.exit(not run_group(sys.argv[1:])[1])"
    command = [sys.executable, "-c", code, "bash", "-c", 'bash -c "$0"; exit 1', saving]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert process.stdout.readline() == "\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0 and (tmp_path / "SAVED").exists()


@pytest.mark.parametrize("more", ["", "main.py --resume overwrite", "main.py --resume=overwrite"])
def test_bad_input_is_refused(more, capsys):
    with pytest.raises(SystemExit) as left:
        until_done.main(["out", *more.split()])
    assert left.value.code == 2 and "error: " in capsys.readouterr().err


# ---- the lock


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
