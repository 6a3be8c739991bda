"""Base of rewards that read text: prompts and responses in, one number each out. Does not import torch.

`function_reward`, `classifier_reward`, `http_reward`, `judge_reward` define such rewards; their results pass
through `checked_scores`, so that a wrong count or a NaN is an error at its source and not in a loss.
"""

import math
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from common.flags.problems import is_usable

SHOWN_CHARACTERS = 100  # of a text in a message
Checked = tuple[list[float], str]  # a batch's scores, and their error ("" without one)


class RewardError(Exception):
    """A batch has no scores; the message names the cause and the cure."""


class RaisedError(RewardError):
    """The reward raised an error; other responses of the batch may still have a score."""


@dataclass(frozen=True)
class Answers:
    """Input of a text reward; the lists are parallel."""

    prompts: list[str]  # the prompt's text as the model saw it
    responses: list[str]  # special tokens removed
    rows: list[dict]  # fields of the data set's row, {} if there are none

    def __len__(self) -> int:
        return len(self.prompts)

    def batches(self, batch_size: int) -> Iterator["Answers"]:
        """Yield batches in order, of at most `batch_size`."""
        for first in range(0, len(self), batch_size):
            part = slice(first, first + batch_size)
            yield Answers(self.prompts[part], self.responses[part], self.rows[part])

    def shown(self, index: int) -> str:
        """Prompt and response at an index, quoted, for a message."""
        return f"prompt {quoted(self.prompts[index])}, response {quoted(self.responses[index])}"


class TextReward:
    """Scores responses by their text, a batch at a time; subclasses define `ask`."""

    is_on_device = False  # scored after the reward models, not concurrently

    def __init__(self, name: str, args: Any, *, num_threads: int = 1) -> None:
        """`args` are the flags of step 3; `num_threads` batches are scored concurrently."""
        self.name, self.args = name, args
        self.tolerates_failures = args.reward_on_error != "refuse"
        self.first_failure = ""  # the first tolerated one; the caller clears it
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name) if num_threads > 1 else None

    def ask(self, batch: Answers) -> Checked:
        """Score a batch; see `checked_scores`. Raises RewardError if there are no scores."""
        raise NotImplementedError

    def score(self, answers: Answers) -> list[float]:
        """One finite score per response, NaN for a tolerated failure. Raises RewardError."""
        batches = answers.batches(self.args.reward_batch_size)
        of_batches = self._threads.map(self._score, batches) if self._threads else map(self._score, batches)
        return [score for scores in of_batches for score in scores]

    def _score(self, batch: Answers) -> list[float]:
        try:
            scores, problem = self.ask(batch)
        except RewardError as error:
            if isinstance(error, RaisedError) and self.tolerates_failures and len(batch) > 1:
                return [score for one in batch.batches(1) for score in self._score(one)]
            scores = [math.nan] * len(batch)
            problem = str(error)
        if problem:
            first = f"first: {batch.shown(0)}"
            self.fail(f"reward {self.name}, for a batch of {len(batch)} ({first}): {problem}")
        return scores

    def fail(self, message: str) -> None:
        """Record the first failure if failures are tolerated; otherwise raise RewardError."""
        if not self.tolerates_failures:
            raise RewardError(message)
        self.first_failure = self.first_failure or message

    def close(self) -> None:
        """Close processes, threads and connections."""
        if self._threads:
            self._threads.shutdown(wait=False, cancel_futures=True)


def in_daemon(work: Callable[[], Any], name: str) -> Future[Any]:
    """Future of `work` running in a daemon thread of that name.

    A daemon thread, so that the program can exit while a reward hangs.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised by the future's result()
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def describe_error(error: BaseException) -> str:
    """An exception's class and text, long ones cut in the middle; only the class if its text raises."""
    return cut_middle(traceback.format_exception_only(error)[-1].strip(), 10 * SHOWN_CHARACTERS)


def quoted(text: str) -> str:
    """The text in quotes, a long one without its middle."""
    return repr(cut_middle(text, SHOWN_CHARACTERS))


def cut_middle(text: str, limit: int) -> str:
    """The text; only its first and last characters if it is longer than the limit."""
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-limit // 2 :]}"


def checked_scores(values: Any, answers: Answers) -> Checked:
    """One float per response from the return value of a reward, and a description of its error, "" without
    one.

    `values` is a list, an array or a tensor of one dimension; True and False count as 1 and 0. Values that
    are not finite in fp32 (None, infinity, a text) become NaN; all do if the number of values is wrong.
    """
    if hasattr(values, "tolist"):  # an array or a tensor: one copy, not one per element
        values = values.tolist()
    # A mapping's keys, or a set in its order, could be the right number of meaningless scores.
    is_list = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | Set)
    given = list(values) if is_list else []
    if not is_list or len(given) != len(answers):
        what = f"{len(given)} scores" if is_list else quoted(str(values))
        cure = "return one number for each response, in their order"
        return [math.nan] * len(answers), f"gave {what} for {len(answers)} responses; {cure}"
    scores = [_as_float(value) for value in given]
    bad = next((index for index, score in enumerate(scores) if math.isnan(score)), None)
    if bad is None:
        return scores, ""
    return scores, (
        f"gave {quoted(str(given[bad]))} for response {bad + 1} of {len(answers)}, {answers.shown(bad)}; "
        "every score must be a finite number, so return 0.0 where there is nothing to say"
    )


def _as_float(value: Any) -> float:
    """A score as a float; NaN if it is not a number (a text such as "1.5", a list)."""
    number = None if isinstance(value, str | bytes | bytearray) else read_number(value)
    return math.nan if number is None else number


def read_number(value: Any) -> float | None:
    """A text or another object as a float; None unless it is a finite number in fp32."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if is_usable(number) else None
