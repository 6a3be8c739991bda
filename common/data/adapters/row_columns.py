"""A row by the names that the forms have for its columns, whatever public data sets call them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.data.adapters.row_parts import (
    MEDIA,
    filled_list,
    filled_text,
    is_blank,
    messages_from_prompt,
    parse_reply,
    parse_turns,
    quoted,
    spoken,
    unread_keys,
)
from common.data.example import BadRow, Message

LONGEST_LIST = 8  # columns that a message names
# What the forms call a column: the names that public data sets have for it, the first that is there counts.
COLUMN_NAMES = {
    "messages": ("messages", "conversations", "conversation"),
    "prompt": ("prompt", "instruction", "question", "query", "context"),
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
_TASKS = ("instruction", "question", "query")  # a bare request, with which `input` goes
BEFORE_THE_REPLY = ("prompt", "input", "system", "history", "tools")
# Nothing that is learnt is right without them; any other column that is not read is counted.
NEVER_LEFT_OUT = dict.fromkeys(MEDIA, "only text is learnt; leave the column out where text is enough")
NEVER_LEFT_OUT |= dict.fromkeys(
    ("system", "system_prompt", "history", "tools", "functions"),
    "nothing reads it beside the row's other columns; leave one of them out",
)
_WITH_KEYS = (
    "messages",
    "prompt",
    "history",
    "response",
    "answers",
    "chosen",
    "rejected",
    "responses",
)  # of turns


class Row(dict[str, Any]):
    """A row less its nulls, asked by the names of the forms, which remembers the columns that were read."""

    def __init__(self, raw: Mapping[str, Any], own_names: Mapping[str, str] | None = None) -> None:
        """`own_names` are those of --columns. Raises BadRow: the row lacks one of them."""
        if isinstance(raw.get("input"), Mapping):  # OpenAI's preferences: the dialogue and its tools
            raw = {name: value for name, value in raw.items() if name != "input"} | raw["input"]
        super().__init__({name: value for name, value in raw.items() if value is not None})
        self._names = dict(own_names or {})
        for name, own in self._names.items():
            if own not in raw:
                raise BadRow(f"the row has no {quoted(own)}, which --columns {name}={own} names")
        for name, names in COLUMN_NAMES.items():
            free = self.keys() - self._names.values()
            if name == "prompt" and "messages" in self:  # other names are notes on the dialogue
                names = ("prompt", "instruction")
            self._names.setdefault(name, next((n for n in names if n in free), name))
        if self.own("response") == "output" and "instruction" in self.keys() - self._names.values():
            self._names |= {} if "prompt" in (own_names or {}) else {"prompt": "instruction"}  # Alpaca's
        self._read = {"id"}  # it names the row

    def own(self, name: str) -> str:
        """What the row itself calls a column."""
        return self._names.get(name, name)

    def __getitem__(self, name: str) -> Any:
        self._read.add(self.own(name))
        return super().__getitem__(self.own(name))

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self._names.get(name, name))

    def is_filled(self, name: str) -> bool:
        """Whether there is something in a column that may be left out."""
        return name in self and not is_blank(self[name])

    def prompt(self, column: str = "prompt") -> tuple[Message, ...]:
        """The dialogue or the question in a column, with what stands before it in others."""
        return self.with_context(self.asked(column))

    def asked(self, column: str = "prompt") -> tuple[Message, ...]:
        """The dialogue or the question alone."""
        name = self.own(column)
        value = self[column]
        if column == "messages":
            return parse_turns(name, value)
        tasks = [task for task in _TASKS if task in self.keys()]
        if name not in tasks or not isinstance(value, str):
            return messages_from_prompt(value, name)
        if len(tasks) > 1:
            raise BadRow(f"the row has {listed(tasks)}; name the one to ask, such as --columns prompt={name}")
        question = filled_text(name, value)
        if self.is_filled("input"):
            question = f"{question}\n\n{filled_text(self.own('input'), self['input'])}"
        return (Message("user", question),)

    def with_context(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Messages behind those of the columns `system` and `history`."""
        if self.is_filled("history"):
            messages = (*_history(self["history"]), *messages)
        if not self.is_filled("system"):
            return messages
        system = Message("system", filled_text(self.own("system"), self["system"]))
        if messages[0].role != "system":
            return (system, *messages)
        if spoken(messages[:1]) != spoken([system]):
            raise BadRow(f"{self.own('system')!r} differs from the system message of the turns; leave one")
        return messages

    def reply(self, name: str, prompt: Sequence[Message]) -> str | Message:
        """The reply in a column."""
        return parse_reply(self.own(name), self[name], prompt)

    def unread(self) -> set[str]:
        """Columns and keys that were not read, as the report names them. Raises BadRow: one matters."""
        rest = self.keys() - self._read
        for name in NEVER_LEFT_OUT:
            if name in rest and self.is_filled(name):
                raise BadRow(f"column {name!r} cannot be used: {NEVER_LEFT_OUT[name]}")
        keys = [unread_keys(self[self.own(name)]) for name in _WITH_KEYS if self.own(name) in self._read]
        return {f"column {quoted(name)}" for name in rest}.union(*keys)


def _history(value: Any) -> tuple[Message, ...]:
    """Earlier turns: LLaMA-Factory's list of [question, answer], or a list of turns."""
    turns = []
    for i, item in enumerate(filled_list("history", value)):
        if isinstance(item, list | tuple) and len(item) == 2:
            turns += [{"role": role, "content": item[role == "assistant"]} for role in ("user", "assistant")]
        elif isinstance(item, Mapping):
            turns.append(item)
        else:
            raise BadRow(f"history[{i}] is neither a question with its answer nor a turn")
    return parse_turns("history", turns)


def listed(names: Iterable[str]) -> str:
    """Names of columns in a sentence."""
    *first, last = [quoted(name) for name in names][:LONGEST_LIST] or ["nothing but nulls"]
    return f"{', '.join(first)} and {last}" if first else last
