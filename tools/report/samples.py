"""Samples of runs: answers to the same prompt over time and over runs, with what changed by words."""

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.report.charts import spread
from tools.report.run_reader import RunFiles

MAX_PROMPTS = 10  # prompts with several answers
MAX_ANSWERS = 8  # steps of one prompt: the first, the last, and some between
MAX_SINGLES = 12  # prompts with one answer
MAX_CHARACTERS, MAX_PROMPT_CHARACTERS = 1500, 300
FAR = 0.35  # share of common words below which hardly a word has stayed: marks would hide the text
_WORD = re.compile(r"\s+|\w+|[^\w\s]")

Changes = list[tuple[str, str]]  # parts of a text: ("same" | "new" | "gone", text)


@dataclass
class Answer:
    """One line of samples.jsonl; `index` tells the answers of one step to one prompt apart."""

    run: int
    step: int
    index: int
    text: str
    score: Any = None
    changes: Changes = field(default_factory=list)  # to an earlier answer
    same_as: str = ""


def find_changes(before: str, after: str) -> Changes:
    """Return the parts of both texts in order: without `gone` they are `after`, without `new` `before`.

    Texts that have hardly a word in common give `after` alone, as new.
    """
    old, new = _WORD.findall(before), _WORD.findall(after)
    changes, num_same = [], 0
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, first, end, new_first, new_end in matcher.get_opcodes():
        if kind == "equal":
            changes.append(("same", "".join(old[first:end])))
            num_same += _num_words(old[first:end])
            continue
        if end > first:
            changes.append(("gone", "".join(old[first:end])))
        if new_end > new_first:
            changes.append(("new", "".join(new[new_first:new_end])))
    return changes if 2 * num_same >= FAR * _num_words(old + new) else [("new", after)]


def _num_words(pieces: Sequence[str]) -> int:
    return sum(not piece.isspace() for piece in pieces)


def group_answers(runs: Sequence[RunFiles]) -> dict[str, list[Answer]]:
    """Return {prompt: its answers}, by step, then by run."""
    groups: dict[str, list[Answer]] = {}
    for number, run in enumerate(runs):
        seen: Counter[tuple[str, int]] = Counter()
        for row in run.samples:
            prompt, text, step = row.get("prompt"), row.get("answer"), row["step"]
            if isinstance(prompt, str) and isinstance(text, str):
                answer = Answer(number, step, seen[prompt, step], text, row.get("score"))
                groups.setdefault(prompt, []).append(answer)
                seen[prompt, step] += 1
    return {prompt: sorted(of, key=lambda a: (a.step, a.run, a.index)) for prompt, of in groups.items()}


def find_earlier(answers: Sequence[Answer], index: int) -> Answer | None:
    """Return what an answer is compared with: its run's one before, else the first run's of its step."""
    mine = answers[index]
    before = [a for a in answers[:index] if a.index == mine.index]
    own = [a for a in before if a.run == mine.run and a.step < mine.step]
    if own:
        return own[-1]
    return next((a for a in before if a.run != mine.run and a.step == mine.step), None)


def build_samples(runs: Sequence[RunFiles]) -> dict[str, Any]:
    """Return `cards`: prompts that were answered several times, `singles`: once, by step, and `num_singles`.

    Each has `prompt`, `num_steps` and `answers` with their changes.
    """
    cards, singles = [], []
    for prompt, answers in group_answers(runs).items():
        times = {(a.run, a.step) for a in answers}
        (cards if len(times) > 1 else singles).append((prompt, answers))
    singles.sort(key=lambda single: (single[1][0].step, single[1][0].run))
    return {
        "cards": [_build_card(*card, runs) for card in spread(cards, MAX_PROMPTS)],
        "singles": [_build_card(p, answers[:1], runs) for p, answers in spread(singles, MAX_SINGLES)],
        "num_singles": len(singles),
    }


def _build_card(prompt: str, answers: list[Answer], runs: Sequence[RunFiles]) -> dict[str, Any]:
    steps = sorted({answer.step for answer in answers})
    kept = [answer for answer in answers if answer.step in spread(steps, MAX_ANSWERS)]
    for i, answer in enumerate(kept):
        earlier = find_earlier(kept, i)
        answer.changes = [("same", cut(answer.text))]
        if earlier and earlier.text == answer.text:
            answer.same_as = "unchanged" if earlier.run == answer.run else f"as {runs[earlier.run].name}"
        elif earlier:
            answer.changes = find_changes(cut(earlier.text), cut(answer.text))
    return {"prompt": cut(prompt, MAX_PROMPT_CHARACTERS), "num_steps": len(steps), "answers": kept}


def cut(text: str, most: int = MAX_CHARACTERS) -> str:
    """Return the text without space around it, its end replaced by a count where it is too long."""
    text = text.strip()
    return text if len(text) <= most else f"{text[:most]} [... {len(text) - most:,} characters]"
