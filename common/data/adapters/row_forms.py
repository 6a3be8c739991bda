"""The usual forms of a row, told apart by their columns; scored responses to one prompt become one row, and
so do the messages of a tree: no part of a conversation is trained on while another is held out.

Several ranked answers become pairs: each with every one below it (InstructGPT).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from common.data.adapters.row_parts import (
    SPEAKERS,
    filled_list,
    filled_text,
    finite_number,
    kind_of,
    messages_from_prompt,
    parse_turns,
    rank_by_score,
    reply_text,
    reply_texts,
    split_marked,
    split_transcripts,
)
from common.data.example import BadRow, EmptyRow, Example, Message, Turn
from common.data.raw_rows import RawRows, canonical, group_rows, readable

TREE = "(messages of a tree)"  # the column of a row that the messages of one tree were put together in
MESSAGE_COLUMNS = ("message_id", "parent_id", "text", "role")
_MESSAGE_KEPT = (*MESSAGE_COLUMNS, "rank", "deleted", "review_result", "lang")
SCORED = "(scored responses)"  # the column of a row that answers of one prompt were put together in

_SIDES = ("chosen", "rejected")
_ANSWER_NAMES = ("answer", "response", "text", "content")
_SCORE_NAMES = ("rank", "score", "overall_score")
# HelpSteer2 writes earlier turns into its prompt, each behind such a mark.
_HELPSTEER_TURN = re.compile(r"<extra_id_1>(User|Assistant)\n")
# What a label may be, in lower case, and whether it is a thumb up.
_THUMBS = dict.fromkeys(("true", "1", "1.0", "up", "thumbs_up", "👍"), True)
_THUMBS |= dict.fromkeys(("false", "0", "0.0", "-1", "-1.0", "down", "thumbs_down", "👎"), False)
Row = Mapping[str, Any]

# ---- pairs


def _pair(row: Row) -> list[Example]:
    """`chosen` and `rejected` are replies to `prompt`, or bring the turns before them along, as two lists of
    messages or, without a `prompt`, two dialogues. Lists must hold the `prompt`, where there is one.
    """
    answers = [row[name] for name in _SIDES]
    prompt = () if row.get("prompt") is None else messages_from_prompt(row["prompt"])
    if all(isinstance(answer, list | tuple) for answer in answers):
        turns, others = (parse_turns(*side)[:-1] for side in zip(_SIDES, answers, strict=True))
        if turns != others:
            raise BadRow("chosen and rejected do not share the turns before their last one")
        told, said = ([(m.role, m.content.strip()) for m in messages] for messages in (prompt, turns))
        if turns and not any(said[i : i + len(told)] == told for i in range(len(said))):
            raise BadRow("the turns before the reply in chosen do not hold 'prompt'")
        prompt = turns or prompt
        if not prompt:
            raise BadRow("there is no turn before the reply in chosen, and no 'prompt'")
    elif not prompt:
        texts = (filled_text(*side) for side in zip(_SIDES, answers, strict=True))
        shared, *answers = split_transcripts(*texts)
        prompt = messages_from_prompt(shared)
    return _pair_after(prompt, row, *answers)


def _conversation_pair(row: Row) -> list[Example]:
    """`chosen` and `rejected` are texts, or turns that follow the conversation, each alone or in a list."""
    prompt = parse_turns("conversations", row["conversations"])
    turns = (row[name] if isinstance(row[name], str | list | tuple) else [row[name]] for name in _SIDES)
    return _pair_after(prompt, row, *turns)


def _pair_after(prompt: tuple[Message, ...], row: Row, chosen: Any, rejected: Any) -> list[Example]:
    """A pair; it is a tie where the scores that UltraFeedback's pairs bring along prefer neither answer."""
    scores = [row.get(name) for name in ("score_chosen", "score_rejected")]
    pair = Example(
        prompt=prompt,
        chosen=reply_text("chosen", chosen),
        rejected=reply_text("rejected", rejected),
        margin=finite_number("margin", row.get("margin") or 0.0),
        is_tie=None not in scores and scores[0] == scores[1],
    )
    return [pair]


def _answer_lists(row: Row) -> list[Example]:
    prompt = messages_from_prompt(row["prompt"])
    chosen, rejected = (reply_texts(name, row[name]) for name in ("pos_answers", "neg_answers"))
    return [Example(prompt=prompt, chosen=a, rejected=b) for a, b in product(chosen, rejected)]


# ---- ranked answers


def _best_first(row: Row) -> list[Example]:
    answers = reply_texts("ranked_answers", row["ranked_answers"])
    scores = [-float(i) for i in range(len(answers))]
    return rank_by_score(messages_from_prompt(row["prompt"]), answers, scores, with_margin=False)


