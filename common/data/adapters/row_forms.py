"""The usual row formats, recognised by their columns. Rows of scored responses to one prompt become one row,
so that no prompt is trained on in one step and held out in another.

Several ranked answers become pairs: each with every one below it (InstructGPT).
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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
    check_end,
    expect,
    filled,
    finite_number,
    from_json,
    messages_from_prompt,
    parse_functions,
    parse_reply,
    parse_turns,
    quoted,
    rank_by_score,
    reply_of,
    split_transcripts,
    spoken,
    truth_of,
    without_nulls,
)
from common.data.example import BadRow, EmptyRow, Example, Message
from common.data.raw_rows import RawRows, canonical, group_rows, readable

_SIDES = ("chosen", "rejected")
# Label values besides true and false.
_GOOD = ("yes", "y", "good", "up", "upvote", "like", "thumbs_up", "positive", "desirable", "correct", "👍")
_BAD = ("no", "n", "bad", "down", "downvote", "dislike", "thumbs_down", "negative", "undesirable")
_LABELS = TRUTHS | dict.fromkeys(_GOOD, True) | dict.fromkeys((*_BAD, "incorrect", "-1", "👎"), False)

# ---- pairs


def _pair(row: Row) -> list[Example]:
    """`chosen` and `rejected`: replies to the prompt, or two dialogues that end with them, as lists of turns
    or, without a prompt, as texts. The turns before the replies must be equal and include the prompt.
    """
    answers = [row[name] for name in _SIDES]
    prompt = next((row.asked(name) for name in ("prompt", "messages") if name in row), ())
    if all(isinstance(answer, list | tuple) for answer in answers):
        turns, others = (parse_turns(row.own(name), row[name])[:-1] for name in _SIDES)
        if turns != others:
            raise BadRow("chosen and rejected do not share the turns before their last one")
        asked = spoken(prompt)
        if any(spoken(turns[i : i + len(asked)]) == asked for i in range(len(turns))):
            prompt = turns
            answers = [answer[-1:] for answer in answers]
    elif not prompt and all(isinstance(answer, str) and "Assistant:" in answer for answer in answers):
        shared, *answers = split_transcripts(*answers)
        prompt = messages_from_prompt(shared)
    if not prompt:
        raise BadRow(f"the row has {listed(map(row.own, _SIDES))}, but no `prompt`")
    prompt = row.with_context(prompt)
    chosen, rejected = (
        parse_reply(row.own(name), answer, prompt) for name, answer in zip(_SIDES, answers, strict=True)
    )
    margin, is_tie = _preference(row)
    return [Example(prompt, chosen, rejected, margin=margin, is_tie=is_tie)]


def _preference(row: Row) -> tuple[float, bool]:
    """Margin of a pair, and whether its two scores are equal, as some are in UltraFeedback."""
    names = ("margin", "score_chosen", "score_rejected")
    margin, *scores = (finite_number(name, row[name]) if name in row else None for name in names)
    difference = None if None in scores else scores[0] - scores[1]
    for name, value in (("margin", margin), ("score_chosen - score_rejected", difference)):
        if value is not None and value < 0:
            raise BadRow(f"{name!r} is {value:g}, so the rejected response is the better one; swap the two")
    return margin or 0.0, difference == 0


def _answer_lists(row: Row) -> list[Example]:
    """Pairs of each good answer with each bad one."""
    prompt = row.prompt()
    chosen, rejected = (_replies(row.items_of(name), prompt) for name in ("pos_answers", "neg_answers"))
    return [Example(prompt=prompt, chosen=a, rejected=b) for a, b in product(chosen, rejected)]


def _replies(answers: Mapping[str, Any], prompt: Sequence[Message]) -> list[str | Message]:
    """Replies by position; a null counts as an empty reply."""
    return [parse_reply(place, "" if value is None else value, prompt) for place, value in answers.items()]


# ---- ranked answers


def _rank(
    row: Row, answers: Mapping[str, Any], numbers: Mapping[str, Any], *, are_ranks: bool
) -> list[Example]:
    """Pairs of the answers to a row's prompt, by scores (highest best) or ranks (lowest best).

    Answers and numbers are given by their positions in the row.
    """
    prompt = row.prompt()
    sign = -1 if are_ranks else 1
    scores = [sign * finite_number(place, value) for place, value in numbers.items()]
    return rank_by_score(prompt, _replies(answers, prompt), scores, with_margin=not are_ranks)


def _best_first(row: Row) -> list[Example]:
    answers = row.items_of("ranked_answers")
    return _rank(row, answers, {place: i for i, place in enumerate(answers)}, are_ranks=True)


def _numbered_responses(column: str, row: Row) -> list[Example]:
    """`responses` with `scores` (highest best) or `ranks` (lowest best)."""
    answers, numbers = row.items_of("responses"), row.items_of(column)
    if len(numbers) != len(answers):
        raise BadRow(f"{column!r} has {len(numbers)} numbers for {len(answers)} responses")
    return _rank(row, answers, numbers, are_ranks=column == "ranks")


def _has_ranked_objects(row: Row) -> bool:
    """Whether `answers` holds objects with a rank or a score; others are reference answers for a reward."""
    answers = without_nulls(row["answers"])
    is_list = isinstance(answers, list) and answers
    is_ranking = is_list and all(isinstance(i, Mapping) and ("rank" in i or "score" in i) for i in answers)
    return row.own("answers") == "completions" or bool(is_ranking)


def _ranked_objects(row: Row) -> list[Example]:
    """Objects with a text and a rank or a score, as in Nectar and UltraFeedback."""
    answers, numbers = {}, {}
    for place, item in row.items_of("answers").items():
        item = without_nulls(expect(place, item, Mapping, "an answer with its rank or score"))
        for names, by_place in ((ANSWER_NAMES, answers), (SCORE_NAMES, numbers)):
            name = next((name for name in names if name in item), None)
            if name is None:
                raise BadRow(f"{place} has none of {', '.join(names)}")
            by_place[f"{place}.{name}"] = item[name]
    kinds = {place.endswith(".rank") for place in numbers}
    if len(kinds) > 1:
        raise BadRow(
            f"{row.own('answers')!r} has objects with a rank and others with a score; give all the same kind"
        )
    return _rank(row, answers, numbers, are_ranks=True in kinds)


def _two_responses(row: Row) -> list[Example]:
    """HelpSteer's preferences: below 0 the first response is better, 0 is a tie."""
    answers = {row.own(name): row[name] for name in ("response_1", "response_2")}
    numbers = {"": 0, row.own("preference_strength"): row["preference_strength"]}
    return _rank(row, answers, numbers, are_ranks=False)


