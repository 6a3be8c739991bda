"""Samples of a run: answers to the same prompt over time and over runs, with what changed marked. PURE.

All text of a sample is escaped: markup in it is shown, and never run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from common.runs.report.run_files import RunFiles, is_number
from common.runs.report.svg_charts import shown
from common.runs.report.word_changes import Change, find_changes, similarity

MAX_PROMPTS = 10  # prompts with several answers
MAX_ANSWERS = 8  # of one prompt and run: the first, the last, and some between
MAX_SINGLES = 12
MAX_CHARACTERS = 1500  # of one text
FAR = 0.35  # below it hardly a word has stayed: marks would hide the text


@dataclass(frozen=True)
class Answer:
    """One line of samples.jsonl; `place` tells the answers of one step to one prompt apart."""

    run: int
    step: int
    place: int
    text: str
    score: Any = None


def group_answers(runs: Sequence[RunFiles]) -> dict[str, list[Answer]]:
    """Return {prompt: its answers}, by step, then by run."""
    groups: dict[str, list[Answer]] = {}
    for number, run in enumerate(runs):
        seen: dict[tuple[str, int], int] = {}
        for row in run.samples:
            prompt, text = row.get("prompt"), row.get("answer")
            if not isinstance(prompt, str) or not isinstance(text, str):
                continue
            place = seen.get((prompt, row["step"]), 0)
            seen[prompt, row["step"]] = place + 1
            groups.setdefault(prompt, []).append(Answer(number, row["step"], place, text, row.get("score")))
    return {prompt: sorted(of, key=lambda a: (a.step, a.run, a.place)) for prompt, of in groups.items()}


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def thin_answers(answers: Sequence[Answer]) -> list[Answer]:
    """Return the answers at MAX_ANSWERS steps at most."""
    steps = set(spread(sorted({answer.step for answer in answers}), MAX_ANSWERS))
    return [answer for answer in answers if answer.step in steps]


def find_earlier(answers: Sequence[Answer], index: int) -> Answer | None:
    """Return what an answer is compared with: its run's one before, else the first run's of its step."""
    mine = answers[index]
    before = [a for a in answers[:index] if a.place == mine.place]
    own = [a for a in before if a.run == mine.run and a.step < mine.step]
    if own:
        return own[-1]
    others = [a for a in before if a.run != mine.run and a.step == mine.step]
    return others[0] if others else None


def render_samples(runs: Sequence[RunFiles]) -> str:
    """Return the section's HTML, "" when no run has a sample."""
    groups = group_answers(runs)
    repeated = {p: a for p, a in groups.items() if len({(x.run, x.step) for x in a}) > 1}
    singles = sorted(
        ((p, a[0]) for p, a in groups.items() if p not in repeated), key=lambda one: (one[1].step, one[1].run)
    )
    parts = []
    if repeated:
        parts.append(
            "<p>The same prompts over time. Marked is what differs from the answer before, or from another "
            "run's at the same step: <ins>new words</ins>, <del>words that went</del>.</p>"
        )
        parts += [_render_card(p, repeated[p], runs) for p in spread(list(repeated), MAX_PROMPTS)]
    if singles:
        of_all = f"{MAX_SINGLES} of {len(singles)} prompts" if len(singles) > MAX_SINGLES else "Prompts"
        parts.append(f"<p>{of_all} that were answered once, from the first step to the last.</p>")
        rows = "".join(_render_single(p, a, runs) for p, a in spread(singles, MAX_SINGLES))
        parts.append(f'<div class="answers">{rows}</div>')
    return "".join(parts)


def _render_card(prompt: str, answers: Sequence[Answer], runs: Sequence[RunFiles]) -> str:
    kept = thin_answers(answers)
    rows = []
    for index, answer in enumerate(kept):
        earlier = find_earlier(kept, index)
        body = _render_changes(earlier.text, answer.text) if earlier else escape(_cut(answer.text))
        if earlier and earlier.text == answer.text:
            same = "unchanged" if earlier.run == answer.run else f"as {runs[earlier.run].name}"
            body += f' <span class="quiet">({escape(same)})</span>'
        rows.append(_render_answer(answer, body, runs))
    steps = f"{len({a.step for a in answers})} steps"
    return (
        f'<details class="card" open><summary><span class="prompt">{escape(_cut(prompt.strip(), 300))}</span>'
        f' <span class="quiet">{steps}</span></summary><div class="answers">{"".join(rows)}</div></details>'
    )


def _render_single(prompt: str, answer: Answer, runs: Sequence[RunFiles]) -> str:
    body = f'<span class="prompt">{escape(_cut(prompt.strip(), 300))}</span>\n{escape(_cut(answer.text))}'
    return _render_answer(answer, body, runs)


def _render_answer(answer: Answer, body: str, runs: Sequence[RunFiles]) -> str:
    facts = [f"<span>step {answer.step}</span>"]
    if is_number(answer.score):
        facts.append(f"<span>score {shown(float(answer.score))}</span>")
    if len(runs) > 1:
        facts.append(f'<span class="t{answer.run % 6}">{escape(runs[answer.run].name)}</span>')
    return (
        f'<div class="answer"><div class="when">{"".join(facts)}</div>'
        f'<div class="text">{body or "&nbsp;"}</div></div>'
    )


def _render_changes(before: str, after: str) -> str:
    before, after = _cut(before), _cut(after)
    changes = find_changes(before, after)
    if similarity(before, after) < FAR:
        changes = [Change(after, "new")]
    marks = {"same": "{}", "new": "<ins>{}</ins>", "gone": "<del>{}</del>"}
    return "".join(marks[change.kind].format(escape(change.text)) for change in changes)


def _cut(text: str, most: int = MAX_CHARACTERS) -> str:
    text = text.strip()
    return text if len(text) <= most else f"{text[:most]} [... {len(text) - most:,} characters]"
