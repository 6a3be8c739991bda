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
import inspect
import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired, ProcessPool

from common.data.plugins import get_from, import_own_module
from step3_ppo.rewards.text_rewards import Answers, Failures, RewardError, checked_scores, join

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
        failures: Failures | None = None,
    ) -> None:
        """Import the function; start the processes. Raises ValueError, see `import_function`."""
        function = import_function(target)
        call = FunctionCall(target, function, timeout_seconds, failures or Failures())
        self.batch_size = batch_size
        self._caller: ThreadCaller | LoopCaller | ProcessCaller
        if is_async(function):
            self._caller = LoopCaller(call)
        elif num_processes:
            self._caller = ProcessCaller(call, num_processes)
        else:
            self._caller = ThreadCaller(call)

    def score(self, answers: Answers) -> list[float]:
        """See `TextReward.score`; the function gets at most `batch_size` responses at a time."""
        return join(self._caller.score_batches(list(answers.batches(self.batch_size))))

    def close(self) -> None:
        """See `TextReward.close`."""
        self._caller.close()


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


class FunctionCall:
    """What is called, how long it may take, and what becomes of a batch that fails."""

    def __init__(
        self, target: str, function: Callable[..., Any], timeout_seconds: float, failures: Failures
    ) -> None:
        self.target, self.function = target, function
        self.timeout_seconds, self.failures = timeout_seconds, failures

    def __call__(self, batch: Answers) -> list[float]:
        """Return the scores that a plain function gives a batch. Raises RewardError.

        Where failures are borne, the answers of a batch that raised are tried one by one.
        """
        try:
            values = self.function(batch.prompts, batch.responses, batch.rows)
        except (Exception, SystemExit) as error:
            if self.failures.are_borne and len(batch) > 1:
                return join(self(one) for one in batch.batches(1))
            return self.bear_raised(error, batch)
        return self.check(values, batch)

    def check(self, values: Any, batch: Answers) -> list[float]:
        """Return what the function gave as floats. Raises RewardError: see `checked_scores`."""
        return checked_scores(f"function:{self.target}", values, batch, self.failures)

    def bear_raised(self, error: BaseException, batch: Answers) -> list[float]:
        """Return the scores of a batch for which the function raised. Raises RewardError."""
        failure = RewardError(
            f"reward function:{self.target} raised {type(error).__name__}: {error}, in a batch of "
            f"{len(batch)} (first: {batch.shown(0)}); let it return 0.0 for what it cannot judge"
        )
        failure.__cause__ = error
        return self.failures.bear(failure, len(batch))

    def bear_late(self, batch: Answers, what_became: str) -> list[float]:
        """Return the scores of a batch that took too long. Raises RewardError."""
        failure = RewardError(
            f"reward function:{self.target} took more than --reward_timeout_seconds "
            f"{self.timeout_seconds:g} for a batch of {len(batch)} (first: {batch.shown(0)}); {what_became}; "
            "raise the limit, or lower --reward_batch_size"
        )
        return self.failures.bear(failure, len(batch))


class ThreadCaller:
    """Calls a plain function for one batch after another, each in a thread that can be left behind."""

    def __init__(self, call: FunctionCall) -> None:
        self.call = call

    def score_batches(self, batches: list[Answers]) -> list[list[float]]:
        """Return the scores of each batch. Raises RewardError."""
        return [self._score(batch) for batch in batches]

    def _score(self, batch: Answers) -> list[float]:
        future: concurrent.futures.Future = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(self.call(batch))
            except BaseException as error:  # handed over, and raised where it is waited for
                future.set_exception(error)

        # A daemon: the program must be able to end while the function hangs.
        threading.Thread(target=run, name=f"reward {self.call.target}", daemon=True).start()
        try:
            return future.result(self.call.timeout_seconds)
        except TimeoutError:
            more = "its thread goes on running; with --reward_processes 1 it would have been ended"
            return self.call.bear_late(batch, more)

    def close(self) -> None:
        """Do nothing: there is no thread between calls."""


