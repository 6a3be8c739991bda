"""Known patterns of reward hacking, policy collapse and overfitting; report.toml lists them.

Each diagnostic is a rule on a few metrics, shown with the observed numbers. It is a reason to read
samples, not a proof.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from jinja2 import Environment

from tools.report import LAYOUT
from tools.report.charts import shown, smooth
from tools.report.run_reader import Curve

MIN_STEPS = 10  # shortest curve that is checked for reward hacking
_RULES = Environment(finalize=lambda value: shown(value) if isinstance(value, float) else value)

Curves = Mapping[str, Curve]
Diagnostic = dict[str, Any]  # title, rule (in words), needs, when, seen: see report.toml

HACKING: list[Diagnostic] = LAYOUT["hacking"]  # rules on PPO's metrics
DIAGNOSTICS: list[Diagnostic] = LAYOUT["anywhere"] + HACKING


def find_diagnostics(curves: Curves) -> list[tuple[Diagnostic, str]]:
    """Each diagnostic whose metrics have enough steps, with its observation, "" for none."""
    diagnostics = []
    for one in DIAGNOSTICS:
        min_steps = MIN_STEPS if one in HACKING else 1
        needed = {name: curves[metric] for name, metric in one["needs"].items() if metric in curves}
        if len(needed) < len(one["needs"]) or any(len(c.values) < min_steps for c in needed.values()):
            continue
        numbers = numbers_of(needed) | {"falling": falling_rewards(curves)}
        is_seen = _RULES.compile_expression(one["when"])(numbers)
        diagnostics.append((one, _RULES.from_string(one["seen"]).render(numbers) if is_seen else ""))
    return diagnostics


def numbers_of(curves: Curves) -> dict[str, Any]:
    """The numbers of each metric that a rule may use, as report.toml lists them."""
    numbers: dict[str, Any] = {}
    peak = None  # index of the first metric's peak
    for name, curve in curves.items():
        values = curve.values
        half = len(values) // 2
        smoothed = smooth(values, max(len(values) // 5, 5))
        peak = smoothed.index(max(smoothed)) if peak is None else min(peak, len(values) - 1)
        early, late = early_and_late(curve)
        numbers[name] = {
            "early": early,
            "late": late,
            "last": curve.last,
            "lowest": min(values),
            "lowest_step": curve.steps[values.index(min(values))],
            "gain": _gain(values[: half or 1]),
            "later_gain": _gain(values[half:]),
            "start": smoothed[0],
            "at_peak": smoothed[peak],
            "peak_step": curve.steps[peak],
            "peak_share": peak / len(values),
        }
    return numbers


def early_and_late(curve: Curve) -> tuple[float, float]:
    """The means of the first and of the last fifth of the values, five values at least."""
    width = max(len(curve.values) // 5, 5)
    return fmean(curve.values[:width]), fmean(curve.values[-width:])


def _gain(values: list[float]) -> float:
    width = max(len(values) // 4, 2)
    return fmean(values[-width:]) - fmean(values[:width])


def falling_rewards(curves: Curves) -> list[str]:
    """Rewards, each logged separately, that fell and no longer agree with the score."""
    moves = []
    for name in curves:
        other = name.removeprefix("objective/agreement_")
        reward = curves.get(f"objective/score_{other}")
        if other == name or reward is None:
            continue
        early, late = early_and_late(reward)
        if late < early and early_and_late(curves[name])[1] < 0.1:
            moves.append(f"{other} went from {shown(early)} to {shown(late)}")
    return moves
