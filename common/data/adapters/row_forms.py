"""The usual forms of a row, told apart by their columns; scored responses to one prompt become one row, and
so do the messages of a tree: no part of a conversation is trained on while another is held out.

A row is read by the names of the forms, whatever public data sets call its columns. Several ranked answers
become pairs: each with every one below it (InstructGPT).
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from common.data.adapters.message_trees import TREE, tree_examples
from common.data.adapters.row_columns import BEFORE_THE_REPLY, COLUMN_NAMES, NEVER_LEFT_OUT, Row, listed
from common.data.adapters.row_parts import (
    ANSWER_NAMES,
    SCORE_NAMES,
    TRUTHS,
    expect,
    filled_list,
    filled_text,
    finite_number,
    messages_from_prompt,
    parse_functions,
    parse_replies,
    parse_reply,
    parse_turns,
    quoted,
    rank_by_score,
    reply_of,
    split_marked,
    split_transcripts,
    spoken,
    truth_of,
    without_nulls,
)
from common.data.example import BadRow, EmptyRow, Example, Message
from common.data.raw_rows import RawRows, canonical, group_rows, readable

SCORED = "(scored responses)"  # the column of a row that answers of one prompt were put together in

_SIDES = ("chosen", "rejected")
# HelpSteer2 writes earlier turns into its prompt, each behind such a mark.
_HELPSTEER_TURN = re.compile(r"<extra_id_1>(User|Assistant)\n")
# What a label may be besides true and false.
_GOOD = ("yes", "y", "good", "up", "upvote", "like", "thumbs_up", "positive", "desirable", "correct", "👍")
_BAD = ("no", "n", "bad", "down", "downvote", "dislike", "thumbs_down", "negative", "undesirable")
_LABELS = TRUTHS | dict.fromkeys(_GOOD, True) | dict.fromkeys((*_BAD, "incorrect", "-1", "👎"), False)

# ---- pairs


def _pair(row: Row) -> list[Example]:
    """`chosen` and `rejected` are replies to the prompt, or bring the turns before them along, as two lists
    of messages or, without a prompt, two dialogues. Lists must hold the prompt, where there is one. A pair is
    a tie where the scores that UltraFeedback's pairs bring along prefer neither answer.
    """
    answers = [row[name] for name in _SIDES]
    prompt = next((row.asked(name) for name in ("prompt", "messages") if name in row), ())
    if all(isinstance(answer, list | tuple) for answer in answers):
        turns, others = (parse_turns(row.own(name), row[name])[:-1] for name in _SIDES)
        if turns != others:
            raise BadRow("chosen and rejected do not share the turns before their last one")
        asked = spoken(prompt)
        whole = spoken(turns)
        if turns and not any(whole[i : i + len(asked)] == asked for i in range(len(whole))):
            raise BadRow("the turns before the reply in chosen do not hold 'prompt'")
        prompt = turns or prompt
        answers = [answer[-1:] for answer in answers]
        if not prompt:
            raise BadRow("there is no turn before the reply in chosen, and no 'prompt'")
    elif not prompt:
        if not all(isinstance(answer, str) and "Assistant:" in answer for answer in answers):
            raise BadRow(f"the row has {listed(map(row.own, _SIDES))}, but no `prompt` that they answer")
        texts = (filled_text(*side) for side in zip(_SIDES, answers, strict=True))
        shared, *answers = split_transcripts(*texts)
        prompt = messages_from_prompt(shared)
    prompt = row.with_context(prompt)
    chosen, rejected = (
        parse_reply(row.own(name), answer, prompt) for name, answer in zip(_SIDES, answers, strict=True)
    )
    pair = Example(prompt, chosen, rejected, margin=_margin(row), is_tie=_is_tie(row))
    return [pair]


def _margin(row: Row) -> float:
    margin = finite_number("margin", row["margin"]) if "margin" in row else 0.0
    if margin < 0:
        raise BadRow(f"'margin' is {margin:g}: the rejected answer would be the better one; exchange the two")
    return margin


def _is_tie(row: Row) -> bool:
    names = ("score_chosen", "score_rejected")
    scores = [finite_number(name, row[name]) for name in names if name in row]
    if len(scores) == 2 and scores[0] < scores[1]:
        raise BadRow(
            f"'score_chosen' {scores[0]:g} is below 'score_rejected' {scores[1]:g}; exchange the two"
        )
    return len(scores) == 2 and scores[0] == scores[1]


def _answer_lists(row: Row) -> list[Example]:
    prompt = row.prompt()
    chosen, rejected = (parse_replies(name, row[name], prompt) for name in ("pos_answers", "neg_answers"))
    return [Example(prompt=prompt, chosen=a, rejected=b) for a, b in product(chosen, rejected)]


# ---- ranked answers


def _best_first(row: Row) -> list[Example]:
    prompt = row.prompt()
    answers = parse_replies("ranked_answers", row["ranked_answers"], prompt)
    return rank_by_score(prompt, answers, [-float(i) for i in range(len(answers))], with_margin=False)


def _numbered_responses(column: str, row: Row) -> list[Example]:
    """prompt, responses, and `scores` (the higher the better) or `ranks` (the lower the better)."""
    prompt = row.prompt()
    answers = parse_replies("responses", row["responses"], prompt)
    values = filled_list(column, row[column])
    if len(values) != len(answers):
        raise BadRow(f"{column!r} has {len(values)} numbers for {len(answers)} responses")
    sign = -1 if column == "ranks" else 1
    numbers = [sign * finite_number(f"{column}[{i}]", value) for i, value in enumerate(values)]
    return rank_by_score(prompt, answers, numbers, with_margin=column == "scores")


def _has_ranked_objects(row: Row) -> bool:
    """Whether `answers` holds objects with a rank or a score; else it is what a reward compares with."""
    if row.own("answers") == "completions":
        return True
    answers = without_nulls(row["answers"])
    is_list = isinstance(answers, list) and answers
    return bool(is_list) and all(isinstance(i, Mapping) and ("rank" in i or "score" in i) for i in answers)


def _ranked_objects(row: Row) -> list[Example]:
    """Objects of a text and a rank (lower is better) or a score, as Nectar's and UltraFeedback's."""
    prompt = row.prompt()
    column = row.own("answers")
    answers, scores = [], []
    kinds = set()
    for i, item in enumerate(filled_list(column, row["answers"])):
        name = _first_of(f"{column}[{i}]", item, ANSWER_NAMES)
        kind = _first_of(f"{column}[{i}]", item, SCORE_NAMES)
        answers.append(parse_reply(f"{column}[{i}].{name}", item[name], prompt))
        sign = -1 if kind == "rank" else 1
        scores.append(sign * finite_number(f"{column}[{i}].{kind}", item[kind]))
        kinds.add(sign)
    if len(kinds) > 1:
        raise BadRow(f"{column!r} has objects with a rank and others with a score; give all of them one kind")
    return rank_by_score(prompt, answers, scores, with_margin=kinds == {1})


def _first_of(where: str, item: Any, names: Sequence[str]) -> str:
    """The first of `names` under which an object has something."""
    for name in names:
        if expect(where, item, Mapping, "an object").get(name) is not None:
            return name
    raise BadRow(f"{where} has none of {', '.join(names)}")


def _two_responses(row: Row) -> list[Example]:
    """HelpSteer's preferences: below 0 the first response is better, 0 is a tie."""
    prompt = _helpsteer_prompt(row)
    number = finite_number(row.own("preference_strength"), row["preference_strength"])
    answers = [row.reply(name, prompt) for name in ("response_1", "response_2")]
    return rank_by_score(prompt, answers, [0.0, number])


