"""A peer's program that waits for its turns, ranks of a benchmark, and what they are measured by.

A peer runs in its own environment and speaks JSON lines: it says that it is ready, then answers each "go".
Imported from both environments: the standard library only.
"""

import argparse
import ctypes
import gc
import json
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

STDERR_TAIL = 3000  # characters
WARM_UP_TOKENS = 8  # of a row of the step before the one whose memory is measured
OF_OUR_GROUP = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class PeerError(RuntimeError):
    """A peer could not be started, died or fell silent; the message has the end of what it wrote."""


def how_to_make(environment: str) -> str:
    """Return what to do for an interpreter with this peer, for example "trl-1.16"."""
    return (
        f"the peer runs in its own environment; make it once, outside the repository:\n"
        f"    bash benchmarks/make_peer_env.sh {environment} DIR\n"
        f"and name its interpreter: --trl_python DIR/bin/python"
    )


def leave_out(parser: argparse.ArgumentParser, args: argparse.Namespace, environment: str) -> bool:
    """Return whether the peer is left out: no interpreter is named, and --quick does without; else end."""
    if not args.trl_python and not args.quick:
        parser.exit(2, f"error: {how_to_make(environment)}\n")
    if not args.trl_python:
        print(f"TRL is left out: --trl_python is not given; {how_to_make(environment)}")
    return not args.trl_python


class PeerProcess:
    """A peer's program; a context manager. `started` is what it said of itself.

    `environment` is what `python` should be one of, for the error message. Each wait ends with PeerError
    after `limit_seconds`.
    """

    def __init__(
        self,
        python: str,
        script: str | Path,
        args: list[str],
        env: dict[str, str] | None = None,
        *,
        environment: str = "trl-1.16",
        limit_seconds: float = 900,
    ) -> None:
        self.command = [str(python), str(script), *args]
        # Our PYTHONPATH would hide the peer's libraries; of our group it would wait for us, or want our port.
        ours = {"PYTHONPATH", *OF_OUR_GROUP}
        kept = {name: value for name, value in os.environ.items() if name not in ours}
        self.env = kept | {"HF_HUB_OFFLINE": "1"} | (env or {})
        self.environment, self.limit_seconds = environment, limit_seconds
        self.started: dict[str, Any] = {}

    def __enter__(self) -> "PeerProcess":
        """Start it and wait until it is ready."""
        if not os.access(self.command[0], os.X_OK):
            name = self.command[0] or "no path"
            raise PeerError(f"--trl_python: {name} is no interpreter; {how_to_make(self.environment)}")
        self.stderr = tempfile.TemporaryFile()
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            self.command, env=self.env, stdin=pipe, stdout=pipe, stderr=self.stderr, bufsize=0
        )
        try:
            self.started = self._read()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End it; what it still prints is dropped."""
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.stderr.close()

    def go(self) -> dict[str, Any]:
        """Let it do its piece of work; return what it measured."""
        try:
            self.process.stdin.write(b"go\n")
        except BrokenPipeError as error:
            raise self._error("is gone") from error
        return self._read()

    def _read(self) -> dict[str, Any]:
        """Return its next line of JSON."""
        line, deadline = b"", time.monotonic() + self.limit_seconds
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise self._error(f"was silent for {self.limit_seconds:.0f} s")
            found = os.read(self.process.stdout.fileno(), 65536)
            if not found:
                raise self._error(f"ended with status {self.process.wait()}")
            line += found
        return json.loads(line)

    def _error(self, what: str) -> PeerError:
        size = self.stderr.seek(0, os.SEEK_END)
        self.stderr.seek(max(0, size - STDERR_TAIL))
        tail = self.stderr.read().decode(errors="replace").strip()
        return PeerError(f"the peer {Path(self.command[1]).name} {what}; it wrote:\n{tail or '(nothing)'}")


class Turns:
    """The peer's end. Make it before a library prints: it keeps standard output for the protocol alone."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what anybody else prints joins the errors

    def ready(self, **facts: Any) -> None:
        """Say that the set-up is done."""
        self.answer(**facts)

    def wait(self) -> None:
        """Return when it is our turn; raise SystemExit at the end of the input."""
        if sys.stdin.readline().strip() != "go":
            raise SystemExit(0)
        self._began = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since our turn began."""
        return time.perf_counter() - self._began

    def answer(self, **facts: Any) -> None:
        """Say what was done; take the time before this."""
        self._answers.write(json.dumps(facts) + "\n")


# ---- measuring ------------------------------------------------------------------------------------------


def take_turns(ways: Mapping[str, Callable[[], float]], num_runs: int) -> dict[str, dict[str, float]]:
    """Return median, low and high of what each way returns, of `num_runs` rounds; one before is not counted.

    The ways take turns in every round, so that a slower minute of the machine is everybody's.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(num_runs + 1):
        for name, run in ways.items():
            number = run()
            if turn:
                found[name].append(number)
    return {
        name: {"median": statistics.median(n), "low": min(n), "high": max(n)} for name, n in found.items()
    }


def best(rates: Mapping[str, Mapping[str, float]], prefix: str) -> float | None:
    """Return the best median of the ways whose name begins so, None without any."""
    return max((rate["median"] for name, rate in rates.items() if name.startswith(prefix)), default=None)


def print_rates(title: str, rates: Mapping[str, Mapping[str, float]], peer: str) -> float:
    """Print tokens a second beside the best way whose name begins with `peer`; return ours over it."""
    base = best(rates, peer) or 1.0
    print(f"\n{title}\n{'way':<34}{'tokens/s':>9}  {'range':<15}{'x best ' + peer.strip(', '):>20}")
    for name, rate in rates.items():
        spread = f"{rate['low']:.0f} - {rate['high']:.0f}"
        print(f"{name:<34}{rate['median']:>9.0f}  {spread:<15}{rate['median'] / base:>20.2f}")
    return round((best(rates, "ours") or 0.0) / base, 4)


def start_peak() -> int:
    """Give free memory back to the system, reset the kernel's peak, return what is resident; Linux only."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_since(resident_bytes: int) -> int:
    """Return the bytes by which resident memory rose above what it was at its highest."""
    return _status_bytes("VmHWM") - resident_bytes


def _status_bytes(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024


def launch_ranks(script: str, num_ranks: int, words: list[str], *, limit_seconds: int) -> None:
    """Run `script words` by torchrun, one thread a rank; for ranks of this machine, on the CPU without GPUs.

    Raises CalledProcessError when a rank fails, TimeoutExpired after `limit_seconds`.
    """
    import torch

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(num_ranks), "--master_port", port]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if torch.cuda.device_count() < num_ranks:
        environment["CUDA_VISIBLE_DEVICES"] = ""  # nccl wants a device for each rank: all use the CPU
    command = [sys.executable, *launcher, script, *words]
    subprocess.run(command, env=environment, check=True, timeout=limit_seconds)
