"""Memory check before a model is loaded: whether the step is planned to fit its GPUs, as in run.sh and
train.py."""

import os
import subprocess
import sys
from collections.abc import Sequence

from common.ranks import distributed, watchdog
from common.ranks.failures import say
from common.runs.run_logger import ROOT

PLAN_SECONDS = 300
FITS, TOO_LARGE = 0, 2  # exit codes of the plan; all ranks exit with the latter


def check_memory(stage: int, argv: Sequence[str] | None = None) -> None:
    """Print the memory plan of step `stage` for this machine's GPUs; exit with code 2 if it does not fit.

    `argv` defaults to sys.argv[1:]. Nothing is planned on a CPU, or if rank 0's environment has NO_PLAN,
    which run.sh and train.py set after their own plan. Every rank must call this, before `distributed.start`.
    """
    if not distributed.has_gpu():
        return
    argv = sys.argv[1:] if argv is None else argv

    def verdict() -> str:
        return "" if os.environ.get("NO_PLAN") or print_plan(stage, argv) else "too large"

    if distributed.text_of_first_rank("memory plan", verdict):
        raise SystemExit(TOO_LARGE)


def print_plan(stage: int, argv: Sequence[str]) -> bool:
    """Print the plan of a step with these flags, or why there is none; return whether the step may start.

    The plan is made in a separate process, because ranks do not import tools.
    """
    num_gpus = distributed.num_ranks_here()
    machines = {"gpu": "here", "num_gpus": num_gpus, "num_nodes": -(-distributed.world_size() // num_gpus)}
    given = [word for name, value in machines.items() for word in (f"--{name}", str(value))]
    # -P: the current folder, which may have another `tools`, is not searched.
    command = [sys.executable, "-P", "-m", "tools.plan", *given, "--stage", str(stage), *argv]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    options = {"env": os.environ | {"PYTHONPATH": path}, "capture_output": True, "errors": "replace"}
    try:
        with watchdog.phase("the memory plan"):
            done = subprocess.run(command, timeout=PLAN_SECONDS, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        say(f"no memory plan: {type(error).__name__}")
        return True
    code = done.returncode
    complaints = done.stderr.strip()
    if code not in (FITS, TOO_LARGE):  # the plan itself failed
        last_line = complaints.rpartition("\n")[2]
        say(f"no memory plan: {last_line or f'exit code {code}'}")
        return True
    say(done.stdout.rstrip())
    if code == TOO_LARGE:
        say(complaints)
    return code == FITS
