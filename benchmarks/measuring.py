"""Shared parts of the benchmarks: flags, turns, TRL as a peer, peak memory, tables, the last line.

The peer runs in its own environment and exchanges JSON lines: it reports that it is ready, then replies to
each "go". Both environments import this file, so only the standard library and torch are imported at the top;
our modules are imported inside functions.
"""

import argparse
import ctypes
import gc
import importlib.metadata
import json
import multiprocessing
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch

PEER = Path(__file__).with_name("trl_peer.py")
# Our PYTHONPATH would hide the peer's libraries; the others would make it wait for our ranks or port.
NOT_FOR_PEERS = {"PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE"}
NOT_FOR_PEERS |= {"MASTER_ADDR", "MASTER_PORT"}

Rates = dict[str, dict[str, float]]  # way: median, low, high


def read_args(
    doc: str,
    num_runs: int = 0,
    *,
    peer_environment: str = "",
    algorithms: Mapping[str, str] | None = None,
    has_models: bool = False,
) -> argparse.Namespace:
    """The flags of a benchmark: `quick`, `runs`, `trl_python`, and `algorithm` with `algorithms`, which
    map each to its `peer_environment`; the first is the default. With `has_models` also `model` and `dtype`
    (of workload.py).

    `num_runs` is the baseline's number of rounds, 0 without rounds. With a `peer_environment` (of
    make_peer_env.sh) its interpreter is required, except with --quick. Exits if it cannot be executed.
    """
    from benchmarks.workload import MODELS, default_model
    from common.programs import startup

    startup.quiet_libraries()
    startup.keep_freed_memory()
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round; TRL is optional")
    if num_runs:
        rounds_help = f"measured rounds (0: {num_runs}; 1 with --quick)"
        parser.add_argument("--runs", type=int, default=0, help=rounds_help)
    if peer_environment or algorithms:
        parser.add_argument("--trl_python", default="", help="Python interpreter of TRL's environment")
    if algorithms:
        parser.add_argument("--algorithm", choices=list(algorithms), default=next(iter(algorithms)))
        lora_help = "rank of LoRA: adapters beside the weights and merged, without TRL"
        parser.add_argument("--lora", type=int, default=0, help=lora_help)
    if has_models:
        model, dtype = default_model()
        parser.add_argument("--model", choices=list(MODELS), default=model, help="shape of the models")
        parser.add_argument("--dtype", choices=("fp32", "bf16"), default=dtype)
    args = parser.parse_args()
    if algorithms and not args.lora:
        peer_environment = algorithms[args.algorithm]
    if peer_environment:
        cure = f"bash benchmarks/make_peer_env.sh {peer_environment} DIR, then --trl_python DIR/bin/python"
        if args.trl_python and not os.access(args.trl_python, os.X_OK):
            parser.exit(2, f"error: --trl_python: {args.trl_python} is not an interpreter; {cure}\n")
        if not args.trl_python and not args.quick:
            parser.exit(2, f"error: --trl_python is not given; {cure}\n")
        if not args.trl_python:
            print(f"TRL is left out: --trl_python is not given; {cure}")
    if num_runs:
        args.runs = args.runs or (1 if args.quick else num_runs)
    return args


def begin(doc: str, num_runs: int = 0, **options: Any) -> argparse.Namespace:
    """The flags of `read_args`; starts a benchmark in a single process, which `print_result` ends."""
    from common.ranks import distributed

    args = read_args(doc, num_runs, **options)
    distributed.start()
    return args


