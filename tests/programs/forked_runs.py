"""Runs of whole programs by `fork_server.py`: a second each instead of ten."""

import json
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from program_runs import ROOT, as_flags, environment


@dataclass(frozen=True)
class ForkedRun:
    """What became of a run."""

    codes: list[int | None]  # by rank: exit code, minus a signal's number, None where it was ended by us
    seconds: float
    folder: Path

    @property
    def code(self) -> int | None:
        """The exit code of the first rank."""
        return self.codes[0]

    @property
    def lines(self) -> list[str]:
        """The standard output of the first rank."""
        return (self.folder / "rank-0.out").read_text().splitlines()

    def text(self, rank: int = 0) -> str:
        """Return what a rank has said."""
        return "".join(
            (self.folder / f"rank-{rank}.{end}").read_text(errors="replace") for end in ("out", "err")
        )

    def seen(self, rank: int = 0) -> dict[str, Any]:
        """Return what happened on a rank's pretended GPU."""
        return json.loads((self.folder / f"rank-{rank}.json").read_text())


class ForkServer:
    """Starts runs one at a time."""

    def __init__(self, channel: Any, folder: Path) -> None:
        self.channel, self.folder, self.num_runs = channel, folder, 0

    def run(self, step: int | str, flags: dict[str, Any] | list[str], **more: Any) -> ForkedRun:
        """Return what became of a run of a step's program, or of a module as by python -m; `more` is that of
        fork_server.py's requests.
        """
        return self.run_all([(step, flags)], **more)

    def run_all(self, jobs: list[tuple[int | str, dict[str, Any] | list[str]]], **more: Any) -> ForkedRun:
        """Return what became of runs one after the other in one process group; one that fails ends them."""
        self.num_runs += 1
        folder = self.folder / f"run-{self.num_runs:04d}"
        folder.mkdir()
        words = [as_flags(flags) if isinstance(flags, dict) else [*map(str, flags)] for _, flags in jobs]
        steps = [step for step, _ in jobs]
        request = {"jobs": list(zip(steps, words, strict=True)), "log": str(folder)} | more
        self.channel.write(json.dumps(request) + "\n")
        self.channel.flush()
        answer = self.channel.readline()
        assert answer, "the fork server has died"
        return ForkedRun(folder=folder, **json.loads(answer))


@contextmanager
def fork_server(folder: Path) -> Iterator[ForkServer]:
    """Give a server whose runs log into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as listener:
        address = Path(short) / "socket"  # a socket's path has room for a hundred characters
        listener.bind(str(address))
        listener.listen(1)
        listener.settimeout(180)
        command = [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(address)]
        process = subprocess.Popen(command, cwd=ROOT, env=environment())
        try:
            connection, _ = listener.accept()
            connection.settimeout(None)
            with connection, connection.makefile("rw") as channel:
                yield ForkServer(channel, folder)
        finally:
            process.kill()
            process.wait()
