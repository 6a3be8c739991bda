"""Several answers to one prompt, ranked or scored, as pairs: each with every one below it (InstructGPT)."""

import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from common.data.adapters.row_parts import (
    filled_text,
    finite_number,
    kind_of,
    member,
    messages_from_prompt,
    parse_turns,
    reply_text,
    split_marked,
)
from common.data.example import BadRow, EmptyRow, Example, Message
from common.data.raw_rows import GroupedRows, RawRows, canonical, group_by_key, readable

SCORED = "(scored responses)"  # the column of a row that answers of one prompt were put together in
ONE_ANSWER = "its prompt has one answer only"

_ANSWER_NAMES = ("answer", "response", "text", "content")
_SCORE_NAMES = ("score", "overall_score")
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
    answers = _texts("ranked_answers", row["ranked_answers"])
    places = [-float(i) for i in range(len(answers))]
    return rank_by_score(messages_from_prompt(row["prompt"]), answers, places, with_margin=False)


def responses_and_scores(row: Mapping[str, Any]) -> list[Example]:
    """prompt, responses, scores: a score for each response, the higher the better."""
    answers = _texts("responses", row["responses"])
    return rank_by_score(messages_from_prompt(row["prompt"]), answers, _numbers(row, "scores", len(answers)))


def responses_and_ranks(row: Mapping[str, Any]) -> list[Example]:
    """prompt, responses, ranks: a rank for each response, the lower the better."""
    answers = _texts("responses", row["responses"])
    ranks = _numbers(row, "ranks", len(answers))
    prompt = messages_from_prompt(row["prompt"])
    return rank_by_score(prompt, answers, [-rank for rank in ranks], with_margin=False)


def has_ranked_objects(row: Mapping[str, Any]) -> bool:
    """Whether `answers` holds objects with a rank or a score; else it is what a reward compares with."""
    answers = row["answers"]
    if not isinstance(answers, list | tuple) or not answers:
        return False
    return all(isinstance(item, Mapping) and ("rank" in item or "score" in item) for item in answers)


def ranked_objects(row: Mapping[str, Any]) -> list[Example]:
    """prompt, answers: objects of a text and a rank (lower is better), as Nectar's, or a score."""
    return _from_objects(messages_from_prompt(row["prompt"]), "answers", row["answers"])


def completions(row: Mapping[str, Any]) -> list[Example]:
    """instruction, completions: objects of a response and an overall_score, as UltraFeedback's."""
    prompt = (Message("user", filled_text("instruction", row["instruction"])),)
    if isinstance(row["completions"], list | tuple) and not row["completions"]:
        raise EmptyRow("'completions' is empty")
    return _from_objects(prompt, "completions", row["completions"])


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
    return rank_by_score(_helpsteer_prompt(group[0]["prompt"]), answers, scores)


def _helpsteer_prompt(prompt: Any) -> tuple[Message, ...]:
    if isinstance(prompt, str) and _HELPSTEER_TURN.search(prompt):
        return split_marked(prompt, _HELPSTEER_TURN, opening_role="user")
    return messages_from_prompt(prompt)


def two_responses(row: Mapping[str, Any]) -> list[Example]:
    """context, response1, response2, overall_preference (HelpSteer3): below 0 the first one is better."""
    context = row["context"]
    prompt = messages_from_prompt(context) if isinstance(context, str) else parse_turns("context", context)
    return _by_preference(prompt, row, ("response1", "response2"), "overall_preference")


def two_responses_and_strength(row: Mapping[str, Any]) -> list[Example]:
    """prompt, response_1, response_2, preference_strength: HelpSteer2's, the same by other names."""
    prompt = _helpsteer_prompt(row["prompt"])
    return _by_preference(prompt, row, ("response_1", "response_2"), "preference_strength")


def _by_preference(
    prompt: tuple[Message, ...], row: Mapping[str, Any], names: tuple[str, str], column: str
) -> list[Example]:
    preference = finite_number(column, row[column])
    answers = [reply_text(name, row[name]) for name in names]
    return rank_by_score(prompt, answers, [0.0, preference])


def _from_objects(prompt: tuple[Message, ...], column: str, items: Any) -> list[Example]:
    if not isinstance(items, list | tuple):
        raise BadRow(f"{column!r} is {kind_of(items)}, not a list of answers")
    answers, scores, has_ranks = [], [], False
    for i, item in enumerate(items):
        place = f"{column}[{i}]"
        text_name = _present(place, item, _ANSWER_NAMES)
        answers.append(reply_text(f"{place}.{text_name}", item[text_name]))
        name = _present(place, item, ("rank", *_SCORE_NAMES))
        is_rank = name == "rank"
        if i and is_rank != has_ranks:
            raise BadRow(f"{place} has {name!r}, unlike the answers before it")
        has_ranks = is_rank
        number = finite_number(f"{place}.{name}", member(place, item, name))
        scores.append(-number if is_rank else number)
    return rank_by_score(prompt, answers, scores, with_margin=not has_ranks)


def _present(place: str, item: Any, names: Sequence[str]) -> str:
    """The first of `names` that an object has."""
    if not isinstance(item, Mapping):
        raise BadRow(f"{place} is {kind_of(item)}, not an object")
    found = next((name for name in names if name in item), None)
    if found is None:
        raise BadRow(f"{place} has none of {', '.join(names)}")
    return found


def _texts(column: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple):
        raise BadRow(f"{column!r} is {kind_of(value)}, not a list of texts")
    if not value:
        raise EmptyRow(f"{column!r} is empty")
    return [reply_text(f"{column}[{i}]", answer) for i, answer in enumerate(value)]


def _numbers(row: Mapping[str, Any], column: str, count: int) -> list[float]:
    value = row[column]
    if not isinstance(value, list | tuple):
        raise BadRow(f"{column!r} is {kind_of(value)}, not a list of numbers")
    if len(value) != count:
        raise BadRow(f"{column!r} has {len(value)} numbers for {count} responses")
    return [finite_number(f"{column}[{i}]", number) for i, number in enumerate(value)]