def in_new_process(measure: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Result of `measure` in a separate process, a started world of one: only its memory is measured."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_in_world, measure, *args, **options).result()


def _in_world(measure: Callable[..., Any], *args: Any, **options: Any) -> Any:
    from common.programs import startup
    from common.ranks import distributed

    startup.quiet_libraries()
    startup.keep_freed_memory()
    distributed.start()
    result = measure(*args, **options)
    distributed.stop()
    return result


# ---- a peer ---------------------------------------------------------------------------------------------


class Peer:
    """TRL running a task of trl_peer.py; a context manager. `started` is its initial report."""

    def __init__(self, python: str, **task: Any) -> None:
        self.command = [python, str(PEER), json.dumps(task)]
        self.started: dict[str, Any] = {}

    def __enter__(self) -> "Peer":
        """Start it, with our number of threads, and wait until it is ready."""
        env = {name: value for name, value in os.environ.items() if name not in NOT_FOR_PEERS}
        env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(torch.get_num_threads())}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(self.command, env=env, stdin=pipe, stdout=pipe, text=True)
        self.started = self._read()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()

    def go(self) -> dict[str, Any]:
        """Run one turn; return the peer's measurements."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self._read()

    def finish(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Run turns until its training ends; return its trainer's log and its rollouts."""
        rollouts: list[dict[str, Any]] = []
        while "history" not in (reply := self.go()):
            if "rollout" in reply:
                rollouts.append(reply["rollout"])
        return reply["history"], rollouts

    def _read(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer exited with status {self.process.wait()}; its output is above")
        return json.loads(line)


class Turns:
    """The peer's side. Create it before a library prints: it reserves standard output for the protocol."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # all other output goes to standard error
        self._start = time.perf_counter()

    def wait(self) -> None:
        """Wait for the next turn; raise SystemExit at the end of the input."""
        if sys.stdin.readline().strip() != "go":
            raise SystemExit(0)
        self._start = time.perf_counter()

    def answer(self, **facts: Any) -> None:
        """Report that the set-up is done, or the result of a turn, with its seconds."""
        facts["seconds"] = time.perf_counter() - self._start
        self._replies.write(json.dumps(facts) + "\n")


def plan_run(flags: Mapping[str, Any], models: Any = None) -> Any:
    """The run that `tools.plan` builds from flags; True means a flag without a value. `models`: those read
    earlier, if any.
    """
    from common.flags.args import Problems
    from tools.planned_run import build_run, read_run
    from tools.step_flags import PlanArguments, parse_step_args

    argv = []
    for name, value in flags.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    problems = Problems()
    args = parse_step_args(PlanArguments, argv, problems=problems)
    if models is None:
        return read_run(args, problems)
    run = build_run(args, models, problems)
    problems.exit_if_any()
    return run


# ---- measuring ------------------------------------------------------------------------------------------


def timed(run: Callable[..., Any], *args: Any) -> float:
    """Seconds of `run(*args)`, including the device's work."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    start = time.perf_counter()
    result = run(*args)
    wait()
    seconds = time.perf_counter() - start
    del result  # freed after the measurement
    return seconds


class PeakShares:
    """Share of this process's measured peak FLOP/s that each way reaches, counting FLOPs as perf/mfu does."""

    def __init__(self) -> None:
        self.rates: dict[str, list[float]] = {}  # FLOP/s of each of its runs

    def timed(self, name: str, run: Callable[[], Any]) -> float:
        """Seconds of one of our runs, whose models count their FLOPs."""
        from common.ranks.step_costs import COSTS

        with mock.patch.object(COSTS, "count", wraps=COSTS.count) as count:
            seconds = timed(run)
        self.add(name, sum(call.args[1] for call in count.call_args_list) / seconds)
        return seconds

    def add(self, name: str, flops_per_second: float) -> None:
        """Record the rate of a run."""
        self.rates.setdefault(name, []).append(flops_per_second)

    def facts(self, dtype: str = "fp32") -> dict[str, Any]:
        """Peak and shares for the last line; measures the peak and prints the shares."""
        from common.models.loading import DTYPES
        from common.models.model_flops import own_peak_flops

        peak = own_peak_flops(DTYPES[dtype])
        # The first of several runs is a warm-up.
        medians = {name: statistics.median(rates[1:] or rates) for name, rates in self.rates.items()}
        shares = {name: round(rate / peak, 4) for name, rate in medians.items()}
        shown = ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        print(f"share of the product peak, {peak / 1e9:.1f} GFLOP/s in {dtype}: {shown}")
        return {"peak_gflops": round(peak / 1e9, 2), "peak_share": shares}


def copy_bandwidth(num_bytes: int, device: Any = "cpu") -> float:
    """Bytes per second that the fastest of ten copies reads and writes."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(timed(lambda: target.copy_(source)) for _ in range(10))


def take_turns(ways: Mapping[str, Callable[[], float]], num_runs: int) -> Rates:
    """Median, low and high of each way's results over `num_runs` rounds, after a warm-up round.

    All ways run in every round, so that slow minutes of the machine affect all of them.
    """
    values: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(num_runs + 1):
        for name, run in ways.items():
            number = run()
            if turn:
                values[name].append(number)
    return {
        name: {"median": statistics.median(n), "low": min(n), "high": max(n)} for name, n in values.items()
    }


def best(rates: Rates, prefix: str) -> float | None:
    """The highest median among names with this prefix; None without any."""
    return max((rate["median"] for name, rate in rates.items() if name.startswith(prefix)), default=None)


def print_rates(
    title: str, rates: Rates, peer: str, unit: str = "tokens/s", *, is_lower_better: bool = False
) -> float:
    """Print the ways, each with its ratio to the best whose name starts with `peer`; return the ratio of our
    best.
    """
    speeds = {name: rate["median"] ** (-1 if is_lower_better else 1) for name, rate in rates.items()}
    best_peer = max(speed for name, speed in speeds.items() if name.startswith(peer))
    print(f"\n{title}\n{'way':<34}{unit:>9}  {'range':<20}{'x best ' + peer.strip(', '):>20}")
    for name, rate in rates.items():
        spread = f"{rate['low']:.6g} - {rate['high']:.6g}"
        print(f"{name:<34}{rate['median']:>9.6g}  {spread:<20}{speeds[name] / best_peer:>20.2f}")
    return round(max(speed for name, speed in speeds.items() if name.startswith("ours")) / best_peer, 4)


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with the same keys as an aligned table; numbers have at most six digits."""
    from tools.plan import grid

    cells = [[value if isinstance(value, str) else f"{value:,.6g}" for value in row.values()] for row in rows]
    print("\n".join(grid([list(rows[0]), *cells])), flush=True)


def print_result(
    name: str, ours: float, peer: float | None, *, is_lower_better: bool = False, **facts: Any
) -> None:
    """Print the last line: origin, `ours`, `peer`, `ratio` (or None) and further facts."""
    from common.ranks import distributed

    ratio = None if peer is None else round(peer / ours if is_lower_better else ours / peer, 4)
    result = {"name": name} | describe_machine() | {"ours": ours, "peer": peer, "ratio": ratio}
    print(json.dumps(result | facts))
    if torch.distributed.is_initialized():
        distributed.stop()


def describe_machine() -> dict[str, Any]:
    """Origin of a baseline: commit, date, machine, device, threads, versions, command."""
    git = ["git", "-C", str(PEER.parent), "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(git, capture_output=True, text=True)
    cpu = re.search(r"^model name\s+: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    libraries = ("torch", "transformers", "deepspeed", "flash-attn")
    known = {d.metadata["Name"] for d in importlib.metadata.distributions()}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in libraries if name in known]
    has_gpu = torch.cuda.is_available()
    return {
        "commit": done.stdout.strip() or "?",
        "date": time.strftime("%Y-%m-%d"),
        # With AVX2 or AVX512: processors of one name differ in it.
        "machine": f"{os.cpu_count()} cores ({cpu[1] if cpu else platform.machine()}, "
        f"{torch.backends.cpu.get_cpu_capability()}), {gib:.0f} GiB",
        "versions": ", ".join(versions + ([f"CUDA {torch.version.cuda}"] if has_gpu else [])),
        "command": shlex.join(["python", *sys.argv]),
        "device": torch.cuda.get_device_name() if has_gpu else "cpu",
        "threads": torch.get_num_threads(),
    }


def reset_peak() -> int:
    """Release free memory to the system, reset the kernel's peak, return the resident bytes; Linux only."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_since(resident_bytes: int) -> int:
    """Bytes by which the peak of resident memory exceeds an earlier value."""
    return _status_bytes("VmHWM") - resident_bytes


def _status_bytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024
