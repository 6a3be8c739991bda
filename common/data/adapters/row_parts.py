"""Column values: texts, dialogues in one text, lists of turns, tools, numbers, ranked responses.

A null counts as an absent key, at any depth.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from os.path import commonprefix
from typing import Any

import numpy as np

from common.data.example import BadRow, EmptyRow, Example, Message, Turn

# Role of a turn, by its name in public data sets.
SPEAKERS = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "ipython"), "tool"),
}
# Keys of a turn, with their names in public data sets.
_TURN_NAMES = {
    "role": ("role", "from"),
    "content": ("content", "value"),
    "reasoning_content": ("reasoning_content", "reasoning", "thinking", "thought"),
    "tool_calls": ("tool_calls", "function_call"),
    "name": ("name",),
    "tool_call_id": ("tool_call_id",),
}
# Keys that mark whether step 1 learns an assistant turn: OpenAI, Mistral and LLaMA-Factory; Axolotl;
# ms-swift; others. Torchtune's `masked` has the opposite meaning.
_MARKS = ("weight", "loss_weight", "train", "training", "loss", "trainable", "learn", "loss_mask", "masked")
_TURN_KEYS = {name for names in _TURN_NAMES.values() for name in names}
MEDIA = ("images", "image", "audio", "audios", "video", "videos")
# Unsupported keys of a turn that would change what is learned, each with its cure.
_REFUSED_KEYS = {
    **dict.fromkeys(MEDIA, "only text is learnt"),
    **dict.fromkeys(("mask", "train_detail", "training_detail"), "`weight` 0 makes a whole turn context"),
    **dict.fromkeys(("tools", "functions"), "give them in a column `tools`"),
}
_TEXT_PARTS = ("text", "input_text", "output_text")
TRUTHS = {"true": True, "1": True, "false": False, "0": False}
ANSWER_NAMES = ("answer", "response", "text", "content")
SCORE_NAMES = ("rank", "score", "overall_score")
LONGEST_NAME = 64  # characters shown of a column's name
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?\s*", re.ASCII | re.IGNORECASE)
_COLUMN_KINDS = {str: (str, "text"), list: (list | tuple, "a list")}
_GREATEST = float(np.finfo(np.float32).max)
_TURN = re.compile(r"(?:\A\s*|\n\s*)(Human|Assistant):")
_HELPSTEER_TURN = re.compile(r"<extra_id_1>(User|Assistant)\n")
_CUE = re.compile(r"(?:\A|\s)Assistant:\s*\Z")
LEADING_CUE = re.compile(r"\A\s*Assistant:")
_REPLY_MARK = re.compile(r"(?:\A|\n\s*)Assistant:")


def parse_dialogue(text: str) -> tuple[Message, ...] | None:
    """Messages of a Human:/Assistant: text without its last `Assistant:`; None for any other text.

    In HelpSteer2's texts a turn starts with <extra_id_1>, except for the first one, which is the user's.
    """
    if _HELPSTEER_TURN.search(text):
        return split_marked(text, _HELPSTEER_TURN, opening_role="user")
    speakers = _TURN.findall(text)
    if "Human" not in speakers:
        return None
    if speakers[-1] == "Human":  # " Human: q Assistant:" on one line
        text = _CUE.sub("", text)
    return split_marked(text, _TURN, opening_role="system")


def split_marked(text: str, mark: re.Pattern[str], *, opening_role: str) -> tuple[Message, ...]:
    """Messages of a text with `mark` before each turn, its group 1 naming the speaker.

    The text before the first mark has `opening_role`; an empty last turn of the assistant is left out.
    """
    marks = list(mark.finditer(text))
    opening = (text[: marks[0].start()] if marks else text).strip()
    messages = [Turn(opening_role, opening)] if opening else []
    ends = [here.start() for here in marks[1:]] + [len(text)]
    for here, end in zip(marks, ends, strict=False):
        messages.append(Turn(SPEAKERS[here[1].lower()], text[here.end() : end].strip()))
    if messages and messages[-1] == Message("assistant", ""):
        messages.pop()
    return tuple(messages)


def split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Prompt, chosen and rejected reply of two dialogues; the prompt ends at their last common `Assistant:`.

    Raises BadRow if they have none in common.
    """
    shared = commonprefix([chosen, rejected])
    marks = list(_REPLY_MARK.finditer(shared))
    if not marks:
        raise BadRow("chosen and rejected share no 'Assistant:' at which a prompt could end")
    end = marks[-1].end()
    return chosen[:end], chosen[end:], rejected[end:]


def messages_from_prompt(prompt: Any, column: str = "prompt") -> tuple[Message, ...]:
    """Messages of a prompt: a dialogue, a bare question, or a list of turns. Raises BadRow for another
    value.
    """
    if isinstance(prompt, list | tuple):
        return parse_turns(column, prompt)
    text = filled(column, prompt)
    messages = parse_dialogue(text) or (Message("user", text),)
    for message in messages:
        check_filled(f"a turn of {column!r}", message)
    return messages


