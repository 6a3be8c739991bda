"""A process that has imported everything forks a child for every rank of every run: a start costs no import.

python fork_server.py SOCKET

Reads one JSON line a request, {"jobs": [[step, argv], ...], "ranks": 2, "env": {...}, "log": FOLDER, "hooks":
[...], "seconds": 120, "cwd": FOLDER, "gpu": {...}}, and answers with one: exit codes (negative for a signal)
and seconds. Jobs are run one after the other in one process group; a step that is no number is a module, run
as by python -m. A rank's output goes to FOLDER/rank-0.out and .err. With "gpu", arguments of `pretended_gpu`,
it has one, and rank-0.json says what happened on it.

A hook is {"at": "package.module:Class.method", "call": 3, "when": "before", "do": "kill", "rank": 0}: at the
third call of that function the rank does it: kill | term | int | stop (signals to itself), raise:TEXT,
memory (MemoryError), nan (the function's result becomes NaN, with "when": "after"), exec:CODE (Python, with
the call's `args`).
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from torch.distributed import set_debug_level_from_env

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

from pretended_gpu import pretended_gpu  # noqa: E402
from program_runs import STEPS, free_port, run_here  # noqa: E402

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT, "stop": signal.SIGSTOP}


def set_hook(hook: dict[str, Any], rank: int) -> None:
    """Let the `call`-th call of a function do what the hook says, on its rank (none: on all)."""
    if hook.get("rank", rank) != rank:
        return
    module_name, _, path = hook["at"].partition(":")
    owner = importlib.import_module(module_name)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    plain, calls = getattr(owner, name), iter(range(1, 10**9))

    @functools.wraps(plain)
    def hooked(*args: Any, **more: Any) -> Any:
        is_now = next(calls) == hook.get("call", 1)
        if is_now and hook.get("when", "before") == "before":
            act(hook["do"], args)
        result = plain(*args, **more)
        if is_now and hook.get("when") == "after":
            return spoil(result) if hook["do"] == "nan" else act(hook["do"], args) or result
        return result

    setattr(owner, name, hooked)


def act(what: str, args: tuple = ()) -> None:
    """Do what a hook says, at a call with these arguments."""
    if what in SIGNALS:
        os.kill(os.getpid(), SIGNALS[what])
        time.sleep(0.05)  # a signal is taken in by another thread
    elif what == "memory":
        raise MemoryError("no memory left, says the test")
    elif what.startswith("sleep:"):
        time.sleep(float(what.removeprefix("sleep:")))
    elif what.startswith("exec:"):
        exec(what.removeprefix("exec:"), {"args": args})
    else:
        raise RuntimeError(what.removeprefix("raise:"))


def spoil(result: Any) -> Any:
    """Return NaN in the place of a tensor, or of the first one of several."""
    if isinstance(result, tuple | list):
        spoilt = [spoil(result[0]), *result[1:]]
        return result._make(spoilt) if hasattr(result, "_make") else type(result)(spoilt)
    return result * float("nan")


def run_jobs(jobs: list[tuple[int | str, list[str]]]) -> None:
    """Run programs, and say when each has ended."""
    for step, words in jobs:
        if step in STEPS:
            run_here(step, words)
            print("ended well", flush=True)
        else:
            sys.argv = [step, *words]
            runpy.run_module(step, run_name="__main__", alter_sys=True)


def run_rank(request: dict[str, Any], rank: int, port: int) -> None:
    """Be a rank; leaves with the exit code of the program."""
    folder = Path(request["log"])
    os.chdir(request.get("cwd", "."))
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"rank-{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, number)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    if request.get("ranks", 1) > 1:
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": request["ranks"]}
        world |= {"LOCAL_WORLD_SIZE": request["ranks"], "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in world.items()}
    os.environ |= request.get("env", {})
    set_debug_level_from_env()  # torch was imported before
    code, gpu = 1, None
    try:
        from common.programs import running
        from common.runs import run_logger

        run_logger.draw_run = lambda *_: None  # a picture takes longer than a tiny run
        for hook in request.get("hooks", ()):
            set_hook(hook, rank)
        with contextlib.ExitStack() as stack:
            if "gpu" in request:
                gpu = stack.enter_context(pretended_gpu(**request["gpu"]))
            running.run_program(lambda: run_jobs(request["jobs"]))
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1 if left.code else 0
    except BaseException:
        traceback.print_exc()
    if gpu:
        seen = {"device": str(gpu.device), "queries": gpu.queries, "launches": gpu.launches, "peak": gpu.peak}
        (folder / f"rank-{rank}.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run a request; ranks that outlast its seconds are killed, and their codes are None."""
    started, port = time.monotonic(), free_port()
    children = {}
    for rank in range(request.get("ranks", 1)):
        child = os.fork()
        if not child:
            run_rank(request, rank, port)
        children[child] = rank
    codes: dict[int, int | None] = {}
    while children:
        for child in list(children):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[children.pop(child)] = os.waitstatus_to_exitcode(status)
        if children and time.monotonic() - started > request.get("seconds", 120):
            for child, rank in children.items():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                codes[rank] = None
            children = {}
        time.sleep(0.005)
    return {"codes": [codes[r] for r in sorted(codes)], "seconds": time.monotonic() - started}


def main() -> None:
    """Import what programs need, then serve until the other end is closed."""
    for name in (*(f"{step}.main" for step in STEPS.values()), "pandas"):  # Arrow would import it later
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # ZeRO 3 collects garbage for each engine
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    with connection.makefile("rw") as channel:
        for line in channel:
            channel.write(json.dumps(serve(json.loads(line))) + "\n")
            channel.flush()


if __name__ == "__main__":
    main()
