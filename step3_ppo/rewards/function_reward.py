"""`--reward function:MODULE:NAME`: scores from a Python function of your own. No torch in here.

    def polite(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]:
        return [float("please" in response.lower()) for response in responses]

A plain function is called for one batch after another in a thread of this process, which cannot be ended
when it hangs; or, with --reward_processes, in processes of their own, which can, and in their main thread
(some libraries need that for their time limits). An `async def` is awaited for all batches at the same time,
always in the same event loop, so it may keep its connections.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import multiprocessing
import os
import sys
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from common.data.plugins import get_from, import_own_module
from step3_ppo.rewards.text_rewards import Answers, Failures, RewardError, checked_scores, join

LATE_SECONDS = 1.0  # an event loop that is so late is blocked
WORKER_START_SECONDS = 300.0  # a module of the user's may load a model when it is imported
WORKER_END_SECONDS = 1.0  # to end by itself before it is killed
_SPAWN = multiprocessing.get_context("spawn")  # a fork of a process with CUDA and threads may hang


class FunctionReward:
    """A `TextReward` from the function that `MODULE:NAME` names."""

    def __init__(
        self,
        target: str,
        *,
        timeout_seconds: float,
        num_processes: int = 0,
        batch_size: int = 64,
        failures: Failures | None = None,
    ) -> None:
        """Import the function; start the processes. Raises ValueError, see `import_function`."""
        function, failures, self.batch_size = import_function(target), failures or Failures(), batch_size
        self._caller: ThreadCaller | LoopCaller | ProcessCaller
        if is_async(function):
            self._caller = LoopCaller(target, function, timeout_seconds, failures)
        elif num_processes:
            self._caller = ProcessCaller(target, num_processes, timeout_seconds, failures)
        else:
            self._caller = ThreadCaller(target, function, timeout_seconds, failures)

    def score(self, answers: Answers) -> list[float]:
        """See `TextReward.score`; the function gets at most `batch_size` responses at a time."""
        return join(self._caller.score_batches(list(answers.batches(self.batch_size))))

    def close(self) -> None:
        """See `TextReward.close`."""
        self._caller.close()


# ---- the function ------------------------------------------------------------------------------------------


def import_function(target: str) -> Callable[..., Any]:
    """Return the function that `MODULE:NAME` names; the working directory is searched last.

    Raises ValueError: it cannot be imported, is no function, or cannot take (prompts, responses, rows).
    """
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


def call_function(
    target: str, function: Callable[..., Any], batch: Answers, failures: Failures
) -> list[float]:
    """Return the scores that a plain function gives a batch. Raises RewardError.

    Where failures are borne, the answers of a batch that raised are tried one by one.
    """
    try:
        values = function(batch.prompts, batch.responses, batch.rows)
    except (Exception, SystemExit) as error:
        if failures.are_borne and len(batch) > 1:
            return join(call_function(target, function, one, failures) for one in batch.batches(1))
        failure = _raised(target, error, batch)
        failure.__cause__ = error
        return failures.bear(failure, len(batch))
    return checked_scores(f"function:{target}", values, batch, failures)


def _raised(target: str, error: BaseException, batch: Answers) -> RewardError:
    return RewardError(
        f"reward function:{target} raised {type(error).__name__}: {error}, in a batch of {len(batch)} "
        f"(first: {batch.shown(0)}); let it return 0.0 for what it cannot judge"
    )


def _timed_out(target: str, seconds: float, batch: Answers, more: str) -> RewardError:
    return RewardError(
        f"reward function:{target} took more than --reward_timeout_seconds {seconds:g} for a batch of "
        f"{len(batch)} (first: {batch.shown(0)}); {more}; raise the limit, or lower --reward_batch_size"
    )


# ---- a plain function in this process ----------------------------------------------------------------------


@dataclass
class ThreadCaller:
    """Calls a plain function for one batch after another, each in a thread that can be left behind."""

    target: str
    function: Callable[..., Any]
    timeout_seconds: float
    failures: Failures

    def score_batches(self, batches: list[Answers]) -> list[list[float]]:
        """Return the scores of each batch. Raises RewardError."""
        return [self._score(batch) for batch in batches]

    def _score(self, batch: Answers) -> list[float]:
        future: concurrent.futures.Future = concurrent.futures.Future()

        def call() -> None:
            try:
                future.set_result(call_function(self.target, self.function, batch, self.failures))
            except BaseException as error:  # handed over, and raised where it is waited for
                future.set_exception(error)

        # A daemon: the program must be able to end while the function hangs.
        threading.Thread(target=call, name=f"reward {self.target}", daemon=True).start()
        try:
            return future.result(self.timeout_seconds)
        except TimeoutError:
            more = "its thread goes on running; with --reward_processes 1 it would have been ended"
            failure = _timed_out(self.target, self.timeout_seconds, batch, more)
        return self.failures.bear(failure, len(batch))

    def close(self) -> None:
        """Do nothing: there is no thread between calls."""


# ---- async def ---------------------------------------------------------------------------------------------


@dataclass
class LoopCaller:
    """Awaits an `async def` for all batches at the same time, in one event loop in a thread of its own."""

    target: str
    function: Callable[..., Any]
    timeout_seconds: float
    failures: Failures
    _loop: asyncio.AbstractEventLoop | None = None

    def score_batches(self, batches: list[Answers]) -> list[list[float]]:
        """Return the scores of each batch. Raises RewardError, when all of them have ended."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name=f"reward {self.target}", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(self._gather(batches), self._loop)
        try:
            found = future.result(self.timeout_seconds + LATE_SECONDS)
        except TimeoutError:
            self._loop = None  # left behind with its thread; the next call gets another one
            more = "it blocks its event loop (await what waits, or make it a plain def) and goes on running"
            failure = _timed_out(self.target, self.timeout_seconds, batches[0], more)
            return [self.failures.bear(failure, len(batch)) for batch in batches]
        for scores in found:
            if isinstance(scores, BaseException):
                raise scores
        return found

    async def _gather(self, batches: list[Answers]) -> list[Any]:
        deadline = asyncio.get_running_loop().time() + self.timeout_seconds
        return await asyncio.gather(*(self._score(b, deadline) for b in batches), return_exceptions=True)

    async def _score(self, batch: Answers, deadline: float) -> list[float]:
        try:
            async with asyncio.timeout_at(deadline) as limit:
                values = await self.function(batch.prompts, batch.responses, batch.rows)
        except (Exception, SystemExit) as error:
            if limit.expired():
                late = _timed_out(self.target, self.timeout_seconds, batch, "it was cancelled")
                return self.failures.bear(late, len(batch))
            if self.failures.are_borne and len(batch) > 1:
                ones = (self._score(one, deadline) for one in batch.batches(1))
                return join(await asyncio.gather(*ones))
            failure = _raised(self.target, error, batch)
            failure.__cause__ = error
            return self.failures.bear(failure, len(batch))
        return checked_scores(f"function:{self.target}", values, batch, self.failures)

    def close(self) -> None:
        """End the loop and its thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


# ---- a plain function in processes -------------------------------------------------------------------------


@dataclass(eq=False)
class Worker:
    """A process that calls the function, and the batch that it has."""

    process: Any
    connection: Connection
    deadline: float  # on the monotonic clock, for what it does now
    is_ready: bool = False
    batch_index: int | None = None

    @property
    def is_free(self) -> bool:
        """Whether it can be given a batch."""
        return self.is_ready and self.batch_index is None

    def stop(self) -> None:
        """End the process; one that is busy is killed."""
        self.connection.close()  # an idle one ends when it reads this
        self.process.join(WORKER_END_SECONDS if self.is_free else 0)
        self.process.kill()
        self.process.join()


class ProcessCaller:
    """Calls a plain function in processes, which are killed and replaced when they fail or take too long."""

    def __init__(self, target: str, num_processes: int, timeout_seconds: float, failures: Failures) -> None:
        self.target, self.num_processes, self.timeout_seconds = target, num_processes, timeout_seconds
        self.failures = failures
        self._workers: list[Worker] = []
        self._start_missing()  # they get ready while the models load

    def _start_missing(self) -> None:
        while len(self._workers) < self.num_processes:
            ours, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_work, args=(theirs, self.target, self.failures), daemon=True)
            with _hidden_main():
                process.start()
            theirs.close()
            self._workers.append(Worker(process, ours, time.monotonic() + WORKER_START_SECONDS))

    def score_batches(self, batches: list[Answers]) -> list[list[float]]:
        """Return the scores of each batch. Raises RewardError; the next call finds every worker in order."""
        waiting, found = deque(range(len(batches))), {}
        self._workers = [worker for worker in self._workers if worker.process.is_alive()]
        self._start_missing()
        try:
            while len(found) < len(batches):
                for worker in self._workers:
                    if waiting and worker.is_free:
                        worker.batch_index = waiting.popleft()
                        worker.deadline = time.monotonic() + self.timeout_seconds
                        with contextlib.suppress(OSError):  # it is dead, which `_receive` finds out
                            worker.connection.send(batches[worker.batch_index])
                self._receive(batches, found)
        finally:
            if len(found) < len(batches):  # whoever is busy now would answer the next call
                for worker in self._workers:
                    if not worker.is_free:
                        worker.stop()
        return [found[index] for index in range(len(batches))]

    def _receive(self, batches: list[Answers], found: dict[int, list[float]]) -> None:
        """Wait until a worker has something to say or took too long; take what there is."""
        busy = [worker for worker in self._workers if not worker.is_free]
        seconds = min(worker.deadline for worker in busy) - time.monotonic()
        objects = [x for worker in busy for x in (worker.connection, worker.process.sentinel)]
        ready = set(wait(objects, max(seconds, 0.0)))
        for worker in busy:
            if ready & {worker.connection, worker.process.sentinel}:
                self._take(worker, batches, found)
            elif time.monotonic() >= worker.deadline:
                if worker.batch_index is None:
                    raise RewardError(
                        f"reward function:{self.target}: a process was not ready after "
                        f"{WORKER_START_SECONDS:g} s; import less in the function's module"
                    )
                more = "its process was ended"
                failure = _timed_out(self.target, self.timeout_seconds, batches[worker.batch_index], more)
                self._bear(worker, failure, batches, found)

    def _take(self, worker: Worker, batches: list[Answers], found: dict[int, list[float]]) -> None:
        try:
            # A dead worker's pipe may stay open in a process that the function has started.
            kind, value = worker.connection.recv() if worker.connection.poll() else ("dead", None)
        except (EOFError, OSError):
            kind, value = "dead", None
        if kind == "dead":
            return self._bear(worker, self._died(worker, batches), batches, found)
        if kind == "error":
            raise RewardError(value)
        if kind == "ready":
            worker.is_ready = True
            return
        assert worker.batch_index is not None
        scores, first_failure = value
        self.failures.first = self.failures.first or first_failure
        found[worker.batch_index], worker.batch_index = scores, None

    def _bear(
        self, worker: Worker, error: RewardError, batches: list[Answers], found: dict[int, list[float]]
    ) -> None:
        """Replace a process, and let the scores of its batch be those of a failure."""
        if worker.batch_index is None:  # it never was ready, and neither would be the next
            raise error
        found[worker.batch_index] = self.failures.bear(error, len(batches[worker.batch_index]))
        worker.stop()
        self._workers.remove(worker)
        self._start_missing()

    def _died(self, worker: Worker, batches: list[Answers]) -> RewardError:
        worker.process.join(WORKER_END_SECONDS)
        when = "while it started"
        if worker.batch_index is not None:
            batch = batches[worker.batch_index]
            when = f"on a batch of {len(batch)} (first: {batch.shown(0)})"
        return RewardError(
            f"reward function:{self.target}: process {worker.process.pid} died with exit code "
            f"{worker.process.exitcode} {when}; a negative code is a signal, and -9 often means that memory "
            "ran out: lower --reward_processes or --reward_batch_size"
        )

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.stop()
        self._workers = []


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Hide the program from a process that starts: else it would import all that the program imports.

    That is torch, DeepSpeed and transformers for each process: seconds, and some hundred MiB.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _work(connection: Connection, target: str, failures: Failures) -> None:
    """Answer batches until the pipe is closed; the life of a worker."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        try:
            function = import_function(target)
        except ValueError as error:
            connection.send(("error", str(error)))
            return
        connection.send(("ready", None))
        while True:
            batch = connection.recv()
            try:
                failures.first = ""
                scores = call_function(target, function, batch, failures)
                connection.send(("scores", (scores, failures.first)))
            except RewardError as error:
                cause = traceback.format_exception(error.__cause__) if error.__cause__ else []
                connection.send(("error", "\n".join([str(error), *cause])))


def _end_with_parent() -> None:
    """Leave when the program is gone, even killed: a function that hangs would keep this process alive."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