def check_filled(where: str, message: Message) -> None:
    """Raise EmptyRow if a turn of the user or the assistant has no text and no tool call."""
    is_empty = is_blank(message.content) and '"tool_calls"' not in message.extras
    if message.role in ("user", "assistant") and is_empty:
        raise EmptyRow(
            f"{where} is empty: the turn of the {message.role} has no text in 'content' or 'value'"
        )


def parse_turns(column: str, value: Any) -> tuple[Message, ...]:
    """Messages of a list of {"role", "content"}, or of {"from", "value"} as in ShareGPT.

    Raises BadRow for another value or an unknown role; EmptyRow for a turn without text.
    """
    return tuple(_parse_turn(f"{column}[{i}]", turn) for i, turn in enumerate(filled(column, value, list)))


def _parse_turn(where: str, turn: Any) -> Turn:
    expect(where, turn, Mapping, "an object with 'role' and 'content'")
    parts = {key: _only_value(where, turn, names) for key, names in _TURN_NAMES.items()}
    speaker, content, calls = (parts.pop(key) for key in ("role", "content", "tool_calls"))
    role = SPEAKERS.get(str(speaker).lower())
    if role is None:
        raise BadRow(f"{where} has {speaker!r} in 'role' or 'from'; roles are {', '.join(SPEAKERS)}")
    for name, cure in _REFUSED_KEYS.items():
        if not is_blank(turn.get(name)):
            raise BadRow(f"{where} has {name!r}, which cannot be used in a turn; {cure}")
    for name, text in parts.items():
        expect(f"{where}: {name}", text or "", str, "text")
    if speaker == "function_call":  # ShareGPT format
        calls = content
        content = None
    if not is_blank(calls):
        named = parse_functions(f"{where}: tool_calls", calls)
        parts["tool_calls"] = [_parse_call(where, call) for call in named]
    extras = {name: part for name, part in sorted(parts.items()) if not is_blank(part)}
    message = Turn(
        role,
        _content_text(where, content),
        json.dumps(extras) if extras else "",
        role != "assistant" or _is_learned(where, turn),
    )
    check_filled(where, message)
    return message


