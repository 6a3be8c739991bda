"""The plan of a run beside what its steps reached: seconds of the phases, and the peak of memory."""

from collections.abc import Mapping
from statistics import median
from typing import Any

from tools.report.run_reader import Curve

# Clocks of `StepCosts` by the start of a planned phase's name. The optimizer's clock is that of all models,
# so that those which are trained cannot be told apart.
CLOCKS = {
    "switch": ("switch",),
    "generate": ("generate",),
    "score actor": ("actor_score",),
    "score reference": ("reference",),
    "score critic": ("critic",),
    "score reward": ("reward",),
    "train": ("actor_update", "critic_update", "forward_backward", "optimizer"),
}


def compare_run(plan: Mapping[str, Any], curves: Mapping[str, Curve]) -> list[tuple[str, ...]]:
    """Texts of a table: its head, and a row for each phase, the step and the peak.

    `plan` is the content of plan.json, `curves` those of a run with a step. Reached seconds are medians of
    the steps but the first, which is slower; the peak is that of the first process.
    """
    seconds = {name: median(curve.values[1:] or curve.values) for name, curve in curves.items()}
    step = seconds["perf/step_seconds"]
    rows: list[tuple[str, float, float]] = []
    for start, clocks in CLOCKS.items():
        planned = {phase: of for phase, of in plan["seconds"].items() if phase.startswith(start)}
        reached = sum(seconds.get(f"perf/{clock}_seconds", 0.0) for clock in clocks)
        if planned:
            rows.append((", ".join(planned), sum(planned.values()), reached))
    rows.append(("left out of the plan", 0.0, step - sum(reached for _, _, reached in rows)))
    rows.append(("step", sum(plan["seconds"].values()), step))
    peak = curves["perf/peak_memory_gib"].last
    rows = [(f"{name}, seconds", *numbers) for name, *numbers in rows]
    for word in ("generate", "score", "train"):  # a GPU has a peak of each phase
        clocks = [clock for start, of in CLOCKS.items() if start.startswith(word) for clock in of]
        reached = [
            max(curves[name].values) for clock in clocks if (name := f"perf/{clock}_peak_gib") in curves
        ]
        planned = [gib for phase, gib in plan["memory_gib"].items() if phase.startswith(word)]
        if planned and reached:
            rows.append((f"peak of {word}, GiB", max(planned), max(reached)))
    rows.append(("peak of memory, GiB", max(plan["memory_gib"].values()), peak))
    texts = [(name, _text(a), _text(b), _text(b and a / b)) for name, a, b in rows]
    return [("", "planned", "reached", "planned / reached"), *texts]


def _text(number: float) -> str:
    return f"{number:.3g}" if number else "–"
