"""The usual forms of a row, told apart by their columns."""

import math
import re
from collections.abc import Callable, Mapping
from itertools import product
from os.path import commonprefix
from typing import Any, NamedTuple

from common.data.example import ROLES, BadRow, EmptyRow, Example, Message

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
        messages.append(Message("system", preface))
    for turn, following in zip(turns, [*turns[1:], None], strict=True):
        content = text[turn.end() : following.start() if following else len(text)]
        role = "user" if turn[1] == "Human" else "assistant"
        if following is None and role == "user":
            content = _CUE.sub("", content)  # " Human: q Assistant:" on one line
        if following is not None or role == "user" or content.strip():
            messages.append(Message(role, content.strip()))
    return tuple(messages)


def messages_from_prompt(prompt: Any) -> tuple[Message, ...]:
    """Messages of a `prompt` column: a dialogue, a bare question, or a list of role and content.

    Raises:
        BadRow: neither of them, or empty.
    """
    if isinstance(prompt, list | tuple) and prompt:
        return parse_messages("prompt", prompt)
    text = _text("prompt", prompt)
    return parse_dialogue(text) or (Message("user", text),)


def parse_messages(column: str, value: Any) -> tuple[Message, ...]:
    """Messages of a list of {"role", "content"}.

    Raises:
        BadRow: not such a list.
    """
    if not isinstance(value, list | tuple):
        raise BadRow(f"{column!r} is {_kind(value)}, not a list of role and content")
    messages = []
    for i, item in enumerate(value):
        if not isinstance(item, Mapping) or "role" not in item or "content" not in item:
            raise BadRow(f"{column}[{i}] has no 'role' and 'content'")
        if item["role"] not in ROLES:
            raise BadRow(f"{column}[{i}] has role {item['role']!r}; roles are {', '.join(ROLES)}")
        if not isinstance(item["content"], str):
            raise BadRow(f"{column}[{i}]['content'] is {_kind(item['content'])}, not text")
        messages.append(Message(item["role"], item["content"]))
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
    return _text(column, value)


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


def _text(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise BadRow(f"{column!r} is {_kind(value)}, not text")
    if not value.strip():
        raise EmptyRow(f"{column!r} is empty")
    return value


def _kind(value: Any) -> str:
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


def _margin(row: Mapping[str, Any]) -> float:
    return finite_number("margin", row.get("margin") or 0.0)


def _pair(row: Mapping[str, Any]) -> list[Example]:
    return [
        Example(
            prompt=messages_from_prompt(row["prompt"]),
            chosen=reply_text("chosen", row["chosen"]),
            rejected=reply_text("rejected", row["rejected"]),
            margin=_margin(row),
        )
    ]


def _transcripts(row: Mapping[str, Any]) -> list[Example]:
    if isinstance(row["chosen"], list) and isinstance(row["rejected"], list):
        chosen = parse_messages("chosen", row["chosen"])
        reply, other = reply_text("chosen", row["chosen"]), reply_text("rejected", row["rejected"])
        if chosen[:-1] != parse_messages("rejected", row["rejected"])[:-1] or len(chosen) < 2:
            raise BadRow("chosen and rejected do not share the turns before their last one")
        return [Example(prompt=chosen[:-1], chosen=reply, rejected=other, margin=_margin(row))]
    prompt, reply, other = split_transcripts(
        _text("chosen", row["chosen"]), _text("rejected", row["rejected"])
    )
    return [
        Example(
            prompt=messages_from_prompt(prompt),
            chosen=_text("the reply in chosen", reply),
            rejected=_text("the reply in rejected", other),
            margin=_margin(row),
        )
    ]


def _answer_lists(row: Mapping[str, Any]) -> list[Example]:
    prompt = messages_from_prompt(row["prompt"])
    for column in ("pos_answers", "neg_answers"):
        if not isinstance(row[column], list | tuple):
            raise BadRow(f"{column!r} is {_kind(row[column])}, not a list of texts")
        if not row[column]:
            raise EmptyRow(f"{column!r} is empty")
    chosen = [reply_text(f"pos_answers[{i}]", answer) for i, answer in enumerate(row["pos_answers"])]
    rejected = [reply_text(f"neg_answers[{i}]", answer) for i, answer in enumerate(row["neg_answers"])]
    return [Example(prompt=prompt, chosen=a, rejected=b) for a, b in product(chosen, rejected)]


def _prompt_and(answer: str) -> Callable[[Mapping[str, Any]], list[Example]]:
    def to_examples(row: Mapping[str, Any]) -> list[Example]:
        return [Example(prompt=messages_from_prompt(row["prompt"]), chosen=reply_text(answer, row[answer]))]

    return to_examples


def _instruction(row: Mapping[str, Any]) -> list[Example]:
    question = _text("instruction", row["instruction"])
    if row.get("input"):
        question = f"{question}\n\n{_text('input', row['input'])}"
    return [Example(prompt=(Message("user", question),), chosen=reply_text("output", row["output"]))]


def _messages(row: Mapping[str, Any]) -> list[Example]:
    messages = parse_messages("messages", row["messages"])
    if messages[-1].role != "assistant":
        return [Example(prompt=messages)]
    if len(messages) == 1:
        raise BadRow("'messages' holds only the assistant's turn")
    reply = _text("the last of 'messages'", messages[-1].content)
    return [Example(prompt=messages[:-1], chosen=reply, learn_all_turns=True)]


def _prompt_only(row: Mapping[str, Any]) -> list[Example]:
    return [Example(prompt=messages_from_prompt(row["prompt"]))]


def _plain_text(row: Mapping[str, Any]) -> list[Example]:
    return [Example(text=_text("text", row["text"]))]


class RowForm(NamedTuple):
    """Columns, how such a row is read, and the steps it can serve."""

    columns: tuple[str, ...]
    to_examples: Callable[[Mapping[str, Any]], list[Example]]
    stages: tuple[int, ...]


# The first form whose columns are all there is the row's form.
ROW_FORMS = (
    RowForm(("prompt", "chosen", "rejected"), _pair, (1, 2, 3)),
    RowForm(("prompt", "pos_answers", "neg_answers"), _answer_lists, (1, 2, 3)),
    RowForm(("chosen", "rejected"), _transcripts, (1, 2, 3)),
    RowForm(("prompt", "answer"), _prompt_and("answer"), (1, 3)),
    RowForm(("prompt", "response"), _prompt_and("response"), (1, 3)),
    RowForm(("prompt", "chosen"), _prompt_and("chosen"), (1, 3)),
    RowForm(("instruction", "output"), _instruction, (1, 3)),
    RowForm(("messages",), _messages, (1, 3)),
    RowForm(("prompt",), _prompt_only, (3,)),
    RowForm(("text",), _plain_text, (1,)),
)


def form_of(row: Mapping[str, Any]) -> RowForm | None:
    """The form of a row, or None when its columns fit none."""
    present = {column for column, value in row.items() if value is not None}
    return next((form for form in ROW_FORMS if present.issuperset(form.columns)), None)


def accepted_forms(stage: int | None = None) -> str:
    """The column sets that a step can use, for a message."""
    return " | ".join("/".join(form.columns) for form in ROW_FORMS if stage is None or stage in form.stages)


def read_row(row: Mapping[str, Any]) -> list[Example]:
    """Examples of a row of any form.

    Raises:
        BadRow: no form fits, or a column holds the wrong thing.
    """
    form = form_of(row)
    if form is None:
        filled = [repr(column) for column, value in row.items() if value is not None]
        raise BadRow(f"columns {', '.join(filled) or 'none'} fit none of {accepted_forms()}")
    return form.to_examples(row)