def _only_value(where: str, turn: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The value under any of several names, None without one. Raises BadRow if two values differ."""
    values = {name: turn[name] for name in names if turn.get(name) is not None}
    first = next(iter(values.values()), None)
    if any(value != first for value in values.values()):
        raise BadRow(f"{where} has {' and '.join(map(repr, values))}, which differ; leave one")
    return first


def _content_text(where: str, content: Any) -> str:
    """A text, or a list of text parts. Raises BadRow for another kind of part."""
    if isinstance(content, str | None):
        return content or ""
    texts = []
    for part in expect(f"{where}['content']", content, list | tuple, "text"):
        part = {"text": part} if isinstance(part, str) else expect(f"{where}: a part", part, Mapping, "text")
        kind = part.get("type", "text")
        text = part.get("text") if kind in _TEXT_PARTS else None
        if not isinstance(text, str) or not _is_learned(where, part):
            raise BadRow(f"{where}['content'] has a part {kind!r} that is not text; give text only")
        texts.append(text)
    return "".join(texts)


def _is_learned(where: str, turn: Mapping[str, Any]) -> bool:
    """Whether the marks of a turn let step 1 learn it. Raises BadRow if a mark is neither true nor false."""
    marks = {name: is_true(f"{where}[{name!r}]", turn[name]) for name in _MARKS if turn.get(name) is not None}
    return all(is_marked != (name == "masked") for name, is_marked in marks.items())


def parse_functions(where: str, value: Any) -> list[dict[str, Any]]:
    """Tools, or tool calls, in OpenAI's form: each {"type": "function", "function": {"name", ...}}.

    `value` is a list, one item, or the JSON text of either. Raises BadRow for another value.
    """
    value = without_nulls(from_json(where, value))
    result = []
    for item in [value] if isinstance(value, Mapping) else filled(where, value, list):
        item = item if isinstance(item, Mapping) and "function" in item else {"function": item}
        if not isinstance(item["function"], Mapping) or not isinstance(item["function"].get("name"), str):
            raise BadRow(f"{where!r} has an item without the name of a function")
        result.append(item if "type" in item else {"type": "function"} | item)
    return result


def _parse_call(where: str, call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object."""
    given = from_json(f"{where}: arguments", call["function"].get("arguments") or {})
    expect(f"{where}: arguments of a tool call", given, Mapping, "an object")
    return call | {"function": {**call["function"], "arguments": given}}


def from_json(where: str, value: Any) -> Any:
    """The value of a JSON text; any other value unchanged. Raises BadRow if the text is not JSON."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise BadRow(f"{where}: the text is not JSON ({error})") from error


def without_nulls(value: Any) -> Any:
    """A value without keys that hold null: a table stores nulls for keys that only other rows have."""
    if isinstance(value, Mapping):
        return {name: without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def unread_keys(value: Any) -> set[str]:
    """Keys of turns or answers that are not read, as text for the report."""
    unread: set[str] = set()
    for item in value if isinstance(value, list | tuple) else [value]:
        item = item if isinstance(item, Mapping) else {}
        keys = {key for key, inner in item.items() if inner is not None}
        role = SPEAKERS.get(str(item.get("role") or item.get("from")).lower())
        known = (
            {*_TURN_KEYS, *(_MARKS if role == "assistant" else ())} if role else {*ANSWER_NAMES, *SCORE_NAMES}
        )
        if keys & known:
            owner = "turns" if role else "answers"
            unread |= {f"key {quoted(key)} of {owner}" for key in keys - known}
    return unread


def quoted(name: Any) -> str:
    """The name of a column or key, for a message."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(name)[:LONGEST_NAME])
    return f"`{shown}`"


def parse_reply(column: str, value: Any, prompt: Sequence[Message] = ()) -> str | Message:
    """A reply as a turn of the assistant, or as turns that end with it after `prompt`; given as text or
    turns.

    Raises BadRow for another value, a reply that is context, or turns before it that are not the prompt's.
    """
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        return filled(column, value)
    *before, last = parse_turns(column, value)
    check_end(column, last)
    if not last.is_learned:
        raise BadRow(
            f"{column}: the reply is marked as context, so there is nothing to learn; leave the row out"
        )
    if before and spoken(before) != spoken(prompt):
        raise BadRow(f"{column} has turns before the reply that are not the prompt's")
    return reply_of(last)


def check_end(column: str, last: Message) -> None:
    """Raise BadRow unless the last turn is the assistant's."""
    if last.role != "assistant":
        raise BadRow(f"{column} ends with a turn of the {last.role}, not of the assistant")


def reply_of(message: Message) -> str | Message:
    """A reply as an Example holds it: its text, or the message if it has more, such as outer white space."""
    has_more = bool(message.extras) or message.content != message.content.strip()
    return message if has_more else message.content


def spoken(messages: Sequence[Message]) -> list[tuple[str, str]]:
    """Roles and texts of turns, for comparing dialogues."""
    return [(message.role, message.content.strip()) for message in messages]


def is_blank(value: Any) -> bool:
    """Whether a value is null, blank text, an empty list or an empty object."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, list | tuple | Mapping) and not value)


def check_encodable(text: str) -> None:
    """Raise BadRow if a text cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"the text has half of a surrogate pair at character {error.start}") from error


def filled(column: str, value: Any, kind: type = str) -> Any:
    """The text or list in a column. Raises BadRow for another type; EmptyRow if it is empty."""
    if is_blank(expect(repr(column), value, *_COLUMN_KINDS[kind])):
        raise EmptyRow(f"{column!r} is empty")
    return value


def finite_number(column: str, value: Any) -> float:
    """The number in a column, also if it is text. Raises BadRow unless it is a number that fp32 can hold."""
    text = str(value)
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not abs(number) <= _GREATEST:
        raise BadRow(f"{column!r} is {value!r}, not a number of 32 bits")
    return number


def truth_of(value: Any, words: Mapping[str, bool]) -> bool | None:
    """The truth value of a value by `words`, whose keys are lower case or integers; None if it has none."""
    text = str(value)
    if _NUMBER.fullmatch(text):
        return words.get(f"{float(text) + 0.0:g}")  # + 0.0 makes -0 a 0
    return words.get(re.sub(r"\b[\s_-]+\b", "_", text.strip().lower()))


def is_true(where: str, value: Any) -> bool:
    """Whether a value is 1 or true. Raises BadRow unless it is one of 0, 1, false and true."""
    answer = truth_of(value, TRUTHS)
    if answer is None:
        raise BadRow(f"{where} is {value!r}, neither 1 (true) nor 0 (false)")
    return answer


def expect(where: str, value: Any, kind: Any, words: str) -> Any:
    """The value. Raises BadRow unless it is of type `kind`; `words` name that type."""
    if not isinstance(value, kind):
        kind_of_value = "null" if value is None else f"of type {type(value).__name__}"
        raise BadRow(f"{where} is {kind_of_value}, not {words}")
    return value


def rank_by_score(
    prompt: tuple[Message, ...],
    answers: Sequence[str | Message],
    scores: Sequence[float],
    *,
    with_margin: bool = True,
) -> list[Example]:
    """All pairs of the answers to a prompt, higher scores chosen; equal scores are a tie.

    Steps 1 and 3 use the pairs of the best answer only (the first, if several are best). A margin is the
    difference of two scores; 0 without `with_margin`: ranks have no distance.
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
