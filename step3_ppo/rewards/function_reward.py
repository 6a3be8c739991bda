"""`--reward function:MODULE:NAME`: scores from your own Python function.

    def polite(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
        return [float("please" in response.lower()) for response in responses]

It is called batch by batch in a thread of this process, which cannot be stopped if it hangs; or, with
--reward_processes, in the main thread of worker processes, which can (`serve`: this file as a program,
without torch). An `async def` runs in a new event loop for each batch.
"""

import asyncio
import copy
import importlib
import inspect
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import wait
from multiprocessing.connection import Connection
from typing import Any

from common.flags.plugins import get_from, import_own_module
from step3_ppo.rewards.text_rewards import (
    Answers,
    Checked,
    RaisedError,
    RewardError,
    TextReward,
    checked_scores,
    describe_error,
    in_daemon,
)


class FunctionReward(TextReward):
    """A reward from the function that `MODULE:NAME` names."""

    def __init__(self, target: str, args: Any) -> None:
        """Import the function; start the processes. Raises ValueError, see `import_function`."""
        super().__init__(f"function:{target}", args, num_threads=args.reward_processes)
        self.function = import_function(target)
        self.timeout_seconds = args.reward_timeout_seconds
        self._workers = [Worker(target) for _ in range(args.reward_processes)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def ask(self, batch: Answers) -> Checked:
        """See `TextReward.ask`."""
        worker = self._idle.get() if self._workers else None
        try:
            return worker.ask(batch, self.timeout_seconds) if worker else self._ask_thread(batch)
        except TimeoutError as late:
            raise RewardError(
                f"took more than --reward_timeout_seconds {self.timeout_seconds:g}; {late}; raise the limit, "
                "or lower --reward_batch_size"
            ) from None
        finally:
            if worker:
                self._idle.put(worker)

    def close(self) -> None:
        """See `TextReward.close`."""
        super().close()
        for worker in self._workers:
            worker.end()

    def _ask_thread(self, batch: Answers) -> Checked:
        future = in_daemon(lambda: call(self.function, batch), f"reward {self.name}")
        wait([future], self.timeout_seconds)
        if future.done():
            return future.result()
        raise TimeoutError("its thread is still running; --reward_processes 1 would have stopped it")


class Worker:
    """A process that calls the function; replaced for the next batch if it hangs or dies."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._start()  # early, so that it gets ready while the models load

    def _start(self) -> None:
        self._connection, child_connection = multiprocessing.Pipe()
        arguments = [
            "-P",
            "-m",
            "step3_ppo.rewards.function_reward",
            str(child_connection.fileno()),
            self.target,
        ]
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[child_connection.fileno()],
            env=os.environ | {"PYTHONPATH": path},
        )
        child_connection.close()

    def ask(self, batch: Answers, timeout_seconds: float) -> Checked:
        """Scores by the function; the timeout does not include the start-up of its process.

        Raises TimeoutError; RaisedError when the function raised, RewardError when its process died.
        """
        if self._process.poll() is not None:
            self._start()
        try:
            self._connection.recv()  # "ready"
            self._connection.send(batch)
            if not self._connection.poll(timeout_seconds):
                self.end()
                raise TimeoutError("its process was stopped")
            answer = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            raise RewardError(
                f"its process died with exit code {self.end()}; a negative code is a signal, and -9 often "
                "means that memory ran out: lower --reward_processes or --reward_batch_size"
            ) from error
        if isinstance(answer, RaisedError):
            raise answer
        return answer

    def end(self) -> int:
        """End the process and return its exit code; a waiting caller gets a RewardError."""
        self._process.kill()  # no effect on a dead process
        return self._process.wait()


def import_function(target: str) -> Callable[..., Any]:
    """The function that `MODULE:NAME` names; the working directory is searched last.

    Raises ValueError if it cannot be imported, is not a function, or cannot take (prompts, responses, rows).
    """
    flag = f"--reward function:{target}"
    module_name, _, name = target.partition(":")
    try:
        function = get_from(import_own_module(module_name), name)
    except ImportError as error:
        raise ValueError(f"{flag}: {error}") from error
    try:
        inspect.signature(function).bind([], [], [])
    except TypeError as error:
        raise ValueError(
            f"{flag}: {name} cannot be called with three lists ({error}); define a function "
            f"{name}(prompts, responses, rows)"
        ) from error
    except ValueError:  # some functions written in C have no signature
        pass
    return function


def call(function: Callable[..., Any], batch: Answers) -> Checked:
    """Scores of a batch by a function; an `async def` runs in its own event loop.

    Raises RaisedError.
    """
    try:
        # Copies, because the function may change its arguments, and other rewards read the same rows.
        values = function(list(batch.prompts), list(batch.responses), copy.deepcopy(batch.rows))
        if inspect.iscoroutine(values):
            values = asyncio.run(values)
        return checked_scores(values, batch)  # also runs a generator
    except BaseException as error:  # pytest's `fail` is not an Exception; Ctrl-C is not raised here
        what = describe_error(error)
        raise RaisedError(f"raised {what}; return 0.0 for responses that it cannot score") from error


# ---- worker process of --reward_processes


def serve(connection: Connection, target: str) -> None:
    """Report that the function is ready and reply to a batch with its scores or a RaisedError; repeat until
    killed.

    Nothing of the run is imported, so the process starts quickly and sees no GPU unless the function uses
    one. The function runs in the main thread, which some libraries need for their time limits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the program, which then ends this process
    requests: queue.SimpleQueue[Answers] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, requests), daemon=True).start()
    module_name, _, name = target.partition(":")
    function = getattr(importlib.import_module(module_name), name)
    while True:
        connection.send("ready")
        answer: Checked | RaisedError
        try:
            answer = call(function, requests.get())
        except RaisedError as error:
            where = traceback.format_tb(error.__cause__.__traceback__)
            answer = RaisedError("\n".join([str(error), *where, describe_error(error.__cause__)]))
        connection.send(answer)


def _read(connection: Connection, requests: queue.SimpleQueue) -> None:
    """Read requests; exit when the program has ended, even if it was killed or the function hangs."""
    try:
        while True:
            requests.put(connection.recv())
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), sys.argv[2])
