"""Several answers to one prompt, ranked or scored, as pairs: each with every one below it (InstructGPT)."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from common.data.adapters.row_parts import (
    filled_list,
    filled_text,
    finite_number,
    kind_of,
    messages_from_prompt,
    reply_text,
    reply_texts,
    split_marked,
)
from common.data.example import BadRow, EmptyRow, Example, Message
from common.data.raw_rows import GroupedRows, RawRows, canonical, group_by_key, readable

SCORED = "(scored responses)"  # the column of a row that answers of one prompt were put together in
ONE_ANSWER = "its prompt has one answer only"

_ANSWER_NAMES = ("answer", "response", "text", "content")
_SCORE_NAMES = ("rank", "score", "overall_score")
# HelpSteer2 writes earlier turns into its prompt, each behind such a mark.
_HELPSTEER_TURN = re.compile(r"<extra_id_1>(User|Assistant)\n")


def rank_by_score(
    prompt: tuple[Message, ...], answers: Sequence[str], scores: Sequence[float], *, with_margin: bool = True
) -> list[Example]:
    """All pairs of the answers to a prompt, higher scores chosen; equal scores are a tie.

    Steps 1 and 3 use the pairs of the best answer alone: what is learnt is the first of the best. A margin is
    the difference of two scores; 0 without `with_margin`, for places in an order have no size.
    """
    if len(answers) == 1:
        return [Example(prompt=prompt, chosen=answers[0], absence=EmptyRow(ONE_ANSWER))]
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


def best_first(row: Mapping[str, Any]) -> list[Example]:
    """prompt, ranked_answers: texts, the best one first."""
    answers = reply_texts("ranked_answers", row["ranked_answers"])
    scores = [-float(i) for i in range(len(answers))]
    return rank_by_score(messages_from_prompt(row["prompt"]), answers, scores, with_margin=False)


def numbered_responses(column: str) -> Callable[[Mapping[str, Any]], list[Example]]:
    """Reader of prompt, responses, and `scores` (the higher the better) or `ranks` (the lower the better)."""

    def to_examples(row: Mapping[str, Any]) -> list[Example]:
        prompt = messages_from_prompt(row["prompt"])
        answers = reply_texts("responses", row["responses"])
        values = filled_list(column, row[column])
        if len(values) != len(answers):
            raise BadRow(f"{column!r} has {len(values)} numbers for {len(answers)} responses")
        numbers = [finite_number(f"{column}[{i}]", value) for i, value in enumerate(values)]
        if column == "ranks":
            return rank_by_score(prompt, answers, [-number for number in numbers], with_margin=False)
        return rank_by_score(prompt, answers, numbers)

    return to_examples


def has_ranked_objects(row: Mapping[str, Any]) -> bool:
    """Whether `answers` holds objects with a rank or a score; else it is what a reward compares with."""
    answers = row["answers"]
    if not isinstance(answers, list | tuple) or not answers:
        return False
    return all(isinstance(item, Mapping) and ("rank" in item or "score" in item) for item in answers)


def ranked_objects(row: Mapping[str, Any]) -> list[Example]:
    """prompt, answers: objects of a text and a rank (lower is better), as Nectar's, or a score."""
    return _rank_objects(messages_from_prompt(row["prompt"]), "answers", row["answers"])


def completions(row: Mapping[str, Any]) -> list[Example]:
    """instruction, completions: objects of a response and an overall_score, as UltraFeedback's."""
    prompt = (Message("user", filled_text("instruction", row["instruction"])),)
    return _rank_objects(prompt, "completions", row["completions"])


def _rank_objects(prompt: tuple[Message, ...], column: str, items: Any) -> list[Example]:
    answers, scores, has_ranks = [], [], False
    for i, item in enumerate(filled_list(column, items)):
        text_name = _first_of(f"{column}[{i}]", item, _ANSWER_NAMES)
        score_name = _first_of(f"{column}[{i}]", item, _SCORE_NAMES)
        answers.append(reply_text(f"{column}[{i}].{text_name}", item[text_name]))
        number = finite_number(f"{column}[{i}].{score_name}", item[score_name])
        is_rank = score_name == "rank"
        if i and is_rank != has_ranks:
            raise BadRow(f"{column}[{i}] has {score_name!r}, unlike the answers before it")
        has_ranks = is_rank
        scores.append(-number if is_rank else number)
    return rank_by_score(prompt, answers, scores, with_margin=not has_ranks)


def _first_of(where: str, item: Any, names: Sequence[str]) -> str:
    """The first of `names` that an object has."""
    if not isinstance(item, Mapping):
        raise BadRow(f"{where} is {kind_of(item)}, not an object")
    for name in names:
        if name in item:
            return name
    raise BadRow(f"{where} has none of {', '.join(names)}")


def two_responses(
    context: str, first: str, second: str, preference: str
) -> Callable[[Mapping[str, Any]], list[Example]]:
    """Reader of HelpSteer's preferences, by the columns: below 0 the first response is better, 0 is a tie."""

    def to_examples(row: Mapping[str, Any]) -> list[Example]:
        prompt = _helpsteer_prompt(row[context], context)
        number = finite_number(preference, row[preference])
        answers = [reply_text(name, row[name]) for name in (first, second)]
        return rank_by_score(prompt, answers, [0.0, number])

    return to_examples


def group_scored(rows: RawRows, score_column: str) -> GroupedRows:
    """One row for each prompt of prompt/response rows, with all its responses and their `score_column`."""

    def build(group: list[dict[str, Any]]) -> dict[str, Any]:
        return {SCORED: [{name: row[name] for name in columns if name in row} for row in group]}

    columns = ("prompt", "response", score_column)
    keys = {index: canonical(row["prompt"]) for index, row in readable(rows) if "prompt" in row}
    return GroupedRows(rows, group_by_key(len(rows), keys), build)


def scored_responses(row: Mapping[str, Any], score_column: str) -> list[Example]:
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
