"""What is saved survives a kill at every call that writes.

A save or an export is the old or the new one whenever the process dies, and nothing is left over.
test_resume.py shows that a whole run goes on from there and ends with the bits of one that was never killed.
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

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent


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
SCENARIOS = {"save": 20, "export": 15}


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_killed_at_every_call_that_writes(killer, tmp_path, scenario):
    """What is there is the old or the new state, whole; from some call on it is the new one."""
    words = [str(HERE / "killed_writes.py"), str(killer), str(tmp_path), scenario]
    done = subprocess.run(
        [sys.executable, *words], env=environment(), capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    states = json.loads(done.stdout.splitlines()[-1])
    assert len(states) >= SCENARIOS[scenario]
    changes = [(old, new) for old, new in pairwise(states) if old != new]
    assert states[0] == "old" and changes == [("old", "new")]
