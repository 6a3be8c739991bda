"""Known patterns of a hacked reward, a collapsed policy, an overfitted model; report.toml lists them.

Each diagnostic is a rule on the numbers of a few metrics, stated beside what it saw. It is a reason to read
samples, no proof.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from jinja2 import Environment

from tools.report import LAYOUT
from tools.report.charts import shown, smooth
from tools.report.run_reader import Curve, RunFiles

MIN_STEPS = 10  # of a curve in which reward hacking is looked for
_RULES = Environment(finalize=lambda value: shown(value) if isinstance(value, float) else value)

Curves = Mapping[str, Curve]
Diagnostic = dict[str, Any]  # title, rule (in words), needs, when, seen: see report.toml

HACKING: list[Diagnostic] = LAYOUT["hacking"]  # for runs of PPO
ANYWHERE: list[Diagnostic] = LAYOUT["anywhere"]


def find_diagnostics(curves: Curves, diagnostics: Sequence[Diagnostic]) -> list[tuple[Diagnostic, str]]:
    """Return each diagnostic whose metrics have enough steps, with what is seen of it, "" for nothing."""
    min_steps = MIN_STEPS if diagnostics is HACKING else 1
    found = []
    for one in diagnostics:
        needed = [curves[name] for name in one["needs"] if name in curves]
        if len(needed) < len(one["needs"]) or any(len(curve.values) < min_steps for curve in needed):
            continue
        numbers = numbers_of(needed) | {"falling": falling_rewards(curves)}
        is_seen = _RULES.compile_expression(one["when"])(numbers)
        found.append((one, _RULES.from_string(one["seen"]).render(numbers) if is_seen else ""))
    return found


def seen_diagnostics(run: RunFiles) -> list[tuple[Diagnostic, str]]:
    """Return the patterns that a run shows, each with what is seen."""
    found = find_diagnostics(run.curves, ANYWHERE)
    if run.kind == "ppo":
        found += find_diagnostics(run.curves, HACKING)
    return [(one, seen) for one, seen in found if seen]


def numbers_of(curves: Sequence[Curve]) -> dict[str, Any]:
    """Return what a rule may ask of its metrics, as report.toml tells it; lists are in their order."""
    smoothed = [smooth(curve.values, max(len(curve.values) // 5, 5)) for curve in curves]
    peak = smoothed[0].index(max(smoothed[0]))
    means = [early_and_late(curve) for curve in curves]
    halves = [len(curve.values) // 2 for curve in curves]
    return {
        "early": [early for early, _ in means],
        "late": [late for _, late in means],
        "last": [curve.last for curve in curves],
        "lowest": [min(curve.values) for curve in curves],
        "lowest_step": [curve.steps[curve.values.index(min(curve.values))] for curve in curves],
        "gain": [_gain(curve.values[: half or 1]) for curve, half in zip(curves, halves, strict=True)],
        "later_gain": [_gain(curve.values[half:]) for curve, half in zip(curves, halves, strict=True)],
        "start": smoothed[0][0],
        "at_peak": [values[min(peak, len(values) - 1)] for values in smoothed],
        "peak_step": curves[0].steps[peak],
        "peak_share": peak / len(smoothed[0]),
    }


def early_and_late(curve: Curve) -> tuple[float, float]:
    """Return the means of the first and of the last fifth of the values, five values at least."""
    width = max(len(curve.values) // 5, min(5, len(curve.values)))
    return fmean(curve.values[:width]), fmean(curve.values[-width:])


def _gain(values: list[float]) -> float:
    width = max(len(values) // 4, 2)
    return fmean(values[-width:]) - fmean(values[:width])


def falling_rewards(curves: Curves) -> list[str]:
    """Return what fell of the rewards that are logged on their own and agree with the score no more."""
    moves = []
    for name in (name for name in curves if name.startswith("objective/agreement_")):
        other = name.removeprefix("objective/agreement_")
        if f"objective/score_{other}" not in curves:
            continue
        early, late = early_and_late(curves[f"objective/score_{other}"])
        if late < early and early_and_late(curves[name])[1] < 0.1:
            moves.append(f"{other} went from {shown(early)} to {shown(late)}")
    return moves