def group_scored(
    rows: RawRows, score_column: str, own_names: Mapping[str, str], unread: Counter[str]
) -> RawRows:
    """One row for each prompt of prompt/response rows, with all its responses and their `score_column`.

    Columns that are left behind are counted in `unread`.
    """
    keys = {}
    kept = {"id", score_column}
    for index, raw in readable(rows):
        if not raw.keys() >= {*own_names.values()}:  # it is bad, and named when it is read
            continue
        row = Row(raw, own_names)
        names = {row.own(name) for name in (*BEFORE_THE_REPLY, "response")} | kept
        unread.update(
            f"joined column {quoted(name)}" for name in row if name not in names | {*NEVER_LEFT_OUT}
        )
        if "prompt" in row:
            before = [row[name] for name in BEFORE_THE_REPLY if name in row]
            keys[index] = canonical(before)

    def build(group: list[dict[str, Any]]) -> dict[str, Any]:
        return {SCORED: [_kept_of(row, own_names, score_column) for row in group]}

    return group_rows(rows, keys, build)


def _kept_of(raw: Mapping[str, Any], own_names: Mapping[str, str], score_column: str) -> dict[str, Any]:
    row = Row(raw, own_names)
    names = {row.own(name) for name in (*BEFORE_THE_REPLY, "response")}
    return {name: row[name] for name in row if name in {*names, *NEVER_LEFT_OUT, score_column}}