def _numbered_responses(column: str, row: Row) -> list[Example]:
    """prompt, responses, and `scores` (the higher the better) or `ranks` (the lower the better)."""
    prompt = messages_from_prompt(row["prompt"])
    answers = reply_texts("responses", row["responses"])
    values = filled_list(column, row[column])
    if len(values) != len(answers):
        raise BadRow(f"{column!r} has {len(values)} numbers for {len(answers)} responses")
    numbers = [finite_number(f"{column}[{i}]", value) for i, value in enumerate(values)]
    if column == "ranks":
        return rank_by_score(prompt, answers, [-number for number in numbers], with_margin=False)
    return rank_by_score(prompt, answers, numbers)


def _has_ranked_objects(row: Row) -> bool:
    """Whether `answers` holds objects with a rank or a score; else it is what a reward compares with."""
    answers = row["answers"]
    if not isinstance(answers, list | tuple) or not answers:
        return False
    return all(isinstance(item, Mapping) and ("rank" in item or "score" in item) for item in answers)


def _ranked_objects(prompt_column: str, column: str, row: Row) -> list[Example]:
    """Objects of a text and a rank (lower is better) or a score, as Nectar's and UltraFeedback's."""
    if prompt_column == "prompt":
        prompt = messages_from_prompt(row["prompt"])
    else:
        prompt = (Message("user", filled_text(prompt_column, row[prompt_column])),)
    answers, scores, names = [], [], []
    for i, item in enumerate(filled_list(column, row[column])):
        text_name = _first_of(f"{column}[{i}]", item, _ANSWER_NAMES)
        score_name = _first_of(f"{column}[{i}]", item, _SCORE_NAMES)
        answers.append(reply_text(f"{column}[{i}].{text_name}", item[text_name]))
        number = finite_number(f"{column}[{i}].{score_name}", item[score_name])
        names.append(score_name)
        if (score_name == "rank") != (names[0] == "rank"):
            raise BadRow(f"{column}[{i}] has {score_name!r}, unlike the answers before it")
        scores.append(-number if score_name == "rank" else number)
    return rank_by_score(prompt, answers, scores, with_margin="rank" not in names)


def _first_of(where: str, item: Any, names: Sequence[str]) -> str:
    """The first of `names` that an object has."""
    if not isinstance(item, Mapping):
        raise BadRow(f"{where} is {kind_of(item)}, not an object")
    found = next((name for name in names if name in item), None)
    if found is None:
        raise BadRow(f"{where} has none of {', '.join(names)}")
    return found


def _two_responses(context: str, first: str, second: str, preference: str, row: Row) -> list[Example]:
    """HelpSteer's preferences, by the columns: below 0 the first response is better, 0 is a tie."""
    prompt = _helpsteer_prompt(row[context], context)
    number = finite_number(preference, row[preference])
    return rank_by_score(prompt, [reply_text(name, row[name]) for name in (first, second)], [0.0, number])


def group_scored(rows: RawRows, score_column: str) -> RawRows:
    """One row for each prompt of prompt/response rows, with all its responses and their `score_column`."""
    columns = ("prompt", "response", score_column)

    def build(group: list[dict[str, Any]]) -> dict[str, Any]:
        return {SCORED: [{name: row[name] for name in columns if name in row} for row in group]}

    keys = {index: canonical(row["prompt"]) for index, row in readable(rows) if "prompt" in row}
    return group_rows(rows, keys, build)


def scored_responses(row: Row, score_column: str) -> list[Example]:
    """A row that `group_scored` made; HelpSteer2's are of this kind."""
    group = row[SCORED]
    for scored in group:
        missing = [name for name in ("prompt", "response", score_column) if name not in scored]
        if missing:
            cure = "; --score_column names another" if score_column in missing else ""
            raise BadRow(f"no column {', '.join(map(repr, missing))}{cure}")
    answers = [reply_text("response", scored["response"]) for scored in group]
    scores = [finite_number(score_column, scored[score_column]) for scored in group]
    return rank_by_score(_helpsteer_prompt(group[0]["prompt"], "prompt"), answers, scores)


def _helpsteer_prompt(prompt: Any, column: str) -> tuple[Message, ...]:
    if isinstance(prompt, str) and _HELPSTEER_TURN.search(prompt):
        return split_marked(prompt, _HELPSTEER_TURN, opening_role="user")
    return messages_from_prompt(prompt, column)


# ---- message trees as OpenAssistant's: every message names its parent, and siblings are ranked by people


def group_trees(rows: RawRows) -> RawRows:
    """One row {TREE: [messages]} for each tree; a message that leads to no first one, alone."""
    parents: dict[Any, Any] = {}
    names: dict[int, Any] = {}
    for index, row in readable(rows):
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


# ---- one answer, or none


def _prompt_and(answer: str, row: Row) -> list[Example]:
    return [Example(prompt=messages_from_prompt(row["prompt"]), chosen=reply_text(answer, row[answer]))]


def _has_thumb(row: Row) -> bool:
    return str(row["label"]).lower() in _THUMBS


