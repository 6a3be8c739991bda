"""Message trees such as OpenAssistant's: each message names its parent, and replies are ranked. The messages
of a tree become one row.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from common.data.adapters.row_parts import SPEAKERS, expect, filled, finite_number, quoted, rank_by_score
from common.data.example import BadRow, EmptyRow, Example, Message, Turn
from common.data.raw_rows import RawRows, group_rows, readable

TREE = "(messages of a tree)"  # only column of a row joined from the messages of a tree
MESSAGE_COLUMNS = ("message_id", "parent_id", "text", "role")
_MESSAGE_KEPT = (*MESSAGE_COLUMNS, "rank", "deleted", "review_result", "lang", "id")


def group_trees(rows: RawRows, unread: Counter[str]) -> RawRows:
    """One row {TREE: [messages]} per tree. Unread columns are counted in `unread`."""
    parents: dict[Any, Any] = {}
    names: dict[int, Any] = {}
    for index, row in readable(rows):
        unread.update(
            f"joined column {quoted(name)}"
            for name in row
            if row[name] is not None and name not in _MESSAGE_KEPT
        )
        name = row.get("message_id")
        parent = _parent_of(row)
        if isinstance(name, str | int) and isinstance(parent, str | int | None):
            names[index] = name
            parents[name] = parent
    roots = _roots(parents)

    def build(tree: list[dict[str, Any]]) -> dict[str, Any]:
        return {TREE: [{name: m[name] for name in _MESSAGE_KEPT if name in m} for m in tree]}

    return group_rows(rows, {index: roots[name] for index, name in names.items()}, build)


def _roots(parents: Mapping[Any, Any]) -> dict[Any, Any]:
    """The first ancestor in the data of every message; for a cycle of messages, one of them."""
    roots: dict[Any, Any] = {}
    for name in parents:
        path = set()
        here = name
        while here not in roots and here not in path:
            path.add(here)
            here = parents[here] if parents[here] in parents else here
        roots.update(dict.fromkeys(path, roots.get(here, here)))
    return roots


def _parent_of(message: Mapping[str, Any]) -> Any:
    """The id of the parent; None for the first message. CSV has an empty text instead of null."""
    parent = message.get("parent_id")
    return None if parent == "" else parent


def tree_examples(row: Mapping[str, Any]) -> list[Example]:
    """Each turn of the prompter with its replies: the best reply to learn, and all pairs of ranked replies.

    Deleted messages and those that reviewers rejected are left out with everything below them. A turn without
    a reply is a prompt. Raises BadRow if the messages are not a tree of alternating turns.
    """
    replies = _replies_by_parent(row[TREE])
    examples: list[Example] = []
    waiting = [(root, ()) for root in reversed(replies[None])]
    while waiting:
        message, context = waiting.pop()
        prompt = (*context, _turn(message, "prompter"))
        answers = [(answer, _turn(answer, "assistant")) for answer in replies[message["message_id"]]]
        examples += _answered(prompt, answers)
        for answer, reply in reversed(answers):
            waiting += [(below, (*prompt, reply)) for below in reversed(replies[answer["message_id"]])]
    if not examples:
        raise EmptyRow("all messages of the tree were deleted or rejected")
    return examples


def _answered(
    prompt: tuple[Message, ...], answers: Sequence[tuple[Mapping[str, Any], Turn]]
) -> list[Example]:
    """Examples of a prompt and the messages that reply to it, with their turns."""
    ranked = [
        (turn.content, -finite_number("rank", message["rank"]))
        for message, turn in answers
        if message.get("rank") not in (None, "")
    ]
    if ranked:
        return rank_by_score(prompt, *zip(*ranked, strict=True), with_margin=False)
    if not answers:
        return [Example(prompt, absence=EmptyRow("the turn has no reply"))]
    absence = EmptyRow("the replies are not ranked")
    return [Example(prompt, turn.content, absence=absence) for _, turn in answers]


def _replies_by_parent(messages: Sequence[Mapping[str, Any]]) -> dict[Any, list[Mapping[str, Any]]]:
    """Messages that were neither deleted nor rejected, by the id of their parent; None for the first one."""
    names = Counter(expect("message_id", m.get("message_id"), str | int, "text") for m in messages)
    name, count = names.most_common(1)[0]
    if count > 1:
        raise BadRow(f"message {name!r} occurs twice")
    by_parent = defaultdict(list)
    for message in messages:
        parent = expect("parent_id", _parent_of(message), str | int | None, "text")
        if parent is not None and parent not in names:
            raise BadRow(f"message {message['message_id']!r}: its parent {parent!r} is not in the data")
        # CSV stores booleans as text.
        is_deleted, was_accepted = (str(message.get(name)).lower() for name in ("deleted", "review_result"))
        if is_deleted != "true" and was_accepted != "false":
            by_parent[parent].append(message)
    if all(_parent_of(message) is not None for message in messages):
        raise BadRow(f"message {messages[0]['message_id']!r}: its parents do not lead to a first message")
    return by_parent


def _turn(message: Mapping[str, Any], role: str) -> Turn:
    """The turn of a message, whose role must be `role`: roles alternate."""
    name = message["message_id"]
    if message.get("role") != role:
        raise BadRow(f"message {name!r} has role {message.get('role')!r}; prompter and assistant take turns")
    return Turn(SPEAKERS[role], filled(f"text of message {name}", message.get("text")))