def scored_responses(
    scored: Mapping[str, Any], score_column: str, own_names: Mapping[str, str]
) -> list[Example]:
    """A row that `group_scored` made; HelpSteer2's are of this kind."""
    rows = [Row(row, own_names) for row in scored[SCORED]]
    for row in rows:
        missing = [name for name in ("prompt", "response", score_column) if name not in row]
        if missing:
            cure = "; --score_column names another" if score_column in missing else ""
            raise BadRow(f"no column {', '.join(map(repr, missing))}{cure}")
    prompt = _helpsteer_prompt(rows[0])
    answers = [row.reply("response", prompt) for row in rows]
    scores = [finite_number(score_column, row[score_column]) for row in rows]
    return _finish(rows[0], rank_by_score(prompt, answers, scores))


def _helpsteer_prompt(row: Row) -> tuple[Message, ...]:
    prompt = row["prompt"]
    if isinstance(prompt, str) and _HELPSTEER_TURN.search(prompt):
        return row.with_context(split_marked(prompt, _HELPSTEER_TURN, opening_role="user"))
    return row.prompt()


# ---- one answer, or none


def _reply_to(column: str, row: Row) -> list[Example]:
    """A prompt and its answer: text, or the turns that follow, all of which are learnt then."""
    prompt = row.prompt()
    value = row[column]
    absence = None
    if column == "chosen":
        absence = BadRow(f"the row has {listed(row)}, but no `rejected`")
    if not isinstance(value, list | tuple):
        reply = row.reply(column, prompt)
        has_history = row.is_filled("history")
        return [Example(prompt, reply, learn_all_turns=has_history, absence=absence)]
    turns = parse_turns(row.own(column), value)
    if turns[-1].role != "assistant":
        raise BadRow(f"{row.own(column)!r} ends with a turn of the {turns[-1].role}, not of the assistant")
    if spoken(turns[: len(prompt)]) == spoken(prompt):  # the whole conversation
        turns = turns[len(prompt) :]
    elif turns[0].role in ("system", "user"):
        raise BadRow(f"{row.own(column)!r} has turns before the reply that are not the prompt's")
    prompt = tuple(turn._replace(is_learned=turn.role != "assistant") for turn in prompt)
    examples = _learn((*prompt, *turns))
    return [replace(example, absence=example.absence or absence) for example in examples]


def _learn(messages: tuple[Message, ...]) -> list[Example]:
    """A dialogue up to the last reply that is learnt, with the earlier ones that are."""
    replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
    learned = [i for i in replies if messages[i].is_learned]
    last = (learned or replies)[-1]
    prompt = messages[:last]
    if not prompt:
        raise BadRow("the dialogue begins with its only turn of the assistant")
    if not learned:
        return [Example(prompt, absence=EmptyRow("all turns of the assistant are marked as context"))]
    return [Example(prompt, reply_of(messages[last]), learn_all_turns=True)]


def _dialogue(row: Row) -> list[Example]:
    """All that the assistant says is learnt; what the user says after its last turn is left out, of
    `messages` the whole row serves as a prompt then.
    """
    messages = row.prompt("messages")
    name = row.own("messages")
    if all(message.role != "assistant" for message in messages):
        return [Example(messages, absence=BadRow(f"`{name}` has no turn of the assistant"))]
    if name == "messages" and messages[-1].role != "assistant":
        return [Example(messages, absence=BadRow(f"`{name}` ends with a turn of the {messages[-1].role}"))]
    return _learn(messages)


def _rated(row: Row) -> list[Example]:
    return _by_label(row, row.prompt(), row["response"])


def _rated_dialogue(row: Row) -> list[Example]:
    prompt = row.prompt("messages")[:-1]
    if not prompt:
        raise BadRow("`messages` has no turn before the answer that has a label")
    return _by_label(row, prompt, row["messages"][-1:])


def _by_label(row: Row, prompt: tuple[Message, ...], answer: Any) -> list[Example]:
    """One answer with a label; with one that says neither good nor bad it is but a prompt, for a reward."""
    reply = parse_reply("the answer that has a label", answer, prompt)
    is_good = truth_of(row["label"], _LABELS)
    if is_good is None:
        reason = f"its {row.own('label')} {row['label']!r} says neither good nor bad"
        return [Example(prompt, absence=BadRow(reason))]
    if is_good:
        return [Example(prompt, reply, is_rated=True)]
    return [Example(prompt, rejected=reply, is_rated=True, absence=EmptyRow("its label is false"))]


def _prompt_alone(row: Row) -> list[Example]:
    prompt = row.prompt()
    return [Example(prompt, absence=BadRow(f"the row has {listed(row)}, but no `response`"))]


