"""Samples of runs: responses to the same prompt over time and across runs, with word differences."""

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.report.charts import spread
from tools.report.run_reader import RunFiles

MAX_PROMPTS = 10  # prompts with several responses
MAX_ANSWERS = 8  # steps of one prompt: the first, the last, and some between
MAX_SINGLES = 12  # prompts with one response
MAX_CHARACTERS, MAX_PROMPT_CHARACTERS = 1500, 300
MIN_SIMILARITY = (
    0.6  # share of common words and spaces below which changes are not marked: marks would hide the text
)
_WORD = re.compile(r"\s+|\w+|[^\w\s]")

Changes = list[tuple[str, str]]  # parts of a text: ("same" | "new" | "gone", text)


@dataclass
class Answer:
    """One line of samples.jsonl; `index` distinguishes the responses to one prompt at one step."""

    step: int
    run: int
    index: int
    text: str
    score: float | None
    row_id: str = ""  # row of the prompt; empty in runs of older versions
    changes: Changes = field(default_factory=list)  # from the response it is compared with
    same_as: int | None = None  # run of the identical response that it is compared with


def find_changes(before: str, after: str) -> Changes:
    """Parts of both texts in order: without `gone` they are `after`, without `new` `before`.

    Texts with hardly a word in common give `after` alone, as new.
    """
    old = _WORD.findall(before)
    new = _WORD.findall(after)
    changes = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, first, end, new_first, new_end in matcher.get_opcodes():
        before_part = "".join(old[first:end])
        after_part = "".join(new[new_first:new_end])
        if kind == "equal":
            changes.append(("same", after_part))
        else:
            changes += [("gone", before_part), ("new", after_part)]
    if matcher.ratio() < MIN_SIMILARITY:
        return [("new", after)]
    return [(kind, text) for kind, text in changes if text]


def group_answers(runs: Sequence[RunFiles]) -> dict[str, list[Answer]]:
    """{prompt: its responses}, by step, then by run."""
    groups: dict[str, list[Answer]] = {}
    for number, run in enumerate(runs):
        seen: Counter[tuple[str, int]] = Counter()
        for row in run.samples:
            prompt, step = row["prompt"], row["step"]
            answer = Answer(
                step, number, seen[prompt, step], row["answer"], row.get("score"), row.get("row_id", "")
            )
            groups.setdefault(prompt, []).append(answer)
            seen[prompt, step] += 1
    return {prompt: sorted(of, key=lambda a: (a.step, a.run, a.index)) for prompt, of in groups.items()}


def mark_changes(answers: Sequence[Answer]) -> None:
    """Compare each response with its run's previous one, or else with the first run's of its step."""
    latest_of_run: dict[tuple[int, int], Answer] = {}
    first_of_step: dict[tuple[int, int], Answer] = {}
    for answer in answers:
        first = first_of_step.setdefault((answer.step, answer.index), answer)
        earlier = latest_of_run.get((answer.run, answer.index), first)
        latest_of_run[answer.run, answer.index] = answer
        answer.changes = find_changes(cut(earlier.text), cut(answer.text))
        if earlier is not answer and earlier.text == answer.text:
            answer.same_as = earlier.run


def build_samples(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """`cards`: prompts with several responses, `singles`: with one, by step, and `num_singles`.

    Each has `prompt`, `row_id`, `num_steps` and `answers` with their changes.
    """
    cards, singles = [], []
    for prompt, answers in group_answers(runs).items():
        times = {(a.step, a.run) for a in answers}
        (cards if len(times) > 1 else singles).append((prompt, answers))
    singles.sort(key=lambda single: (single[1][0].step, single[1][0].run))
    return {
        "cards": [_build_card(prompt, answers) for prompt, answers in spread(cards, MAX_PROMPTS)],
        "singles": [_build_card(prompt, answers[:1]) for prompt, answers in spread(singles, MAX_SINGLES)],
        "num_singles": len(singles),
    }


def _build_card(prompt: str, answers: Sequence[Answer]) -> dict[str, Any]:
    steps = sorted({answer.step for answer in answers})
    kept = [answer for answer in answers if answer.step in spread(steps, MAX_ANSWERS)]
    mark_changes(kept)
    return {
        "prompt": cut(prompt, MAX_PROMPT_CHARACTERS),
        "row_id": kept[0].row_id,
        "num_steps": len(steps),
        "answers": kept,
    }


def cut(text: str, max_characters: int = MAX_CHARACTERS) -> str:
    """The text stripped, its end replaced by a count if it is too long."""
    text = text.strip()
    return (
        text
        if len(text) <= max_characters
        else f"{text[:max_characters]} [... {len(text) - max_characters:,} characters]"
    )
