"""Messages and Examples: the meaning of a row of data, whatever its source."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

ROLES = ("system", "user", "assistant", "tool")
# Reasons why a row cannot be used in a step.
MISSING = {
    1: "there is no answer to learn",
    2: "there is no pair of a chosen and a rejected answer; step 1 can use it by --sft_only_data_path",
    3: "there is no prompt",
}
LONGEST_REASON = 400  # characters; values of rows in a message may be arbitrarily long


class BadRow(ValueError):
    """A row of a wrong form; the text is the reason, without the location."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} ...")


class EmptyRow(BadRow):
    """A row of the right form without content; counted separately, never a reason to stop."""


class RewritesPast(BadRow):
    """A conversation whose earlier turns a chat template renders differently once another follows."""


class Message(NamedTuple):
    """One turn of a dialogue."""

    role: str  # one of ROLES
    content: str
    extras: str = ""  # JSON object of further keys for a chat template, such as tool_calls
    is_learned: bool = True  # False: an assistant turn that is only context

    def as_dict(self) -> dict[str, Any]:
        """Role, content and extras, as chat templates, rows and servers represent them."""
        extras = json.loads(self.extras) if self.extras else {}
        return {"role": self.role, "content": self.content} | extras

    @classmethod
    def from_dict(cls, turn: Mapping[str, Any]) -> Self:
        """The message of a dict that `as_dict` made."""
        extras = {name: value for name, value in turn.items() if name not in ("role", "content")}
        return cls(turn["role"], turn["content"], json.dumps(dict(sorted(extras.items()))) if extras else "")


class Turn(Message):
    """A message that its row marks as a turn of a dialogue, by `Human:` or by a role; not a bare prompt."""

    __slots__ = ()


@dataclass(frozen=True)
class Example:
    """A dialogue up to the reply, with the known replies; or a plain text.

    A reply is its text, or a Message if it has more than text.
    """

    prompt: tuple[Message, ...] = ()
    chosen: str | Message | None = None
    rejected: str | Message | None = None
    tools: str = ""  # JSON list of available tools, for a chat template
    text: str | None = None  # a pretraining row: no prompt, no reply
    margin: float = 0.0  # how much better `chosen` is, for a loss with a margin
    is_tie: bool = False  # equally rated replies: usable in steps 1 and 3, not a pair for step 2
    learn_all_turns: bool = False  # step 1 also learns the earlier assistant turns
    for_pairs_only: bool = False  # not the best answer of its prompt: used by step 2 only
    is_rated: bool = False  # a single answer, rated good (`chosen`) or bad (`rejected`)
    absence: BadRow | None = None  # reason for a missing reply; EmptyRow if the data set leaves it out


def one_for_each_reply(example: Example) -> list[Example]:
    """Examples with one reply to learn each: the learned turns of a conversation, in order."""
    turns = [i for i, m in enumerate(example.prompt) if m.role == "assistant" and m.is_learned]
    earlier = [replace(example, prompt=example.prompt[:i], chosen=example.prompt[i]) for i in turns]
    return [replace(part, learn_all_turns=False) for part in (*earlier, example)]


def missing_for(stage: int, example: Example, *, is_unpaired: bool = False) -> BadRow | None:
    """The exception that says why an Example cannot be used in step 1, 2 or 3; None if it can.

    `is_unpaired`: step 2 accepts rated answers too, as --loss kto does.
    """
    if stage == 2 and example.is_rated:
        return None if is_unpaired else BadRow("an answer with a label is not a pair; use --loss kto")
    is_worse = stage != 2 and example.for_pairs_only
    serves = {
        1: example.chosen or example.text,
        2: example.chosen and example.rejected,
        3: example.prompt,
    }
    if serves[stage] and not is_worse:
        return None
    reason = "there is a better answer" if is_worse else MISSING[stage]
    if example.absence is None:
        return BadRow(reason)
    return type(example.absence)(f"{reason} ({example.absence})")