def group_scored(
    rows: RawRows, score_column: str, own_names: Mapping[str, str], unread: Counter[str]
) -> RawRows:
    """One row of `responses` and `scores` per prompt, from rows of one response and its `score_column`.

    Unread columns are counted in `unread`.
    """

    def kept(row: Row) -> set[str]:
        return {*map(row.own, BEFORE_THE_REPLY), *NEVER_LEFT_OUT}

    keys = {}
    for index, raw in readable(rows):
        with suppress(BadRow):  # a column is missing; `build` reports it
            row = Row(raw, own_names)
            others = row.keys() - kept(row) - {row.own("response"), score_column, "id"}
            unread.update(f"joined column {quoted(name)}" for name in others)
            if "prompt" in row:
                keys[index] = canonical([row[name] for name in BEFORE_THE_REPLY if name in row])

    def build(group: list[dict[str, Any]]) -> dict[str, Any]:
        joined = [Row(raw, own_names) for raw in group]
        missing = {name for row in joined for name in ("prompt", "response", score_column) if name not in row}
        if missing:
            cure = "; --score_column names another" if score_column in missing else ""
            raise BadRow(f"no column {', '.join(map(repr, sorted(missing)))}{cure}")
        scores = [finite_number(score_column, row[score_column]) for row in joined]
        first = {name: value for name, value in joined[0].items() if name in kept(joined[0])}
        return first | {"responses": [row["response"] for row in joined], "scores": scores}

    return group_rows(rows, keys, build)


# ---- one answer, or none


def _reply_to(column: str, row: Row) -> list[Example]:
    """A prompt and its answer: text, or the following turns, all of which are learned."""
    prompt = row.prompt()
    value = row[column]
    absence = row.lacks(f"the row has {listed(row)}, but no `rejected`") if column == "chosen" else None
    if not isinstance(value, list | tuple):
        reply = parse_reply(row.own(column), value, prompt)
        return [Example(prompt, reply, learn_all_turns=row.is_filled("history"), absence=absence)]
    turns = parse_turns(row.own(column), value)
    check_end(row.own(column), turns[-1])
    if spoken(turns[: len(prompt)]) == spoken(prompt):  # the column holds the whole conversation
        turns = turns[len(prompt) :]
    elif turns[0].role in ("system", "user"):
        raise BadRow(f"{row.own(column)!r} has turns before the reply that are not the prompt's")
    prompt = tuple(turn._replace(is_learned=turn.role != "assistant") for turn in prompt)
    return _learn((*prompt, *turns), absence)


def _learn(messages: tuple[Message, ...], absence: BadRow | None = None) -> list[Example]:
    """A dialogue up to its last learned reply; earlier ones stay learned turns of its prompt."""
    replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
    learned = [i for i in replies if messages[i].is_learned]
    last = (learned or replies)[-1]
    prompt = messages[:last]
    if not prompt:
        raise BadRow("the dialogue has no turn before its only turn of the assistant")
    if not learned:
        return [Example(prompt, absence=EmptyRow("all turns of the assistant are marked as context"))]
    return [Example(prompt, reply_of(messages[last]), learn_all_turns=True, absence=absence)]


