"""Judged pairs as rows of `prompt`, `chosen`, `rejected`: what step 2 learns from. No torch in here."""

import json
from collections import Counter
from pathlib import Path

from common.runs.durable_files import write_file
from serving.judgement_store import JudgementStore, Pair


def export_pairs(store: JudgementStore, target: Path) -> Counter[str]:
    """Write a line of JSON for each decided pair; return how many were "written" and left out, by reason.

    The prompt is a list of role and content, so no text in it can be taken for a turn. A tie and "both bad"
    say nothing of which answer is better, and step 2's row form has no place for them: they are left out,
    as are pairs with an empty answer or two equal ones. Raises OSError when the file cannot be written.
    """
    counts: Counter[str] = Counter()
    lines = []
    for pair in store.judged():
        reason = _reason_to_leave_out(pair)
        counts[reason or "written"] += 1
        if not reason:
            lines.append(json.dumps(_row(pair), ensure_ascii=False) + "\n")
    write_file(target, "".join(lines))
    return counts


def _reason_to_leave_out(pair: Pair) -> str:
    if pair.choice not in ("a", "b"):
        return {"tie": "ties", "both_bad": "both bad"}[pair.choice or ""]
    answers = [(pair.answer_a or "").strip(), (pair.answer_b or "").strip()]
    if not all(answers):
        return "with an empty answer"
    return "with two equal answers" if answers[0] == answers[1] else ""


def _row(pair: Pair) -> dict:
    a, b = (pair.answer_a, pair.model_a), (pair.answer_b, pair.model_b)
    (chosen, chosen_model), (rejected, rejected_model) = (a, b) if pair.choice == "a" else (b, a)
    return {
        "prompt": [message._asdict() for message in pair.prompt],
        "chosen": chosen,
        "rejected": rejected,
        "chosen_model": chosen_model,
        "rejected_model": rejected_model,
    }
