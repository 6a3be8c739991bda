"""What is saved survives a kill at every call that writes.

A save or an export is the old or the new one whenever the process dies, and nothing is left over.
test_resume.py shows that a whole run goes on from there and ends with the bits of one that was never killed.

As a program, `test_killed_saves.py kill_at_write.so FOLDER SCENARIO`: for k = 1, 2, ... a child does the
scenario's action on a fresh copy of what was prepared, and is killed at its k-th call (kill_at_write.c). Then
what is there, leftovers removed, must be the old or the new state, whole, and the action must succeed when it
is done again. It ends with a child that no k reaches any more, and prints what was found after each kill.
"""

import ctypes
import functools
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]

from program_runs import environment  # noqa: E402
from simple_parts import make_parts, versions  # noqa: E402

from common.runs.checkpoints import find_checkpoints, load_newest, save_checkpoint  # noqa: E402
from common.runs.durable_files import publish_folder, remove_leftovers  # noqa: E402

pytestmark = pytest.mark.slow


TEXTS = {"old": "first " * 2000, "new": "second" * 2000}
CHECKPOINT = ["loop-rank-00000.safetensors", "meta.json", "model-rank-00000.safetensors"]


def save(folder: Path, number: int) -> None:
    """Save the state of a step in a run that keeps one checkpoint: of step 1 the old one, then the new."""
    save_checkpoint(folder, f"step-{number:06d}", make_parts(min(number, 2)), {}, 1)


def newest(folder: Path) -> str:
    """Return which state a run goes on with; none, a damaged one or a mixture of two fails."""
    found, _ = find_checkpoints(folder)
    parts = make_parts(-1)
    load_newest(found, parts)
    (version,) = versions(parts)
    return {1: "old", 2: "new"}[version]


def export(folder: Path, number: int) -> None:
    """Write files as an export has them, over those of an older one: the first are the old ones."""
    shutil.rmtree(folder / "export.writing", ignore_errors=True)
    (folder / "export.writing" / "below").mkdir(parents=True)
    for name in ("a", "b", "below/c"):
        (folder / "export.writing" / name).write_text(TEXTS["old" if number == 1 else "new"])
    publish_folder(folder / "export.writing", folder / "export")


def read_export(folder: Path) -> str:
    """Return which files they are; a mixture, or too few, fails."""
    found = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    return {tuple([text] * 3): age for age, text in TEXTS.items()}[tuple(found)]


class Scenario(NamedTuple):
    """Something that is done to a folder for the n-th time, and that a kill may cut short."""

    act: Callable[[Path, int], None]
    read: Callable[[Path], str]
    names: list[str]  # all that is there after the third time
    least_calls: int  # fewer would show that some are not seen


SAVED = "checkpoints/step-000003"
EXPORTED = ["export", *(f"export/{name}" for name in ("a", "b", "below", "below/c"))]
SCENARIOS = {
    "save": Scenario(save, newest, ["checkpoints", SAVED, *(f"{SAVED}/{name}" for name in CHECKPOINT)], 20),
    "export": Scenario(export, read_export, EXPORTED, 15),
}


def in_child(work: Callable[[], object]) -> int:
    """Return the exit code of a child that does `work`, minus the number of a signal that ended it."""
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def act_killed(killer: ctypes.CDLL, k: int, scenario: Scenario, folder: Path) -> None:
    """Do the action, the k-th call of which kills."""
    if killer.arm(ctypes.c_long(k)):
        raise OSError("no seccomp filters here")
    scenario.act(folder, 2)
    assert killer.num_unseen() == 0, "something is written in a way that this cannot cut"


def check_kill(scenario: Scenario, folder: Path) -> str:
    """Return the state that a kill leaves, after going on from it."""
    remove_leftovers(folder)
    remove_leftovers(folder / "checkpoints")
    state = scenario.read(folder)
    scenario.act(folder, 3)
    assert scenario.read(folder) == "new"
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert names == scenario.names, names
    return state


def main() -> None:
    """Do a scenario for all k."""
    library, place, name = sys.argv[1:]
    killer, scenario = ctypes.CDLL(library), SCENARIOS[name]
    pristine, folder = Path(place) / "pristine", Path(place) / "folder"
    pristine.mkdir()
    scenario.act(pristine, 1)
    assert scenario.read(pristine) == "old"
    states = []
    for k in itertools.count(1):
        shutil.copytree(pristine, folder)
        code = in_child(functools.partial(act_killed, killer, k, scenario, folder))
        if code == 0:
            break
        assert code == -signal.SIGKILL, k
        states.append(check_kill(scenario, folder))
        shutil.rmtree(folder)
    assert scenario.read(folder) == "new"
    print(json.dumps(states))


@pytest.fixture(scope="module")
def killer(tmp_path_factory) -> Path:
    """Return the library that kills; skips where it cannot be made or used."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip("kill_at_write.c is for Linux on x86-64")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc) is here to build kill_at_write.c")
    library = tmp_path_factory.mktemp("killer") / "kill_at_write.so"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", library, HERE / "kill_at_write.c"]
    subprocess.run(list(map(str, command)), check=True)
    can_arm = f"import ctypes, sys; sys.exit(ctypes.CDLL({str(library)!r}).arm(ctypes.c_long(-1)) != 0)"
    if subprocess.run([sys.executable, "-c", can_arm]).returncode:
        pytest.skip("this kernel lets a process install no seccomp filter")
    return library


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_call_that_writes(killer, tmp_path, scenario):
    """What is there is the old or the new state, whole; from some call on it is the new one."""
    words = [__file__, str(killer), str(tmp_path), scenario]
    done = subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    states = json.loads(done.stdout.splitlines()[-1])
    assert len(states) >= SCENARIOS[scenario].least_calls
    changes = [(old, new) for old, new in pairwise(states) if old != new]
    assert states[0] == "old" and changes == [("old", "new")]


if __name__ == "__main__":
    main()
