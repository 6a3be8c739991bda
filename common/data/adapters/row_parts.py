"""What columns hold: texts, dialogues written in one text, lists of turns, numbers, ranked answers."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from os.path import commonprefix
from typing import Any

from common.data.example import BadRow, EmptyRow, Example, Message, Turn

# Who speaks, by the names that public data sets use.
SPEAKERS = {
    "system": "system",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}
_TURN = re.compile(r"(?:\A\s*|\n\s*)(Human|Assistant):")
_CUE = re.compile(r"(?:\A|\s)Assistant:\s*\Z")
_REPLY_MARK = re.compile(r"(?:\A|\n\s*)Assistant:")


def parse_dialogue(text: str) -> tuple[Message, ...] | None:
    """Messages of a Human:/Assistant: text, less a closing `Assistant:` cue; None when it is no such text."""
    speakers = _TURN.findall(text)
    if "Human" not in speakers:
        return None
    messages = split_marked(text, _TURN, opening_role="system")
    if speakers[-1] == "Human":  # " Human: q Assistant:" on one line
        question = _CUE.sub("", messages[-1].content).strip()
        messages = (*messages[:-1], Turn("user", question))
    return messages


def split_marked(text: str, mark: re.Pattern[str], *, opening_role: str) -> tuple[Message, ...]:
    """Messages of a text with `mark` before each turn, its group 1 naming the speaker.

    What stands before the first mark is of `opening_role`; an empty last turn of the assistant is but a cue.
    """
    marks = list(mark.finditer(text))
    opening = (text[: marks[0].start()] if marks else text).strip()
    messages = [Turn(opening_role, opening)] if opening else []
    for i, here in enumerate(marks):
        end = marks[i + 1].start() if i + 1 < len(marks) else len(text)
        messages.append(Turn(SPEAKERS[here[1].lower()], text[here.end() : end].strip()))
    if messages and messages[-1] == Message("assistant", ""):
        messages.pop()
    return tuple(messages)


def split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Prompt, chosen and rejected reply of two dialogues; the prompt ends at their last common `Assistant:`.

    Raises BadRow: they share none.
    """
    shared = commonprefix([chosen, rejected])
    marks = list(_REPLY_MARK.finditer(shared))
    if not marks:
        raise BadRow("chosen and rejected share no 'Assistant:' at which a prompt could end")
    end = marks[-1].end()
    return chosen[:end], chosen[end:], rejected[end:]


def messages_from_prompt(prompt: Any, column: str = "prompt") -> tuple[Message, ...]:
    """Messages of a prompt: a dialogue, a bare question, or a list of turns.

    Raises BadRow: neither of them, or empty.
    """
    if isinstance(prompt, list | tuple):
        return parse_turns(column, prompt)
    text = filled_text(column, prompt)
    return parse_dialogue(text) or (Message("user", text),)


def parse_turns(column: str, value: Any) -> tuple[Message, ...]:
    """Messages of a list of {"role", "content"}, or of {"from", "value"} as ShareGPT's.

    Raises BadRow: not such a list, or somebody unknown speaks.
    """
    messages = []
    for i, turn in enumerate(filled_list(column, value)):
        if not isinstance(turn, Mapping):
            raise BadRow(f"{column}[{i}] is {kind_of(turn)}, not an object with 'role' and 'content'")
        who, text = ("role", "content") if "role" in turn else ("from", "value")
        if who not in turn or text not in turn:
            raise BadRow(f"{column}[{i}] has no 'role' and 'content', nor 'from' and 'value'")
        role, content = turn[who], turn[text]
        if not isinstance(role, str) or role.lower() not in SPEAKERS:
            raise BadRow(f"{column}[{i}] has role {role!r}; roles are {', '.join(SPEAKERS)}")
        if not isinstance(content, str):
            raise BadRow(f"{column}[{i}][{text!r}] is {kind_of(content)}, not text")
        messages.append(Turn(SPEAKERS[role.lower()], content))
    return tuple(messages)


def reply_text(column: str, value: Any) -> str:
    """The text of a reply, given as text or as turns that end with the assistant's.

    Raises BadRow: neither, or empty.
    """
    if isinstance(value, list | tuple):
        last = parse_turns(column, value)[-1]
        if last.role != "assistant":
            raise BadRow(f"{column} ends with a turn of the {last.role}, not of the assistant")
        value = last.content
    return filled_text(column, value)


def reply_texts(column: str, value: Any) -> list[str]:
    """The replies of a list column. Raises BadRow where one is no reply, EmptyRow where there is none."""
    return [reply_text(f"{column}[{i}]", reply) for i, reply in enumerate(filled_list(column, value))]


def filled_text(column: str, value: Any) -> str:
    """The text in a column. Raises BadRow where it is no text, EmptyRow where it is empty."""
    if not isinstance(value, str):
        raise BadRow(f"{column!r} is {kind_of(value)}, not text")
    if not value.strip():
        raise EmptyRow(f"{column!r} is empty")
    return value


def filled_list(column: str, value: Any) -> list | tuple:
    """The list in a column. Raises BadRow where it is no list, EmptyRow where it is empty."""
    if not isinstance(value, list | tuple):
        raise BadRow(f"{column!r} is {kind_of(value)}, not a list")
    if not value:
        raise EmptyRow(f"{column!r} is empty")
    return value


def member(column: str, value: Any, name: str) -> Any:
    """The value under a name of an object column. Raises BadRow where there is none."""
    if not isinstance(value, Mapping):
        raise BadRow(f"{column!r} is {kind_of(value)}, not an object")
    if name not in value:
        raise BadRow(f"{column!r} has no {name!r}")
    return value[name]


def finite_number(column: str, value: Any) -> float:
    """The number in a column. Raises BadRow where there is none, or none to compute a loss with."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRow(f"{column!r} is {value!r}, not a number") from error
    if not math.isfinite(number):
        raise BadRow(f"{column!r} is {value!r}, not a finite number")
    return number


def kind_of(value: Any) -> str:
    """What a value is, for a message."""
    return "null" if value is None else f"of type {type(value).__name__}"


def rank_by_score(
    prompt: tuple[Message, ...], answers: Sequence[str], scores: Sequence[float], *, with_margin: bool = True
) -> list[Example]:
    """All pairs of the answers to a prompt, higher scores chosen; equal scores are a tie.

    Steps 1 and 3 use the pairs of the best answer alone: what is learnt is the first of the best. A margin is
    the difference of two scores; 0 without `with_margin`, for places in an order have no size.
    """
    if len(answers) == 1:
        return [Example(prompt=prompt, chosen=answers[0], absence=EmptyRow("its prompt has one answer only"))]
    order = sorted(range(len(answers)), key=lambda i: -scores[i])
    return [
        Example(
            prompt=prompt,
            chosen=answers[better],
            rejected=answers[worse],
            margin=finite_number("margin", scores[better] - scores[worse]) if with_margin else 0.0,
            is_tie=scores[better] == scores[worse],
            for_pairs_only=better != order[0],
        )
        for better, worse in combinations(order, 2)
    ]
