"""Give a command again until its run has ended: `python -m tools.until_done OUTPUT_DIR COMMAND...`.

It ends when the run has finished, was refused (bad input) or was asked to stop. After a crash the command
is given again and resumes: as long as there are new checkpoints, and `--tries` times without one. What
happened is read from OUTPUT_DIR/lock.json: launchers have exit codes of their own, torchrun always 1.
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.flags.streams import run_tool
from common.runs.run_files import FINISHED_FILE, held_message, read_lock

STOPPED = 75  # as the programs leave when a signal has stopped them
FINAL = (0, STOPPED, 130, 143)  # exit codes after which the same command does not help


def run_group(command: Sequence[str], **more: Any) -> tuple[int, bool]:
    """Return a command's exit code, and whether a signal asked it to stop.

    The command is a process group of its own: Ctrl-C reaches it once, through this process, which passes
    signals on and waits for all of the group.
    """
    asked: list[int] = []
    group = 0

    def pass_on(number: int, _: Any) -> None:
        asked.append(number)
        if group:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(group, number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(command, start_new_session=True, **more)
        group = child.pid
        if asked:  # before there was a group
            os.killpg(group, asked[0])
        while child.poll() is None:  # not one long wait: another thread may have been given the signal
            time.sleep(0.1)
        # Bash and DeepSpeed's runner die by the signal at once: the programs are still saving.
        with contextlib.suppress(ProcessLookupError):
            while asked:
                os.killpg(group, 0)
                time.sleep(0.1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    code = child.returncode
    return (code if code >= 0 else 128 - code), bool(asked)


def run_until_done(folder: Path, command: Sequence[str], tries: int) -> int:
    """Return the exit code of the last of the runs that a command has started."""
    failures = 0
    while True:
        before, saved = read_lock(folder), _newest(folder)
        code, was_asked = run_group(command)
        if was_asked:
            return STOPPED if code else 0
        while held_message(folder):  # ranks that outlive their launcher
            time.sleep(0.5)
        now = read_lock(folder)
        if now == before and code < 128 and (code or (folder / FINISHED_FILE).exists()):
            return code  # it took no folder: it was refused, or nothing was left to do
        ended = now.get("exit_code") if now != before else None
        if ended in FINAL:
            return ended
        failures = failures + 1 if _newest(folder) == saved else 0
        print(f"until_done: the run ended with exit code {ended or code}", file=sys.stderr)
        if failures >= tries:
            print(f"until_done: {tries} starts without a new checkpoint: given up", file=sys.stderr)
            return ended or code or 1


def _newest(folder: Path) -> str:
    names = [path.name for path in (folder / "checkpoints").glob("step-*") if not path.suffix]
    return max(names, default="")


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run it until done; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--tries", type=int, default=3, help="starts that may bring no new checkpoint")
    parser.add_argument("output_dir", type=Path, help="the run's --output_dir")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="what starts it, with all flags")
    args = parser.parse_args(argv)
    if not args.command:
        parser.error("COMMAND is missing: what starts the run")
    found = re.search("--overwrite_output_dir|--resume[= ]overwrite", " ".join(args.command))
    if found:
        parser.error(f"{found[0]} in COMMAND would begin anew after every crash: leave it out")
    return run_until_done(args.output_dir, args.command, args.tries)


if __name__ == "__main__":
    run_tool(main)
