"""What columns hold: texts, dialogues written in one text, lists of turns, numbers."""

import math
import re
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any

from common.data.example import ROLES, BadRow, EmptyRow, Message, Turn

_TURN = re.compile(r"(?:\A\s*|\n\s*)(Human|Assistant):")
_CUE = re.compile(r"\sAssistant:\s*\Z")
_REPLY_MARK = re.compile(r"(?:\A|\n\s*)Assistant:")


def parse_dialogue(text: str) -> tuple[Message, ...] | None:
    """Messages of a Human:/Assistant: text, less a closing `Assistant:` cue; None when it is no such text."""
    turns = list(_TURN.finditer(text))
    if not any(turn[1] == "Human" for turn in turns):
        return None
    messages = []
    preface = text[: turns[0].start()].strip()
    if preface:
        messages.append(Turn("system", preface))
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        content = text[turn.end() : following.start() if following else len(text)]
        role = "user" if turn[1] == "Human" else "assistant"
        if following is None and role == "user":
            content = _CUE.sub("", content)  # " Human: q Assistant:" on one line
        if following is not None or role == "user" or content.strip():
            messages.append(Turn(role, content.strip()))
    return tuple(messages)


def messages_from_prompt(prompt: Any) -> tuple[Message, ...]:
    """Messages of a `prompt` column: a dialogue, a bare question, or a list of role and content.

    Raises:
        BadRow: neither of them, or empty.
    """
    if isinstance(prompt, list | tuple) and prompt:
        return parse_messages("prompt", prompt)
    text = filled_text("prompt", prompt)
    return parse_dialogue(text) or (Message("user", text),)


def parse_messages(column: str, value: Any) -> tuple[Message, ...]:
    """Messages of a list of {"role", "content"}.

    Raises:
        BadRow: not such a list.
    """
    if not isinstance(value, list | tuple):
        raise BadRow(f"{column!r} is {kind_of(value)}, not a list of role and content")
    messages = []
    for i, item in enumerate(value):
        if not isinstance(item, Mapping) or "role" not in item or "content" not in item:
            raise BadRow(f"{column}[{i}] has no 'role' and 'content'")
        if item["role"] not in ROLES:
            raise BadRow(f"{column}[{i}] has role {item['role']!r}; roles are {', '.join(ROLES)}")
        if not isinstance(item["content"], str):
            raise BadRow(f"{column}[{i}]['content'] is {kind_of(item['content'])}, not text")
        messages.append(Turn(item["role"], item["content"]))
    if not messages:
        raise EmptyRow(f"{column!r} is empty")
    return tuple(messages)


def reply_text(column: str, value: Any) -> str:
    """The text of a reply, given as text or as messages that end with the assistant's.

    Raises:
        BadRow: neither, or empty.
    """
    if isinstance(value, list | tuple) and value:
        last = parse_messages(column, value)[-1]
        if last.role != "assistant":
            raise BadRow(f"{column} ends with a turn of the {last.role}, not of the assistant")
        value = last.content
    return filled_text(column, value)


def split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Prompt, chosen and rejected reply of two dialogues; the prompt ends at their last common `Assistant:`.

    Raises:
        BadRow: they share none.
    """
    shared = commonprefix([chosen, rejected])
    marks = list(_REPLY_MARK.finditer(shared))
    if not marks:
        raise BadRow("chosen and rejected share no 'Assistant:' at which a prompt could end")
    end = marks[-1].end()
    return chosen[:end], chosen[end:], rejected[end:]


def filled_text(column: str, value: Any) -> str:
    """The text in a column.

    Raises:
        BadRow: it is no text, or empty.
    """
    if not isinstance(value, str):
        raise BadRow(f"{column!r} is {kind_of(value)}, not text")
    if not value.strip():
        raise EmptyRow(f"{column!r} is empty")
    return value


def kind_of(value: Any) -> str:
    """What a value is, for a message."""
    return "null" if value is None else f"of type {type(value).__name__}"


def finite_number(column: str, value: Any) -> float:
    """The number in a column.

    Raises:
        BadRow: there is none, or none that a loss can be computed with.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadRow(f"{column!r} is {value!r}, not a number") from error
    if not math.isfinite(number):
        raise BadRow(f"{column!r} is {value!r}, not a finite number")
    return number


# Who speaks, by the names that public data sets use.
SPEAKERS = {
    "system": "system",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}


def parse_turns(column: str, value: Any) -> tuple[Message, ...]:
    """Messages of a list of {"from", "value"} as ShareGPT's, or of {"role", "content"}.

    Raises:
        BadRow: not such a list, or somebody unknown speaks.
    """
    if not isinstance(value, list | tuple):
        raise BadRow(f"{column!r} is {kind_of(value)}, not a list of turns with 'from' and 'value'")
    messages = []
    for i, turn in enumerate(value):
        if not isinstance(turn, Mapping) or not ({"from", "value"} <= turn.keys() or "role" in turn):
            raise BadRow(f"{column}[{i}] has no 'from' and 'value'")
        who, text = ("from", "value") if "from" in turn else ("role", "content")
        speaker = turn[who]
        if not isinstance(speaker, str) or speaker.lower() not in SPEAKERS:
            raise BadRow(f"{column}[{i}] is from {speaker!r}; known are {', '.join(SPEAKERS)}")
        if not isinstance(turn.get(text), str):
            raise BadRow(f"{column}[{i}][{text!r}] is {kind_of(turn.get(text))}, not text")
        messages.append(Turn(SPEAKERS[speaker.lower()], turn[text]))
    if not messages:
        raise EmptyRow(f"{column!r} is empty")
    return tuple(messages)


def split_marked(text: str, mark: re.Pattern[str], *, opening_role: str) -> tuple[Message, ...]:
    """Messages of a text with `mark` before each turn, its group 1 naming the speaker.

    What stands before the first mark is of `opening_role`; an empty last turn of the assistant is but a cue.
    """
    marks = list(mark.finditer(text))
    opening = (text[: marks[0].start()] if marks else text).strip()
    messages = [Turn(opening_role, opening)] if opening else []
    for i, here in enumerate(marks):
        end = marks[i + 1].start() if i + 1 < len(marks) else len(text)
        content = text[here.end() : end].strip()
        messages.append(Turn(SPEAKERS[here[1].lower()], content.removesuffix("</s>").rstrip()))
    if messages and messages[-1] == Message("assistant", ""):
        messages.pop()
    return tuple(messages)


def first_item(column: str, value: Any) -> Any:
    """The first item of a list column; None where the list is empty or null.

    Raises:
        BadRow: it is no list.
    """
    if value is not None and (not isinstance(value, Sequence) or isinstance(value, str | bytes)):
        raise BadRow(f"{column!r} is {kind_of(value)}, not a list")
    return value[0] if value else None


def member(column: str, value: Any, name: str) -> Any:
    """The value under a name of an object column.

    Raises:
        BadRow: it is no object, or has no such name.
    """
    if not isinstance(value, Mapping):
        raise BadRow(f"{column!r} is {kind_of(value)}, not an object")
    if name not in value:
        raise BadRow(f"{column!r} has no {name!r}")
    return value[name]
