"""Known patterns of a hacked reward, a collapsed policy, an overfitted model; report.toml lists them.

Each diagnostic is a rule on means over the first and the last fifth of the steps (five at least), stated
beside what it saw. It is a reason to read samples, no proof.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from jinja2 import Environment

from tools.report import LAYOUT
from tools.report.charts import shown, smooth
from tools.report.run_reader import Curve, RunFiles

MIN_STEPS = 10  # of a curve in which reward hacking is looked for
_RULES = Environment(finalize=lambda value: shown(value) if isinstance(value, float) else value)

Curves = Mapping[str, Curve]


@dataclass(frozen=True)
class Diagnostic:
    """A pattern and its rule in words; `when` and `seen`, or the function `check`, apply it to metrics."""

    title: str
    rule: str
    needs: list[str]
    when: str = ""
    seen: str = ""
    check: str = ""
    min_steps: int = 1

    def look(self, curves: Curves) -> str:
        """Return what is seen of the pattern, "" for nothing."""
        if self.check:
            return _CHECKS[self.check](curves)
        needed = [curves[name] for name in self.needs]
        numbers: dict[str, Any] = {
            "early": [early_and_late(curve)[0] for curve in needed],
            "late": [early_and_late(curve)[1] for curve in needed],
            "last": [curve.last for curve in needed],
            "lowest": [min(curve.values) for curve in needed],
            "lowest_step": [curve.steps[curve.values.index(min(curve.values))] for curve in needed],
        }
        if not _RULES.compile_expression(self.when)(numbers):
            return ""
        return _RULES.from_string(self.seen).render(numbers)


HACKING = [Diagnostic(**one, min_steps=MIN_STEPS) for one in LAYOUT["hacking"]]  # for runs of PPO
ANYWHERE = [Diagnostic(**one) for one in LAYOUT["anywhere"]]


def find_diagnostics(curves: Curves, diagnostics: Sequence[Diagnostic]) -> list[tuple[Diagnostic, str]]:
    """Return each diagnostic whose metrics have enough steps, with what is seen of it, "" for nothing."""
    return [
        (one, one.look(curves))
        for one in diagnostics
        if all(name in curves and len(curves[name].values) >= one.min_steps for name in one.needs)
    ]


def seen_diagnostics(run: RunFiles) -> list[tuple[Diagnostic, str]]:
    """Return the patterns that a run shows, each with what is seen."""
    diagnostics = [*ANYWHERE, *(HACKING if run.kind == "ppo" else ())]
    return [(one, seen) for one, seen in find_diagnostics(run.curves, diagnostics) if seen]


def early_and_late(curve: Curve) -> tuple[float, float]:
    """Return the means of the first and of the last fifth of the values, five values at least."""
    width = max(len(curve.values) // 5, min(5, len(curve.values)))
    return fmean(curve.values[:width]), fmean(curve.values[-width:])


def _over_optimised(curves: Curves) -> str:
    score, kl = curves["objective/score"], curves["objective/kl"]
    width = max(len(score.values) // 5, 5)
    means = smooth(score.values, width)
    start, top = means[0], max(means)
    peak = means.index(top)
    late = early_and_late(score)[1]
    if peak >= len(means) * 0.8 or top <= start or top - late < 0.2 * (top - start):
        return ""
    kl_then, kl_now = smooth(kl.values, width)[min(peak, len(kl.values) - 1)], early_and_late(kl)[1]
    if kl_now < 1.2 * kl_then or kl_now <= 0:
        return ""
    return (
        f"the score had its highest mean, {shown(top)}, near step {score.steps[peak]} and is {shown(late)} "
        f"now, while KL rose from {shown(kl_then)} to {shown(kl_now)} nats a response"
    )


def _flat_score(curves: Curves) -> str:
    halves = []
    for name in ("objective/score", "objective/kl"):
        values = curves[name].values
        middle = len(values) // 2
        halves.append((_gain(values[:middle]), _gain(values[middle:])))
    (first, second), (kl_first, kl_second) = halves
    if abs(second) > 0.1 * first or kl_second <= 0 or kl_second < 0.5 * kl_first:
        return ""
    return (
        f"the first half of the steps brought {shown(first)} of score, the second {shown(second)}, and KL "
        f"rose by {shown(kl_first)} and {shown(kl_second)} nats a response"
    )


def _gain(values: list[float]) -> float:
    width = max(len(values) // 4, 2)
    return fmean(values[-width:]) - fmean(values[:width])


def _another_reward_falls(curves: Curves) -> str:
    score_early, score_late = early_and_late(curves["objective/score"])
    moves = []
    for name in (name for name in curves if name.startswith("objective/agreement_")):
        other = name.removeprefix("objective/agreement_")
        if score_late <= score_early or f"objective/score_{other}" not in curves:
            continue
        early, late = early_and_late(curves[f"objective/score_{other}"])
        if late < early and early_and_late(curves[name])[1] < 0.1:
            moves.append(f"{other} went from {shown(early)} to {shown(late)}")
    score = f"while the score went from {shown(score_early)} to {shown(score_late)}"
    return f"{'; '.join(moves)}, {score}" if moves else ""


_CHECKS: dict[str, Callable[[Curves], str]] = {
    "over_optimised": _over_optimised,
    "flat_score": _flat_score,
    "another_reward_falls": _another_reward_falls,
}
