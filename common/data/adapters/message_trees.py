"""Message trees as OpenAssistant's: every message names its parent, and siblings are ranked by people. The
messages of a tree become one row.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from common.data.adapters.row_parts import (
    SPEAKERS,
    filled_text,
    finite_number,
    kind_of,
    quoted,
    rank_by_score,
)
from common.data.example import BadRow, EmptyRow, Example, Message, Turn
from common.data.raw_rows import RawRows, group_rows, readable

TREE = "(messages of a tree)"  # the column of a row that the messages of one tree were put together in
MESSAGE_COLUMNS = ("message_id", "parent_id", "text", "role")
_MESSAGE_KEPT = (*MESSAGE_COLUMNS, "rank", "deleted", "review_result", "lang")


def group_trees(rows: RawRows, unread: Counter[str]) -> RawRows:
    """One row {TREE: [messages]} for each tree; a message that leads to no first one, alone.

    Columns that are left behind are counted in `unread`.
    """
    parents: dict[Any, Any] = {}
    names: dict[int, Any] = {}
    for index, row in readable(rows):
        kept = {"id", *_MESSAGE_KEPT}
        unread.update(
            f"joined column {quoted(name)}" for name in row if row[name] is not None and name not in kept
        )
        name, parent = row.get("message_id"), _parent_of(row)
        if isinstance(name, str | int) and (parent is None or isinstance(parent, str | int)):
            names[index] = name
            parents[name] = parent
    roots = _roots(parents)
    keys = {index: roots[name] for index, name in names.items()}

    def build(tree: list[dict[str, Any]]) -> dict[str, Any]:
        return {TREE: [{name: m[name] for name in _MESSAGE_KEPT if name in m} for m in tree]}

    return group_rows(rows, keys, build)


def _roots(parents: Mapping[Any, Any]) -> dict[Any, Any]:
    """The topmost ancestor that is there, of every message; for a ring of messages, one of them."""
    roots: dict[Any, Any] = {}
    for name in parents:
        path: dict[Any, None] = {}  # in order, and quick to look into
        here = name
        while here not in roots and here not in path:
            path[here] = None
            if parents[here] not in parents:  # null, or not in the data
                break
            here = parents[here]
        roots.update(dict.fromkeys(path, roots.get(here, here)))
    return roots


def _parent_of(message: Mapping[str, Any]) -> Any:
    """The id of the message before; None for the first one. CSV has no null but an empty text."""
    parent = message.get("parent_id")
    return None if parent == "" else parent


def tree_examples(row: Mapping[str, Any]) -> list[Example]:
    """Every turn of the prompter with the replies to it: the best one to learn, and all pairs of ranked ones.

    Deleted messages and those that reviewers refused are left out with all below them. A turn that nobody
    answered is a prompt. Raises BadRow: the messages are no tree of turns by turns.
    """
    replies = _replies_by_parent(row[TREE])
    examples: list[Example] = []
    waiting = [(root, ()) for root in reversed(replies.get(None, []))]
    while waiting:
        turn, context = waiting.pop()
        prompt = (*context, _message(turn, "prompter"))
        answers = replies.get(turn["message_id"], [])
        texts = [_message(answer, "assistant").content for answer in answers]
        examples += _answered(prompt, texts, [answer.get("rank") for answer in answers])
        for answer, text in zip(reversed(answers), reversed(texts), strict=True):
            following = (*prompt, Turn("assistant", text))
            waiting += [(below, following) for below in reversed(replies.get(answer["message_id"], []))]
    if not examples:
        raise EmptyRow("all messages of the tree were deleted or refused")
    return examples


def _answered(prompt: tuple[Message, ...], texts: Sequence[str], ranks: Sequence[Any]) -> Iterator[Example]:
    ranked = [
        (text, -finite_number("rank", rank))
        for text, rank in zip(texts, ranks, strict=True)
        if rank not in (None, "")
    ]
    if not texts:
        yield Example(prompt=prompt, absence=EmptyRow("nobody answered the turn"))
    elif len(ranked) > 1:
        yield from rank_by_score(prompt, *zip(*ranked, strict=True), with_margin=False)
    else:
        for text in [text for text, _ in ranked] or texts:
            yield Example(prompt=prompt, chosen=text, absence=EmptyRow("no two replies to it are ranked"))


def _replies_by_parent(messages: Sequence[Mapping[str, Any]]) -> dict[Any, list[Mapping[str, Any]]]:
    """Messages that were kept, by the id of their parent; None for the first one."""
    names: set[Any] = set()
    for message in messages:
        missing = [column for column in MESSAGE_COLUMNS if column not in message]
        if missing:
            raise BadRow(f"no column {', '.join(map(repr, missing))} in a message of the tree")
        if not isinstance(message["message_id"], str | int):
            raise BadRow(f"'message_id' is {kind_of(message['message_id'])}, not text")
        if message["message_id"] in names:
            raise BadRow(f"message {message['message_id']!r} stands there twice")
        names.add(message["message_id"])
    by_parent: dict[Any, list[Mapping[str, Any]]] = {}
    for message in messages:
        parent = _parent_of(message)
        if parent is not None and (not isinstance(parent, str | int) or parent not in names):
            raise BadRow(f"message {message['message_id']!r}: its parent {parent!r} is not in the data")
        # Neither deleted nor refused. CSV has words for true and false.
        is_deleted, was_accepted = (str(message.get(name)).lower() for name in ("deleted", "review_result"))
        if is_deleted != "true" and was_accepted != "false":
            by_parent.setdefault(parent, []).append(message)
    if all(_parent_of(message) is not None for message in messages):
        raise BadRow(f"message {messages[0]['message_id']!r}: its parents lead to no first message")
    return by_parent


def _message(message: Mapping[str, Any], role: str) -> Message:
    """The turn of a message, whose role must be `role`: turns alternate in a tree."""
    name = message["message_id"]
    if message["role"] != role:
        raise BadRow(f"message {name!r} has role {message['role']!r}; prompter and assistant take turns")
    return Turn(SPEAKERS[role], filled_text(f"text of message {name}", message["text"]))
