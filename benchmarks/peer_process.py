"""Runs a peer beside us in one benchmark: a program of its own environment that works when it is told to.

The peer's program prints one JSON line when it is ready. From then on every line "go" on its standard input
is answered by one piece of work and one JSON line; the end of the input ends it. So ours and the peer's take
turns in one run, and the peer waits without using the CPU. Both ends are here: `PeerProcess` is the
benchmark's, `Turns` the peer's. Standard library only: the peer's environment imports this file too.
"""

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STDERR_TAIL = 3000  # characters
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
    """A peer's program that waits for its turns; a context manager.

    `environment` is what `python` should be one of, for the error message; `env` is added to ours. Each wait
    ends with PeerError after `limit_seconds`.
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
        self.env = os.environ | {"HF_HUB_OFFLINE": "1"} | (env or {})
        self.env.pop("PYTHONPATH", None)  # ours would hide the peer's libraries
        for name in OF_OUR_GROUP:  # the peer would wait for us, or want our port
            self.env.pop(name, None)
        self.environment, self.limit_seconds = environment, limit_seconds
        self.process: subprocess.Popen[bytes] | None = None
        self.started: dict[str, Any] = {}  # what the peer said of itself

    def start(self) -> dict[str, Any]:
        """Start it, wait until it is ready, return what it says of itself: versions, threads, sizes."""
        if not os.access(self.command[0], os.X_OK):
            name = self.command[0] or "no path"
            raise PeerError(f"--trl_python: {name} is no interpreter; {how_to_make(self.environment)}")
        self.stderr = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            self.command,
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            bufsize=0,
        )
        self.started = self._read()
        if not self.started.get("ready"):
            raise self._error(f"said {self.started} in place of ready")
        return self.started

    def go(self) -> dict[str, Any]:
        """Let it do its piece of work; return what it measured."""
        if self.process is None or self.process.stdin is None:
            raise AssertionError("start() comes before go()")
        try:
            self.process.stdin.write(b"go\n")
        except BrokenPipeError as error:
            raise self._error("is gone") from error
        return self._read()

    def close(self) -> None:
        """End it; what it still prints is dropped."""
        if self.process is None:
            return
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.stderr.close()
        self.process = None

    def __enter__(self) -> "PeerProcess":
        """Start it."""
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End it."""
        self.close()

    def _read(self) -> dict[str, Any]:
        """Return its next line of JSON."""
        if self.process is None or self.process.stdout is None:
            raise AssertionError("the peer does not run")
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
    """The peer's end. Make it before a library prints: it keeps standard output for the protocol alone.

    `wait` ends the program when no turn comes any more.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # what anybody else prints joins the errors
        self._began = self._began_cpu = 0.0

    def ready(self, **facts: Any) -> None:
        """Say that the set-up is done."""
        self._say({"ready": True} | facts)

    def wait(self) -> None:
        """Return when it is our turn; raise SystemExit at the end of the input."""
        if sys.stdin.readline().strip() != "go":
            raise SystemExit(0)
        self._began, self._began_cpu = time.perf_counter(), time.process_time()

    def times(self) -> dict[str, float]:
        """Return the seconds since our turn began, and this process's CPU time in them.

        With one thread the two agree where nothing else runs: they tell how much a busy machine disturbed.
        """
        return {
            "seconds": time.perf_counter() - self._began,
            "cpu_seconds": time.process_time() - self._began_cpu,
        }

    def answer(self, **facts: Any) -> None:
        """Say what was done; take the time before this."""
        self._say(facts)

    def _say(self, facts: dict[str, Any]) -> None:
        self._answers.write(json.dumps(facts) + "\n")