def _dialogue(row: Row) -> list[Example]:
    """All turns of the assistant are learned. A final turn of the user is left out, except in `messages`,
    where it makes the whole row a prompt.
    """
    messages = row.prompt("messages")
    name = row.own("messages")
    is_prompt = messages[-1].role != "assistant" and name == "messages"
    if is_prompt or all(message.role != "assistant" for message in messages):
        return [Example(messages, absence=BadRow(f"`{name}` ends with a turn of the {messages[-1].role}"))]
    return _learn(messages)


def _rated(column: str, row: Row) -> list[Example]:
    """One answer with a label; if the label is neither good nor bad, a prompt for a reward."""
    is_dialogue = column == "messages"
    prompt = row.prompt(column)[: -1 if is_dialogue else None]
    answer = row["messages"][-1:] if is_dialogue else row["response"]
    if not prompt:
        raise BadRow("`messages` has no turn before the answer that has a label")
    reply = parse_reply("the answer that has a label", answer, prompt)
    is_good = truth_of(row["label"], _LABELS)
    if is_good is None:
        reason = f"its {row.own('label')} {row['label']!r} is neither good nor bad"
        return [Example(prompt, absence=BadRow(reason))]
    if is_good:
        return [Example(prompt, reply, is_rated=True)]
    return [Example(prompt, rejected=reply, is_rated=True, absence=EmptyRow("its label is false"))]


def _prompt_alone(row: Row) -> list[Example]:
    prompt = row.prompt()
    return [Example(prompt, absence=row.lacks(f"the row has {listed(row)}, but no `response`"))]


class RowForm(NamedTuple):
    """Columns of a form, its reader, the steps that can use it, and a further condition."""

    columns: tuple[str, ...]
    to_examples: Callable[[Row], list[Example]]
    stages: tuple[int, ...] = (1, 2, 3)
    fits: Callable[[Row], bool] | None = None


# A row has the first form whose columns are all present.
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
    RowForm(("prompt", "response", "label"), partial(_rated, "prompt")),
    RowForm(("messages", "label"), partial(_rated, "messages")),
    RowForm(("prompt", "response"), partial(_reply_to, "response"), (1, 3)),
    RowForm(("prompt", "chosen"), partial(_reply_to, "chosen"), (1, 3)),
    RowForm(("messages",), _dialogue, (1, 3)),
    RowForm(("prompt",), _prompt_alone, (3,)),
    RowForm(("text",), lambda row: [Example(text=filled(row.own("text"), row["text"]))], (1,)),
)


# Names that --columns accepts.
FORM_COLUMNS = {
    *(name for form in ROW_FORMS for name in form.columns),
    *COLUMN_NAMES,
    *("history", "margin", "score_chosen", "score_rejected", "weight"),
}


def accepted_forms(stage: int, *, is_unpaired: bool = False) -> str:
    """The column sets that a step can use, for a message; see `missing_for`."""
    forms = [form.columns for form in ROW_FORMS if stage in form.stages]
    return " | ".join("/".join(f) for f in forms if stage != 2 or is_unpaired or "label" not in f)


def read_row(
    raw: Mapping[str, Any],
    own_names: Mapping[str, str] | None = None,
    unread: Counter[str] | None = None,
) -> list[Example]:
    """Examples of a row of any form; `own_names` are those of --columns; `unread` counts unread columns.

    Raises BadRow if no form fits, or a column holds a wrong value.
    """
    row = Row(raw, own_names)
    for form in ROW_FORMS:
        if all(name in row for name in form.columns) and (form.fits is None or form.fits(row)):
            examples = _with_tools_and_weight(row, form.to_examples(row))
            (Counter() if unread is None else unread).update(row.unread())
            return examples
    raise row.lacks(_what_is_missing(row))


def _with_tools_and_weight(row: Row, examples: list[Example]) -> list[Example]:
    """Examples with the row's tools, and without replies if its `weight` is 0."""
    if examples[0].prompt and row.is_filled("tools"):
        column = row.own("tools")
        if functions := from_json(column, row["tools"]):
            tools = json.dumps(parse_functions(column, functions))
            examples = [replace(example, tools=tools) for example in examples]
    weight = truth_of(row["weight"], TRUTHS) if "weight" in row else True
    if weight:
        return examples
    reason = f"its weight is {row['weight']!r}: a row is learnt (1) or not (0)"
    absence = BadRow(reason) if weight is None else EmptyRow("its weight is 0")
    return [Example(examples[0].prompt, tools=examples[0].tools, absence=absence)]


def _what_is_missing(row: Row) -> str:
    """Columns of the nearest form that the row lacks, as text."""
    nearest = max(ROW_FORMS, key=lambda form: (sum(n in row for n in form.columns), -len(form.columns)))
    there = [row.own(name) for name in nearest.columns if name in row]
    if not there:
        return f"the row has {listed(row)}: no column that a form begins with; --columns names others"
    return f"the row has {listed(there)}, but no {listed(n for n in nearest.columns if n not in row)}"
