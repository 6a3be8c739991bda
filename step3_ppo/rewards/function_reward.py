"""`--reward function:MODULE:NAME`: scores from a Python function of your own.

    def polite(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
        return [float("please" in response.lower()) for response in responses]

A plain function is called for one batch after another in a thread of this process, which cannot be ended
when it hangs; or, with --reward_processes, in processes of their own, which can, and in their main thread
(`serve`: this file as a program, without torch). An `async def` is awaited for all batches at the same time,
always in the same event loop, so it may keep its connections.
"""

import asyncio
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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from step3_ppo.rewards.text_rewards import REFUSE, Answers, Failures, RewardError, checked_scores, join

LATE_SECONDS = 1.0  # an event loop that is so late is blocked


class FunctionReward:
    """A `TextReward` from the function that `MODULE:NAME` names."""

    def __init__(
        self,
        target: str,
        *,
        timeout_seconds: float,
        num_processes: int = 0,
        batch_size: int = 64,
        failures: Failures = REFUSE,
    ) -> None:
        """Import the function; start the processes. Raises ValueError, see `import_function`."""
        self.target, self.function = target, import_function(target)
        self.timeout_seconds, self.batch_size, self.failures = timeout_seconds, batch_size, failures
        self._loop: asyncio.AbstractEventLoop | None = None
        self._workers = [Worker(target) for _ in range(0 if is_async(self.function) else num_processes)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def score(self, answers: Answers) -> list[float]:
        """See `TextReward.score`; the function gets at most `batch_size` responses at a time."""
        batches = list(answers.batches(self.batch_size))
        if is_async(self.function):
            return join(self._await_together(batches))
        if not self._workers:
            return join(map(self._score_in_thread, batches))
        with ThreadPoolExecutor(len(self._workers)) as threads:
            return join(threads.map(self._score_in_process, batches))

    def close(self) -> None:
        """See `TextReward.close`."""
        for worker in self._workers:
            worker.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _bear_late(self, batch: Answers, what_became: str) -> list[float]:
        failure = RewardError(
            f"reward function:{self.target} took more than --reward_timeout_seconds "
            f"{self.timeout_seconds:g} for a batch of {len(batch)} (first: {batch.shown(0)}); {what_became}; "
            "raise the limit, or lower --reward_batch_size"
        )
        return self.failures.bear(failure, len(batch))

    # ---- a plain function

    def _score_in_thread(self, batch: Answers) -> list[float]:
        future: Future[list[float]] = Future()

        def run() -> None:
            try:
                future.set_result(score_plainly(self.target, self.function, batch, self.failures))
            except BaseException as error:  # handed over, and raised where it is waited for
                future.set_exception(error)

        # A daemon: the program must be able to end while the function hangs.
        threading.Thread(target=run, name=f"reward {self.target}", daemon=True).start()
        try:
            return future.result(self.timeout_seconds)
        except TimeoutError:
            more = "its thread goes on running; with --reward_processes 1 it would have been ended"
            return self._bear_late(batch, more)

    def _score_in_process(self, batch: Answers) -> list[float]:
        worker = self._idle.get()
        try:
            scores, first_failure, error = worker.ask(
                (batch, replace(self.failures, first="")), self.timeout_seconds
            )
        except TimeoutError:
            return self._bear_late(batch, "its process was ended")
        except (EOFError, OSError):
            died = RewardError(
                f"reward function:{self.target}: its process died with exit code {worker.exit_code} on a "
                f"batch of {len(batch)} (first: {batch.shown(0)}); a negative code is a signal, and -9 often "
                "means that memory ran out: lower --reward_processes or --reward_batch_size"
            )
            return self.failures.bear(died, len(batch))
        finally:
            self._idle.put(worker)
        if error:
            raise RewardError(error)
        self.failures.first = self.failures.first or first_failure
        return scores

    # ---- an async one

    def _await_together(self, batches: list[Answers]) -> list[list[float]]:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            name = f"reward {self.target}"
            threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(self._gather(batches), self._loop)
        try:
            results = future.result(self.timeout_seconds + LATE_SECONDS)
        except TimeoutError:
            self._loop = None  # left behind with its thread; the next call gets another one
            more = "it blocks its event loop (await what waits, or make it a plain def) and goes on running"
            return [self._bear_late(batch, more) for batch in batches]
        for scores in results:
            if isinstance(scores, BaseException):
                raise scores
        return results

    async def _gather(self, batches: list[Answers]) -> list[Any]:
        deadline = asyncio.get_running_loop().time() + self.timeout_seconds
        return await asyncio.gather(*(self._await(b, deadline) for b in batches), return_exceptions=True)

    async def _await(self, batch: Answers, deadline: float) -> list[float]:
        try:
            async with asyncio.timeout_at(deadline) as limit:
                values = await self.function(batch.prompts, batch.responses, batch.rows)
        except (Exception, SystemExit) as error:
            if limit.expired():
                return self._bear_late(batch, "it was cancelled")
            if self.failures.are_borne and len(batch) > 1:
                return join(await asyncio.gather(*(self._await(one, deadline) for one in batch.batches(1))))
            return self.failures.bear(raised(self.target, error, batch), len(batch))
        return checked_scores(f"function:{self.target}", values, batch, self.failures)


class Worker:
    """A process that calls the function; after it hung or died, another one for the next batch."""

    def __init__(self, target: str) -> None:
        self.target, self.exit_code = target, 0
        self._is_closed = False
        self._start()  # now: it gets ready while the models load

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        words = ["-P", "-m", "step3_ppo.rewards.function_reward", str(theirs.fileno()), self.target]
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": path},
        )
        theirs.close()
        self._is_ready = False

    def ask(self, question: Any, timeout_seconds: float) -> Any:
        """Return the answer; the time to get ready does not count.

        Raises TimeoutError, or EOFError or OSError when the process died, with its `exit_code`.
        """
        if self._process.poll() is not None and not self._is_closed:
            self._start()
        try:
            if not self._is_ready:
                self._connection.recv()
                self._is_ready = True
            self._connection.send(question)
            if not self._connection.poll(timeout_seconds):
                raise TimeoutError
            return self._connection.recv()
        except (EOFError, OSError):  # a TimeoutError is one, too
            self._process.kill()  # nothing, to a process that has died
            self.exit_code = self._process.wait()
            self._connection.close()
            raise

    def close(self) -> None:
        """End the process for good; who waits for its answer is told that it died."""
        self._is_closed = True
        self._process.kill()
        self._process.wait()