def _rated(answer: str, row: Row) -> list[Example]:
    prompt, text = messages_from_prompt(row["prompt"]), reply_text(answer, row[answer])
    if _THUMBS[str(row["label"]).lower()]:
        return [Example(prompt=prompt, chosen=text, is_rated=True)]
    return [Example(prompt=prompt, rejected=text, is_rated=True, absence=EmptyRow("its label is false"))]


def _instruction(row: Row) -> list[Example]:
    question = filled_text("instruction", row["instruction"])
    if row.get("input"):
        question = f"{question}\n\n{filled_text('input', row['input'])}"
    return [Example(prompt=(Message("user", question),), chosen=reply_text("output", row["output"]))]


def _dialogue(column: str, row: Row) -> list[Example]:
    """All that the assistant says is learnt; what the user says after its last turn is left out, of
    `messages` the whole row serves as a prompt then.
    """
    messages = parse_turns(column, row[column])
    ends = [i + 1 for i, message in enumerate(messages) if message.role == "assistant"]
    if not ends or (column == "messages" and ends[-1] < len(messages)):
        return [Example(prompt=messages)]
    *prompt, reply = messages[: ends[-1]]
    if not prompt:
        raise BadRow(f"{column!r} begins with its only turn of the assistant")
    text = filled_text(f"the last reply of {column}", reply.content)
    return [Example(prompt=tuple(prompt), chosen=text, learn_all_turns=True)]


class RowForm(NamedTuple):
    """Columns, how such a row is read, the steps it can serve, and what else tells the form."""

    columns: tuple[str, ...]
    to_examples: Callable[[Row], list[Example]]
    stages: tuple[int, ...] = (1, 2, 3)
    fits: Callable[[Row], bool] | None = None


_HELPSTEER3 = ("context", "response1", "response2", "overall_preference")
_HELPSTEER2 = ("prompt", "response_1", "response_2", "preference_strength")
# The first form whose columns are all there is the row's form.
ROW_FORMS = (
    RowForm(("prompt", *_SIDES), _pair),
    RowForm(("prompt", "pos_answers", "neg_answers"), _answer_lists),
    RowForm(("prompt", "ranked_answers"), _best_first),
    RowForm(("prompt", "responses", "scores"), partial(_numbered_responses, "scores")),
    RowForm(("prompt", "responses", "ranks"), partial(_numbered_responses, "ranks")),
    RowForm(("prompt", "answers"), partial(_ranked_objects, "prompt", "answers"), fits=_has_ranked_objects),
    RowForm(("instruction", "completions"), partial(_ranked_objects, "instruction", "completions")),
    RowForm(_HELPSTEER3, partial(_two_responses, *_HELPSTEER3)),
    RowForm(_HELPSTEER2, partial(_two_responses, *_HELPSTEER2)),
    RowForm(("conversations", *_SIDES), _conversation_pair),
    RowForm(_SIDES, _pair),
    RowForm(
        ("message_id", "text", "role"),
        lambda row: tree_examples({TREE: [row]}),
        fits=lambda row: "parent_id" in row,
    ),
    # Any other label is something for a reward.
    RowForm(("prompt", "completion", "label"), partial(_rated, "completion"), fits=_has_thumb),
    RowForm(("prompt", "response", "label"), partial(_rated, "response"), fits=_has_thumb),
    RowForm(("prompt", "answer"), partial(_prompt_and, "answer"), (1, 3)),
    RowForm(("prompt", "response"), partial(_prompt_and, "response"), (1, 3)),
    RowForm(("prompt", "chosen"), partial(_prompt_and, "chosen"), (1, 3)),
    RowForm(("instruction", "output"), _instruction, (1, 3)),
    RowForm(("messages",), partial(_dialogue, "messages"), (1, 3)),
    RowForm(("conversations",), partial(_dialogue, "conversations"), (1, 3)),
    RowForm(("prompt",), lambda row: [Example(prompt=messages_from_prompt(row["prompt"]))], (3,)),
    RowForm(("text",), lambda row: [Example(text=filled_text("text", row["text"]))], (1,)),
)


def accepted_forms(stage: int | None = None, *, is_unpaired: bool = False) -> str:
    """The column sets that a step can use, for a message; see `missing_for`."""
    forms = [form.columns for form in ROW_FORMS if stage is None or stage in form.stages]
    return " | ".join("/".join(f) for f in forms if stage != 2 or is_unpaired or "label" not in f)


def read_row(row: Row) -> list[Example]:
    """Examples of a row of any form. Raises BadRow: no form fits, or a column holds the wrong thing."""
    present = {column for column, value in row.items() if value is not None}
    for form in ROW_FORMS:
        if present.issuperset(form.columns) and (form.fits is None or form.fits(row)):
            return form.to_examples(row)
    filled = ", ".join(repr(column) for column in row if column in present) or "none"
    raise BadRow(f"columns {filled} fit none of {accepted_forms()}")
