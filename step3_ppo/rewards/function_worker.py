"""Calls a plain reward function; as a program (`python -m`) it is a process of --reward_processes.

It imports the function's module and nothing of the run: it is ready in the time which that takes, in its
memory, and never sees a GPU unless the function does. No torch in here.
"""

import importlib
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from step3_ppo.rewards.text_rewards import Answers, Failures, RewardError, checked_scores, join

READY = "ready"


def score_plainly(
    target: str, function: Callable[..., Any], batch: Answers, failures: Failures
) -> list[float]:
    """Return the scores that a plain function gives a batch. Raises RewardError.

    Where failures are borne, the answers of a batch that raised are tried one by one.
    """
    try:
        values = function(batch.prompts, batch.responses, batch.rows)
    except (Exception, SystemExit) as error:
        if failures.are_borne and len(batch) > 1:
            return join(score_plainly(target, function, one, failures) for one in batch.batches(1))
        return failures.bear(raised(target, error, batch), len(batch))
    return checked_scores(f"function:{target}", values, batch, failures)


def raised(target: str, error: BaseException, batch: Answers) -> RewardError:
    """Return what is told of a function that raised."""
    failure = RewardError(
        f"reward function:{target} raised {type(error).__name__}: {error}, in a batch of {len(batch)} "
        f"(first: {batch.shown(0)}); let it return 0.0 for what it cannot judge"
    )
    failure.__cause__ = error
    return failure


def serve(connection: Connection, target: str) -> None:
    """Answer (batch, failures) by (scores, first failure that was borne, text of an error), until killed.

    The function runs in the main thread: some libraries need that for their time limits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's, which ends this process
    asked: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, asked), daemon=True).start()
    module_name, _, name = target.partition(":")
    function = getattr(importlib.import_module(module_name), name)
    connection.send(READY)
    while True:
        batch, failures = asked.get()
        try:
            connection.send((score_plainly(target, function, batch, failures), failures.first, ""))
        except RewardError as error:
            cause = traceback.format_exception(error.__cause__) if error.__cause__ else []
            connection.send(([], "", "\n".join([str(error), *cause])))


def _read(connection: Connection, asked: queue.SimpleQueue) -> None:
    """Read what is asked; leave when the program is gone, even killed, and even while the function hangs."""
    try:
        while True:
            asked.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2])
