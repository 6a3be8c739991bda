"""Samples of runs: answers to the same prompt over time and over runs, with what changed by words. PURE."""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from common.runs.run_files import RunFiles

MAX_PROMPTS = 10  # prompts with several answers
MAX_ANSWERS = 8  # of one prompt and run: the first, the last, and some between
MAX_SINGLES = 12
MAX_CHARACTERS = 1500  # of one text
MAX_WORDS = 2000  # beyond it matching takes seconds
FAR = 0.35  # similarity below which hardly a word has stayed: marks would hide the text
_WORD = re.compile(r"\s+|\w+|[^\w\s]")


class Change(NamedTuple):
    """A part of a text that stayed (`same`), came (`new`) or went (`gone`)."""

    text: str
    kind: str


@dataclass(frozen=True)
class Answer:
    """One line of samples.jsonl; `index` tells the answers of one step to one prompt apart."""

    run: int
    step: int
    index: int
    text: str
    score: Any = None


class ShownAnswer(NamedTuple):
    """An answer, what changed in it, and what it is equal to, if to anything."""

    answer: Answer
    changes: list[Change]
    same_as: str = ""


def find_changes(before: str, after: str) -> list[Change]:
    """Return the parts of both texts in order: without `gone` they are `after`, without `new` `before`."""
    old, new = _WORD.findall(before), _WORD.findall(after)
    if max(len(old), len(new)) > MAX_WORDS:
        return [Change(after, "same")] if before == after else [Change(before, "gone"), Change(after, "new")]
    changes: list[Change] = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, first, end, new_first, new_end in matcher.get_opcodes():
        if kind == "equal":
            changes.append(Change("".join(new[new_first:new_end]), "same"))
            continue
        if end > first:
            changes.append(Change("".join(old[first:end]), "gone"))
        if new_end > new_first:
            changes.append(Change("".join(new[new_first:new_end]), "new"))
    return changes


def similarity(before: str, after: str) -> float:
    """Return the share of words that both texts have in one order, from 0 to 1."""
    old, new = (
        [word for word in _WORD.findall(text)[:MAX_WORDS] if word.strip()] for text in (before, after)
    )
    return difflib.SequenceMatcher(None, old, new, autojunk=False).ratio() if old or new else 1.0


def group_answers(runs: Sequence[RunFiles]) -> dict[str, list[Answer]]:
    """Return {prompt: its answers}, by step, then by run."""
    groups: dict[str, list[Answer]] = {}
    for number, run in enumerate(runs):
        seen: dict[tuple[str, int], int] = {}
        for row in run.samples:
            prompt, text = row.get("prompt"), row.get("answer")
            if not isinstance(prompt, str) or not isinstance(text, str):
                continue
            index = seen.get((prompt, row["step"]), 0)
            seen[prompt, row["step"]] = index + 1
            groups.setdefault(prompt, []).append(Answer(number, row["step"], index, text, row.get("score")))
    return {prompt: sorted(of, key=lambda a: (a.step, a.run, a.index)) for prompt, of in groups.items()}


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def find_earlier(answers: Sequence[Answer], index: int) -> Answer | None:
    """Return what an answer is compared with: its run's one before, else the first run's of its step."""
    mine = answers[index]
    before = [a for a in answers[:index] if a.index == mine.index]
    own = [a for a in before if a.run == mine.run and a.step < mine.step]
    if own:
        return own[-1]
    return next((a for a in before if a.run != mine.run and a.step == mine.step), None)


def build_cards(runs: Sequence[RunFiles]) -> list[dict[str, Any]]:
    """Return `prompt`, `num_steps`, `answers` with their changes, of prompts answered several times."""
    groups = group_answers(runs)
    repeated = [prompt for prompt, of in groups.items() if len({(a.run, a.step) for a in of}) > 1]
    cards = []
    for prompt in spread(repeated, MAX_PROMPTS):
        steps = sorted({answer.step for answer in groups[prompt]})
        kept = [answer for answer in groups[prompt] if answer.step in spread(steps, MAX_ANSWERS)]
        answers = [_compare(answer, find_earlier(kept, i), runs) for i, answer in enumerate(kept)]
        cards.append({"prompt": cut(prompt, 300), "num_steps": len(steps), "answers": answers})
    return cards


def build_singles(runs: Sequence[RunFiles]) -> tuple[list[tuple[str, ShownAnswer]], int]:
    """Return (prompt, answer) of prompts that were answered once, by step, and how many there are in all."""
    groups = group_answers(runs)
    singles = [(p, of[0]) for p, of in groups.items() if len({(a.run, a.step) for a in of}) == 1]
    singles.sort(key=lambda single: (single[1].step, single[1].run))
    kept = [(cut(p, 300), _compare(answer, None, runs)) for p, answer in spread(singles, MAX_SINGLES)]
    return kept, len(singles)


def _compare(answer: Answer, earlier: Answer | None, runs: Sequence[RunFiles]) -> ShownAnswer:
    after = cut(answer.text)
    if earlier is None:
        return ShownAnswer(answer, [Change(after, "same")])
    before = cut(earlier.text)
    changes = find_changes(before, after) if similarity(before, after) >= FAR else [Change(after, "new")]
    if earlier.text != answer.text:
        return ShownAnswer(answer, changes)
    return ShownAnswer(
        answer, changes, "unchanged" if earlier.run == answer.run else f"as {runs[earlier.run].name}"
    )


def cut(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return the text without space around it, its end replaced by a count where it is too long."""
    text = text.strip()
    return text if len(text) <= most else f"{text[:most]} [... {len(text) - most:,} characters]"
