"""Kills a child at every system call that changes files, and looks at what it leaves.

python killed_writes.py kill_at_write.so FOLDER SCENARIO

For k = 1, 2, ... a child does the scenario's action on a fresh copy of what was prepared, and is killed at
its k-th call (kill_at_write.c). Then what is there, leftovers removed, must be the old or the new state,
whole, and the action must succeed when it is done again. It ends with a child that no k reaches any more.
Prints one JSON line: what was found after each kill, "old" or "new".
"""

import ctypes
import functools
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from simple_parts import make_parts, versions  # noqa: E402

from common.runs.checkpoints import find_checkpoints, load_newest, save_checkpoint  # noqa: E402
from common.runs.durable_files import publish_folder, remove_leftovers  # noqa: E402

TEXTS = {"old": "first " * 2000, "new": "second" * 2000}


def save(folder: Path, step: int, version: int) -> None:
    """Save a state in a run that keeps one."""
    save_checkpoint(folder, f"step-{step:06d}", make_parts(version), {}, 1)


def newest(folder: Path) -> str:
    """Return which state a run goes on with; none, a damaged one or a mixture of two fails."""
    found, _ = find_checkpoints(folder)
    parts = make_parts(-1)
    load_newest(found, parts)
    (version,) = versions(parts)
    return {1: "old", 2: "new"}[version]


def save_again(folder: Path) -> None:
    """Save once more, as a run does that goes on."""
    save(folder, 3, 2)
    assert newest(folder) == "new"


def write_folder(folder: Path, age: str) -> Path:
    """Write files as an export has them."""
    (folder / "below").mkdir(parents=True)
    for name in ("a", "b", "below/c"):
        (folder / name).write_text(TEXTS[age])
    return folder


def read_folder(folder: Path) -> str:
    """Return which files they are; a mixture, or too few, fails."""
    found = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    return {tuple([text] * 3): age for age, text in TEXTS.items()}[tuple(found)]


def export(folder: Path) -> None:
    """Write an export over an older one."""
    shutil.rmtree(folder / "export.writing", ignore_errors=True)
    publish_folder(write_folder(folder / "export.writing", "new"), folder / "export")


class Scenario(NamedTuple):
    """Something that is done to a folder, and that a kill may cut short."""

    prepare: Callable[[Path], object]
    act: Callable[[Path], object]
    read: Callable[[Path], str]
    act_again: Callable[[Path], object]
    names: list[str]  # all that is there in the end


CHECKPOINT = ["loop-rank-00000.safetensors", "meta.json", "model-rank-00000.safetensors"]
SAVED = ["checkpoints", "checkpoints/step-000003", *(f"checkpoints/step-000003/{n}" for n in CHECKPOINT)]
SCENARIOS = {
    "save": Scenario(lambda f: save(f, 1, 1), lambda f: save(f, 2, 2), newest, save_again, SAVED),
    "export": Scenario(
        lambda f: write_folder(f / "export", "old"),
        export,
        lambda f: read_folder(f / "export"),
        export,
        ["export", "export/a", "export/b", "export/below", "export/below/c"],
    ),
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
    scenario.act(folder)
    assert killer.num_unseen() == 0, "something is written in a way that this cannot cut"


def check_kill(scenario: Scenario, folder: Path) -> str:
    """Return the state that a kill leaves, after going on from it."""
    remove_leftovers(folder)
    remove_leftovers(folder / "checkpoints")
    state = scenario.read(folder)
    scenario.act_again(folder)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    assert names == scenario.names, names
    return state


def main() -> None:
    """Do a scenario for all k."""
    library, place, name = sys.argv[1:]
    killer, scenario = ctypes.CDLL(library), SCENARIOS[name]
    pristine, folder = Path(place) / "pristine", Path(place) / "folder"
    pristine.mkdir()
    scenario.prepare(pristine)
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


if __name__ == "__main__":
    main()
