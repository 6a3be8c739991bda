"""What a reward that reads text is: it takes prompts and responses, it gives one number each. No torch here.

`function_reward`, `classifier_reward` and `http_reward` are such rewards; what they give goes through
`checked_scores`, so that a wrong count or a NaN ends the run where it arose and not in a loss.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from common.ranks.failures import StepRefused

SHOWN_CHARACTERS = 100  # of a text in a message


class RewardError(StepRefused):
    """A reward failed: the message names it, what it gave, for which sample, and the cure."""


@dataclass
class Failures:
    """What --reward_on_error makes of answers that a reward gives no score: by default an error.

    `are_borne`: they get the score NaN, which becomes `default`; without one they count nowhere (mask).
    """

    are_borne: bool = False
    default: float | None = None
    first: str = ""  # the message of the first that was borne; who tells it empties it

    @classmethod
    def parse(cls, text: str) -> "Failures":
        """Return what `refuse`, `default:VALUE` or `mask` says. Raises ValueError for anything else."""
        if text in ("refuse", "mask"):
            return cls(are_borne=text == "mask")
        kind, _, value = text.partition(":")
        default = _as_float(value, reads_text=True)
        if kind != "default" or not math.isfinite(default):
            raise ValueError(
                f"--reward_on_error {text}: use refuse, mask, or default:VALUE with a number, as in default:0"
            )
        return cls(are_borne=True, default=default)

    def bear(self, error: RewardError, num_answers: int) -> list[float]:
        """Return the scores of a batch that failed. Raises the error where it is not borne."""
        if not self.are_borne:
            raise error
        self.first = self.first or str(error)
        return [math.nan] * num_answers


REFUSE = Failures()


@dataclass(frozen=True)
class Answers:
    """What a text reward sees; the lists are parallel."""

    prompts: list[str]  # the prompt's text as the model saw it
    responses: list[str]  # special tokens removed
    rows: list[dict] = field(default_factory=list)  # fields of the data set's row, {} where there are none

    def __post_init__(self) -> None:
        if not self.rows:
            object.__setattr__(self, "rows", [{} for _ in self.prompts])
        assert len(self.prompts) == len(self.responses) == len(self.rows)

    def __len__(self) -> int:
        return len(self.prompts)

    def batches(self, batch_size: int) -> Iterator["Answers"]:
        """Yield them in order, at most `batch_size` at a time."""
        for first in range(0, len(self), batch_size):
            part = slice(first, first + batch_size)
            yield Answers(self.prompts[part], self.responses[part], self.rows[part])

    def shown(self, index: int) -> str:
        """Return one of them, shortened, for a message."""
        return f"prompt {shortened(self.prompts[index])}, response {shortened(self.responses[index])}"


class TextReward(Protocol):
    """Scores responses by their text."""

    def score(self, answers: Answers) -> list[float]:
        """Return one finite score for each answer, NaN for one whose failure is borne. Raises RewardError."""
        ...

    def close(self) -> None:
        """End its processes, threads and connections."""
        ...


def shortened(text: str) -> str:
    """Return the text quoted; a long one without its middle."""
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[: SHOWN_CHARACTERS // 2]} ... {text[-SHOWN_CHARACTERS // 2 :]}"
    return repr(text)


def checked_scores(name: str, values: Any, answers: Answers, failures: Failures = REFUSE) -> list[float]:
    """Return what the reward called `name` gave as one finite float for each answer.

    `values` is a list, an array or a tensor of one dimension; True and False count as 1 and 0. Where
    `failures` are borne, what is no finite number is NaN.

    Raises:
        RewardError: it is none of these, of another length, or holds None, NaN, an infinity or no number.
    """
    if hasattr(values, "tolist"):  # an array or a tensor: one copy, not one for each element
        values = values.tolist()
    problem = ""
    # The keys of a mapping and the order of a set would make scores of the right count and no sense.
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping | Set):
        problem = f"{shortened(str(values))} in place of a list of {len(answers)} numbers"
    elif len(values := list(values)) != len(answers):
        problem = f"{len(values)} scores for {len(answers)} responses"
    if problem:
        cure = "return one number for each response, in their order"
        error = RewardError(f"reward {name} gave {problem} (first: {answers.shown(0)}); {cure}")
        return failures.bear(error, len(answers))
    scores = [_as_float(value) for value in values]
    for index, score in enumerate(scores):
        if not math.isfinite(score):
            error = RewardError(
                f"reward {name} gave {shortened(str(values[index]))} for response {index + 1} of "
                f"{len(answers)}: {answers.shown(index)}; every score must be a finite number, so return 0.0 "
                "where there is nothing to say"
            )
            [scores[index]] = failures.bear(error, 1)
    return scores


def _as_float(value: Any, *, reads_text: bool = False) -> float:
    """Return a number as a float, NaN for anything else: "1.5" is a text, and a list no score."""
    if isinstance(value, str | bytes | bytearray) and not reads_text:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def join(batches: Iterable[Iterable[float]]) -> list[float]:
    """Return the scores of batches as one list."""
    return [score for batch in batches for score in batch]