def import_function(target: str) -> Callable[..., Any]:
    """Return the function that `MODULE:NAME` names; the working directory is searched last.

    Raises ValueError: it cannot be imported, is no function, or cannot take (prompts, responses, rows).
    """
    from common.data.registry import get_from, import_own_module  # with torch: not in a process of `serve`

    flag = f"--reward function:{target}"
    module_name, _, name = target.partition(":")
    try:
        function = get_from(import_own_module(module_name), name)
    except ImportError as error:
        raise ValueError(f"{flag}: {error}") from error
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"{flag}: {name} is no function but a {type(function).__name__}; name a function")
    try:
        inspect.signature(function).bind([], [], [])
    except TypeError as error:
        raise ValueError(
            f"{flag}: {name}{inspect.signature(function)} cannot be called with three lists ({error}); "
            f"define it as {name}(prompts, responses, rows)"
        ) from error
    except ValueError:  # some functions written in C do not tell
        pass
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to await."""
    call = getattr(function, "__call__", None)  # noqa: B004  (an object whose call is async)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


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


# ---- a process of --reward_processes


def serve(connection: Connection, target: str) -> None:
    """Answer (batch, failures) by (scores, first failure that was borne, text of an error), until killed.

    Nothing of the run is imported: the process is ready soon, and never sees a GPU unless the function does.
    The function runs in the main thread: some libraries need that for their time limits.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the program's, which ends this process
    asked: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, asked), daemon=True).start()
    module_name, _, name = target.partition(":")
    function = getattr(importlib.import_module(module_name), name)
    connection.send("ready")
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