class RowForm(NamedTuple):
    """Columns, how such a row is read, the steps it can serve, and what else tells the form."""

    columns: tuple[str, ...]
    to_examples: Callable[[Row], list[Example]]
    stages: tuple[int, ...] = (1, 2, 3)
    fits: Callable[[Row], bool] | None = None


# The first form whose columns are all there is the row's form.
ROW_FORMS = (
    RowForm(("prompt", *_SIDES), _pair),
    RowForm(("messages", *_SIDES), _pair),
    RowForm(("prompt", "pos_answers", "neg_answers"), _answer_lists),
    RowForm(("prompt", "ranked_answers"), _best_first),
    RowForm(("prompt", "responses", "scores"), partial(_numbered_responses, "scores")),
    RowForm(("prompt", "responses", "ranks"), partial(_numbered_responses, "ranks")),
    RowForm(("prompt", "answers"), _ranked_objects, fits=_has_ranked_objects),
    RowForm(("prompt", "response_1", "response_2", "preference_strength"), _two_responses),
    RowForm(_SIDES, _pair),
    RowForm(
        ("message_id", "text", "role"),
        lambda row: tree_examples({TREE: [dict(row)]}),
        fits=lambda row: "parent_id" in row,
    ),
    RowForm(("prompt", "response", "label"), _rated),
    RowForm(("messages", "label"), _rated_dialogue),
    RowForm(("prompt", "response"), partial(_reply_to, "response"), (1, 3)),
    RowForm(("prompt", "chosen"), partial(_reply_to, "chosen"), (1, 3)),
    RowForm(("messages",), _dialogue, (1, 3)),
    RowForm(("prompt",), _prompt_alone, (3,)),
    RowForm(("text",), lambda row: [Example(text=filled_text(row.own("text"), row["text"]))], (1,)),
)


# What --columns may name.
FORM_COLUMNS = {name for form in ROW_FORMS for name in form.columns} | COLUMN_NAMES.keys()
FORM_COLUMNS |= {"history", "margin", "score_chosen", "score_rejected", "weight"}


def accepted_forms(stage: int, *, is_unpaired: bool = False) -> str:
    """The column sets that a step can use, for a message; see `missing_for`."""
    forms = [form.columns for form in ROW_FORMS if stage in form.stages]
    return " | ".join("/".join(f) for f in forms if stage != 2 or is_unpaired or "label" not in f)


def read_row(
    raw: Mapping[str, Any],
    own_names: Mapping[str, str] | None = None,
    unread: Counter[str] | None = None,
) -> list[Example]:
    """Examples of a row of any form; `own_names` are those of --columns; `unread` counts what is left out.

    Raises BadRow: no form fits, or a column holds the wrong thing.
    """
    row = Row(raw, own_names)
    parts = row.get("completions")
    if "labels" in row and isinstance(parts, list | tuple) and not any(isinstance(p, Mapping) for p in parts):
        raise BadRow("`completions` and `labels` rate the parts of one answer, and no step learns from these")
    for form in ROW_FORMS:
        if all(name in row for name in form.columns) and (form.fits is None or form.fits(row)):
            return _finish(row, form.to_examples(row), unread)
    raise BadRow(_what_is_missing(row))


def _finish(row: Row, examples: list[Example], unread: Counter[str] | None = None) -> list[Example]:
    """Examples with the row's tools, and without replies where its `weight` says so."""
    if examples[0].prompt and row.is_filled("tools"):
        tools = json.dumps(parse_functions(row.own("tools"), row["tools"]))
        examples = [replace(example, tools=tools) for example in examples]
    weight = truth_of(row["weight"], TRUTHS) if "weight" in row else True
    if not weight:
        absence = EmptyRow("its weight is 0")
        if weight is None:
            absence = BadRow(f"its weight is {row['weight']!r}: a row is learnt (1) or not (0)")
        examples = [Example(examples[0].prompt, tools=examples[0].tools, absence=absence)]
    left_out = row.unread()
    if unread is not None:
        unread.update(left_out)
    return examples


def _what_is_missing(row: Row) -> str:
    """What the nearest form has besides the row's columns."""
    nearest = max(ROW_FORMS, key=lambda form: (sum(n in row for n in form.columns), -len(form.columns)))
    there = [row.own(name) for name in nearest.columns if name in row]
    if not there:
        return f"the row has {listed(row)}: no column that a form begins with; --columns names others"
    return f"the row has {listed(there)}, but no {listed(n for n in nearest.columns if n not in row)}"
