"""Memory check before a model is loaded: whether the step is planned to fit its GPUs, as in run.sh and
train.py.

The plan is made in a separate process, because ranks do not import tools. It begins before the program's
slow imports, so that it is made while those and the data take their time. Does not import torch.
"""

import atexit
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PLAN_SECONDS = 300
FITS, TOO_LARGE = 0, 2  # exit codes of the plan; all ranks exit with the latter
BEGUN: list[subprocess.Popen] = []  # by `begin_plan`, until it is read


def begin_plan(stage: int) -> None:
    """Begin the plan of the program's own command line, on rank 0: with --auto, or if the machine seems to
    have a GPU.

    Without --auto nothing is begun with NO_PLAN in the environment. What is not begun here is when the plan
    is read.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    has_gpu = shutil.which("nvidia-smi") or shutil.which("rocm-smi")
    is_checked = has_gpu and not os.environ.get("NO_PLAN") and "--dry_run" not in sys.argv
    if is_first and (is_checked or "--auto" in sys.argv):
        with contextlib.suppress(OSError, ValueError):  # no process, or a launcher's variables are wrong
            BEGUN.append(start_plan(stage, sys.argv[1:]))


def start_plan(stage: int, argv: Sequence[str]) -> subprocess.Popen:
    """A new process that plans a step with these flags on this machine; it ends with this one.

    Raises OSError, and ValueError for variables that are no numbers.
    """
    num_gpus = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1)
    num_nodes = -(-int(os.environ.get("WORLD_SIZE", "1")) // num_gpus)
    given = ["--gpu", "here", "--num_gpus", str(num_gpus), "--num_nodes", str(num_nodes)]
    given += ["--stage", str(stage), "--json", str(plan_file())]
    plan_file().unlink(missing_ok=True)  # of an earlier run in this process
    # -P: the current folder, which may have another `tools`, is not searched.
    command = [sys.executable, "-P", "-m", "tools.plan", *given, *argv]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path}, errors="replace", **streams)
    atexit.register(process.kill)
    return process


@cache
def plan_file() -> Path:
    """The file that the plan's process writes for this one; it is removed with this process."""
    folder = tempfile.TemporaryDirectory(prefix="triptych-plan-")
    atexit.register(folder.cleanup)
    return Path(folder.name) / "plan.json"


def make_plan(stage: int, argv: Sequence[str] | None = None, *, chooses: bool = False) -> dict[str, Any]:
    """Print the plan of step `stage` on this machine, and return what it says; {} if there is none.

    Exits with code 2 if the step does not fit. `argv` defaults to sys.argv[1:]. Without --auto, which
    `chooses` flags by the plan, nothing is planned on a CPU, or if rank 0's environment has NO_PLAN, which
    run.sh and train.py set after their own plan. Every rank must call this.
    """
    from common.ranks import distributed

    if not (chooses or distributed.has_gpu()):
        return {}
    argv = sys.argv[1:] if argv is None else argv

    def plan() -> str:
        is_wanted = chooses or not os.environ.get("NO_PLAN")
        return json.dumps(print_plan(stage, argv) if is_wanted else {})

    facts = json.loads(distributed.text_of_first_rank("memory plan", plan))
    if facts is None:
        raise SystemExit(TOO_LARGE)
    return facts


def print_plan(stage: int, argv: Sequence[str]) -> dict[str, Any] | None:
    """Print the plan of a step with these flags, or why there is none; return what its process wrote, None if
    the step does not fit.
    """
    from common.ranks import watchdog
    from common.ranks.failures import say
    from common.runs.durable_files import read_if_whole

    try:
        with watchdog.phase("the memory plan"):
            process = BEGUN.pop() if BEGUN else start_plan(stage, argv)
            plan, complaints = process.communicate(timeout=PLAN_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"no memory plan: {type(error).__name__}")
        return {}
    code = process.returncode
    complaints = complaints.strip()
    if code not in (FITS, TOO_LARGE):  # the plan itself failed
        last_line = complaints.rpartition("\n")[2]
        say(f"no memory plan: {last_line or f'exit code {code}'}")
        return {}
    say(plan.rstrip())
    if code == TOO_LARGE:
        say(complaints)
        return None
    return read_if_whole(plan_file())
