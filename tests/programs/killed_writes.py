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


SCENARIOS = {
    "save": Scenario(
        save,
        newest,
        ["checkpoints", "checkpoints/step-000003", *(f"checkpoints/step-000003/{n}" for n in CHECKPOINT)],
    ),
    "export": Scenario(
        export, read_export, ["export", "export/a", "export/b", "export/below", "export/below/c"]
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


if __name__ == "__main__":
    main()
