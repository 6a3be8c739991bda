"""Canonical column names of a row, for all names that public data sets use."""

from collections.abc import Iterable, Mapping
from typing import Any

from common.data.adapters.row_parts import (
    MEDIA,
    expect,
    filled,
    is_blank,
    messages_from_prompt,
    parse_turns,
    quoted,
    spoken,
    unread_keys,
)
from common.data.example import BadRow, EmptyRow, Message

LONGEST_LIST = 8  # columns listed in a message
# Names of each form column in public data sets; the first one present is used.
COLUMN_NAMES = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "instruction", "question", "query", "input", "context"),
    "input": ("input", "context"),
    "system": ("system", "system_prompt"),
    "tools": ("tools", "functions"),
    "chosen": ("chosen", "preferred_output"),
    "rejected": ("rejected", "non_preferred_output"),
    "response": ("answer", "response", "completion", "output"),
    "response_1": ("response_1", "response1"),
    "response_2": ("response_2", "response2"),
    "preference_strength": ("preference_strength", "overall_preference"),
    "answers": ("answers", "completions"),
    "label": ("label", "kto_tag"),
}
_TASKS = ("instruction", "question", "query")  # bare instruction; `input` may follow it
BEFORE_THE_REPLY = ("prompt", "input", "system", "history", "tools")
# Ignoring one of these columns would change what is learned; other unread columns are only counted.
NEVER_LEFT_OUT = dict.fromkeys(MEDIA, "only text is learnt; leave the column out where text is enough")
NEVER_LEFT_OUT |= dict.fromkeys(
    ("system", "system_prompt", "history", "tools", "functions"),
    "it cannot be combined with the row's other columns; remove one of them",
)


class Row(dict[str, Any]):
    """A row without nulls, read by canonical names; it records the columns that were read."""

    def __init__(self, raw: Mapping[str, Any], own_names: Mapping[str, str] | None = None) -> None:
        """`own_names` are those of --columns, or paths such as "answers.0.text". Raises BadRow if one is
        missing.
        """
        if isinstance(raw.get("input"), Mapping):  # OpenAI's preference format: the dialogue and its tools
            raw = {name: value for name, value in raw.items() if name != "input"} | raw["input"]
        self._joins_input = "input" in (own_names or {})  # after any prompt, not only after an instruction
        # A row joined from rows of one response each has `responses` instead of `response`.
        self._names = {
            name: own
            for name, own in (own_names or {}).items()
            if name != "response" or "responses" not in raw or own in raw
        }
        raw = dict(raw) | {own: _value_at(raw, own, name) for name, own in self._names.items()}
        super().__init__({name: value for name, value in raw.items() if value is not None})
        # Exception for a row that fits no form: a null in a column of --columns makes the row empty, not bad.
        self.lacks = BadRow if self.keys() >= {*self._names.values()} else EmptyRow
        for name, names in COLUMN_NAMES.items():
            free = self.keys() - self._names.values()
            if name == "prompt" and "messages" in self:  # other names hold metadata of the dialogue
                names = ("prompt", "instruction")
            self._names.setdefault(name, next((n for n in names if n in free), name))
        if self.own("response") == "output" and "instruction" in self.keys() - self._names.values():
            self._names |= {} if "prompt" in (own_names or {}) else {"prompt": "instruction"}  # Alpaca format
        self._read = {"id"}  # identifies the row

    def own(self, name: str) -> str:
        """The row's own name for a column."""
        return self._names.get(name, name)

    def __getitem__(self, name: str) -> Any:
        self._read |= {self.own(name), self.own(name).partition(".")[0]}
        return super().__getitem__(self.own(name))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self._names.get(name, name))

    def is_filled(self, name: str) -> bool:
        """Whether a column is present and not blank."""
        return name in self and not is_blank(self[name])

    def items_of(self, column: str) -> dict[str, Any]:
        """Items of a list, by position: `responses[0]`, ... Raises EmptyRow for an empty list."""
        name = self.own(column)
        return {f"{name}[{i}]": item for i, item in enumerate(filled(name, self[column], list))}

    def prompt(self, column: str = "prompt") -> tuple[Message, ...]:
        """The dialogue or the question in a column, after the system message and the history."""
        return self.with_context(self.asked(column))

    def asked(self, column: str = "prompt") -> tuple[Message, ...]:
        """The dialogue or the question alone."""
        name = self.own(column)
        value = self[column]
        tasks = [task for task in _TASKS if task in self.keys()]
        if not (name in tasks or self._joins_input) or not isinstance(value, str):
            return parse_turns(name, value) if column == "messages" else messages_from_prompt(value, name)
        if len(tasks) > 1:
            raise BadRow(f"the row has {listed(tasks)}; name the one to ask, such as --columns prompt={name}")
        question = filled(name, value)
        if self.is_filled("input"):
            question = f"{question}\n\n{filled(self.own('input'), self['input'])}"
        return (Message("user", question),)

    def with_context(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Messages after those of the columns `system` and `history`."""
        if self.is_filled("history"):
            messages = (*parse_turns("history", _turns_of_history(self["history"])), *messages)
        if not self.is_filled("system"):
            return messages
        system = Message("system", filled(self.own("system"), self["system"]))
        has_own = messages[0].role == "system"
        if has_own and spoken(messages[:1]) != spoken([system]):
            raise BadRow(f"{self.own('system')!r} differs from the system message of the turns; leave one")
        return messages if has_own else (system, *messages)

    def unread(self) -> set[str]:
        """Columns and keys that were not read, as text for the report. Raises BadRow if one matters."""
        rest = self.keys() - self._read
        for name in NEVER_LEFT_OUT:
            if name in rest and self.is_filled(name):
                raise BadRow(f"column {name!r} cannot be used: {NEVER_LEFT_OUT[name]}")
        keys = (unread_keys(self.get(name)) for name in self._read)
        return {f"column {quoted(name)}" for name in rest}.union(*keys)


def _value_at(raw: Mapping[str, Any], path: str, name: str) -> Any:
    """The value of a column, or at a path of keys and positions; null if a list is too short."""
    value = raw
    for part in [path] if path in raw else path.split("."):
        if isinstance(value, list | tuple) and part.isdecimal():
            value = next(iter(value[int(part) :]), None)
        elif isinstance(value, Mapping) and part in value:
            value = value[part]
        elif value is not None:
            raise BadRow(f"the row has no {quoted(path)}, which should hold its `{name}`")
    return value


def _turns_of_history(value: Any) -> list[Any]:
    """Earlier turns: LLaMA-Factory's list of [question, answer], or a list of turns."""
    turns = []
    for i, item in enumerate(filled("history", value, list)):
        if isinstance(item, list | tuple) and len(item) == 2:
            turns += [
                {"role": role, "content": text}
                for role, text in zip(("user", "assistant"), item, strict=True)
            ]
        else:
            turns.append(expect(f"history[{i}]", item, Mapping, "a question with its answer or a turn"))
    return turns


def listed(names: Iterable[str]) -> str:
    """Names of columns as a phrase."""
    *first, last = [quoted(name) for name in names][:LONGEST_LIST] or ["nulls alone"]
    return f"{', '.join(first)} and {last}" if first else last
