"""What is saved survives a kill at every call that writes.

A save or an export is the old or the new one whenever the process dies, and nothing is left over. A
whole run goes on from there and ends with the bits of one that was never killed.
"""

import json
import platform
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from program_runs import environment
from short_sft import SAVE, STEPS, ShortSFT, hook
from test_resume import KILLED, assert_same_run

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def sft(forks, tiny, tmp_path_factory) -> ShortSFT:
    return ShortSFT(forks, tiny, tmp_path_factory.mktemp("sft"))


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


# The least calls that a scenario has: fewer would show that some are not seen.
SCENARIOS = {"save": 20, "save over": 20, "export": 15}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_call_that_writes(killer, tmp_path, scenario):
    """What is there is the old or the new state, whole; from some call on it is the new one."""
    words = [str(HERE / "killed_writes.py"), str(killer), str(tmp_path), scenario]
    done = subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["calls"] == len(found["states"]) >= SCENARIOS[scenario]
    assert found["unseen"] == 0, "something is written in a way that this test cannot cut"
    changes = [(old, new) for old, new in pairwise(found["states"]) if old != new]
    assert found["states"][0] == "old" and changes == [("old", "new")]


def with_killer(killer: Path, code: str) -> str:
    """Return what a hook does to run `code` with the library as `killer`."""
    return f"exec:import ctypes; killer = ctypes.CDLL({str(killer)!r}); {code}"


def spread(most: int, count: int) -> list[int]:
    """Return `count` numbers from 1 to `most`, evenly spread, both ends among them."""
    return sorted({1 + round(i * (most - 1) / (count - 1)) for i in range(count)})


def count_calls(sft: ShortSFT, killer: Path, folder: Path, ranks: int, rank: int) -> int:
    """Return the calls of a rank from its last save to the program's end."""
    tell = "print('calls', killer.num_calls(), killer.num_unseen(), flush=True)"
    hooks = [
        hook(SAVE, STEPS, with_killer(killer, "killer.arm(ctypes.c_long(-1))"), rank=rank),
        hook("common.runs.run:Run.finish", 1, with_killer(killer, tell), rank=rank, when="after"),
    ]
    done = sft.run(folder, ranks, hooks)
    assert done.codes == [0] * ranks, done.text(rank)
    _, calls, unseen = next(t for t in done.text(rank).splitlines() if t.startswith("calls ")).split()
    assert int(unseen) == 0
    return int(calls)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("ranks", "rank", "times"),
    [(1, 0, 12), pytest.param(1, 0, 25, marks=pytest.mark.long), (2, 0, 5), (2, 1, 4)],
)
def test_a_run_killed_while_it_saves_and_exports(sft, killer, tmp_path, ranks, rank, times):
    """The same command then ends with the bits of a run that was never killed."""
    calls = count_calls(sft, killer, tmp_path / "counted", ranks, rank)
    assert calls >= (40 if rank == 0 else 5)
    for k in spread(calls, times):
        folder = tmp_path / f"killed at {k}"
        kill = hook(SAVE, STEPS, with_killer(killer, f"killer.arm(ctypes.c_long({k}))"), rank=rank)
        killed = sft.run(folder, ranks, [kill])
        assert killed.codes[rank] == KILLED and killed.codes.count(KILLED) == 1, (k, killed.codes)
        again = sft.run(folder, ranks)
        assert again.codes == [0] * ranks, (k, again.text())
        assert_same_run(folder, sft.undisturbed(ranks))
        shutil.rmtree(folder)