class LoopCaller:
    """Awaits an `async def` for all batches at the same time, in one event loop in a thread of its own."""

    def __init__(self, call: FunctionCall) -> None:
        self.call = call
        self._loop: asyncio.AbstractEventLoop | None = None

    def score_batches(self, batches: list[Answers]) -> list[list[float]]:
        """Return the scores of each batch. Raises RewardError, when all of them have ended."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            name = f"reward {self.call.target}"
            threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(self._gather(batches), self._loop)
        try:
            results = future.result(self.call.timeout_seconds + LATE_SECONDS)
        except TimeoutError:
            self._loop = None  # left behind with its thread; the next call gets another one
            more = "it blocks its event loop (await what waits, or make it a plain def) and goes on running"
            return [self.call.bear_late(batch, more) for batch in batches]
        for scores in results:
            if isinstance(scores, BaseException):
                raise scores
        return results

    async def _gather(self, batches: list[Answers]) -> list[Any]:
        deadline = asyncio.get_running_loop().time() + self.call.timeout_seconds
        return await asyncio.gather(*(self._score(b, deadline) for b in batches), return_exceptions=True)

    async def _score(self, batch: Answers, deadline: float) -> list[float]:
        try:
            async with asyncio.timeout_at(deadline) as limit:
                values = await self.call.function(batch.prompts, batch.responses, batch.rows)
        except (Exception, SystemExit) as error:
            if limit.expired():
                return self.call.bear_late(batch, "it was cancelled")
            if self.call.failures.are_borne and len(batch) > 1:
                ones = (self._score(one, deadline) for one in batch.batches(1))
                return join(await asyncio.gather(*ones))
            return self.call.bear_raised(error, batch)
        return self.call.check(values, batch)

    def close(self) -> None:
        """End the loop and its thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


class ProcessCaller:
    """Calls a plain function in processes, which are killed and replaced when they die or take too long."""

    def __init__(self, call: FunctionCall, num_processes: int) -> None:
        self.call, self.num_processes = call, num_processes
        self._pool = self._start_pool()

    def _start_pool(self) -> ProcessPool:
        spawn = multiprocessing.get_context("spawn")  # a fork of a process with CUDA and threads may hang
        pool = ProcessPool(
            self.num_processes, initializer=_begin_worker, initargs=(self.call.target,), context=spawn
        )
        assert pool.active  # its processes start now, and get ready while the models load
        return pool

    def score_batches(self, batches: list[Answers]) -> list[list[float]]:
        """Return the scores of each batch. Raises RewardError."""
        if not self._pool.active:
            self._pool = self._start_pool()
        futures = [
            self._pool.schedule(
                _score_in_worker,
                args=(self.call.target, batch, self.call.failures),
                timeout=self.call.timeout_seconds,
            )
            for batch in batches
        ]
        try:
            return [self._wait(future, batch) for future, batch in zip(futures, batches, strict=True)]
        finally:
            for future in futures:  # after an error: whoever is busy still would keep the next call waiting
                future.cancel()

    def _wait(self, future: concurrent.futures.Future, batch: Answers) -> list[float]:
        try:
            scores, first_failure = future.result()
        except TimeoutError:
            return self.call.bear_late(batch, "its process was ended")
        except ProcessExpired as error:
            died = RewardError(
                f"reward function:{self.call.target}: process {error.pid} died with exit code "
                f"{error.exitcode} on a batch of {len(batch)} (first: {batch.shown(0)}); a negative code is "
                "a signal, and -9 often means that memory ran out: lower --reward_processes or "
                "--reward_batch_size"
            )
            return self.call.failures.bear(died, len(batch))
        except BrokenProcessPool as error:
            raise RewardError(
                f"reward function:{self.call.target}: its processes died while they started or waited; see "
                "what they printed, or lower --reward_processes if memory ran out"
            ) from error
        self.call.failures.first = self.call.failures.first or first_failure
        return scores

    def close(self) -> None:
        """End all processes."""
        self._pool.stop()
        self._pool.join()


def _begin_worker(target: str) -> None:
    """Import the function before the first batch, for which it may take long."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import_function(target)


def _end_with_parent() -> None:
    """Leave when the program is gone, even killed: a function that hangs would keep this process alive."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _score_in_worker(target: str, batch: Answers, failures: Failures) -> tuple[list[float], str]:
    """Return the scores of a batch and the first failure that was borne; the life of a worker."""
    failures.first = ""
    try:
        return FunctionCall(target, import_function(target), 0.0, failures)(batch), failures.first
    except RewardError as error:  # only its text comes to the other side whole
        cause = traceback.format_exception(error.__cause__) if error.__cause__ else []
        raise RewardError("\n".join([str(error), *cause])) from None
