"""Pages of docs/results that are runs of a step's program: the TOML files next to this one.

A file defines a section's cases: the words of a command, the number of seeds (from 1), and environment
variables. Runs execute in parallel, one per core of this process, one thread each. A finished run is only
read.

  command, environment  of every run, with {words}, {flags}, {seed}, {folder}, {run}, {data} and any other key
  prepare               commands that run first, each with a separate folder as its {run}
  prepared              the prepared runs of which the last values of `prepared_metrics` are kept
  metrics, means        curves that are kept, and metrics that are averaged over all steps
  score                 the metric that cases are compared by
  every                 number of values that a point of a curve is the mean of
  x_axes                further x axes of a curve: units per step
  base                  of a case: the case that its cost is relative to, seed by seed
  best_of_n             of a case: columns of its saved responses; its curves are over n (best_of_n.py)
  compared              values that are compared with the best of n at equal KL
  figures, panels       each figure is drawn for each panel, which has label = case
  quick                 overrides for --quick
"""

import os
import random
import shlex
import statistics
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.evidence import best_of_n
from common.runs.run_files import FINISHED_FILE
from tools.report.run_reader import Curve, read_run

ROOT = Path(__file__).resolve().parents[2]
DIGITS = 6  # of stored values
NUM_JOBS = len(os.sched_getaffinity(0))  # runs at a time, one thread each
DEFAULTS: dict[str, Any] = {
    "command": "bash training_scripts/verifiable/run.sh {words} {flags} --seed {seed}",
    "environment": {"LEVEL": "{level}", "OUTPUT_DIR": "{folder}", "RUN_DIR": "{run}"},
    "prepare": {"sft": "bash training_scripts/verifiable/run.sh sft"},
    "score": "scores",
    "metrics": {"scores": "eval/pass_rate", "kl": "eval/kl"},
    "means": {"gap": "policy/logprob_gap"},  # |sampler - trainer|, nats per token
    "every": 1,
    "x_axes": {},
    "prepared": (),
}
Section = dict[str, Any]
Measured = tuple[dict[str, Any], dict[str, dict[str, Curve]], str]
Runs = dict[str, list[dict[str, Any]]]  # by case


def read_section(name: str, *, is_quick: bool = False, data: Sequence[str] = ()) -> Section:
    """A section's file over the defaults; with `is_quick` its quick cases, one seed each."""
    text = Path(__file__).with_name(f"{name}.toml").read_text()
    section = DEFAULTS | tomllib.loads(text) | {"data": shlex.join(data)}
    if is_quick:
        section |= section["quick"]
        names = section.get("quick_cases", section["cases"])
        section["cases"] = {case: section["cases"][case] | {"seeds": 1} for case in names}
    if "{data}" in text and not data:
        raise SystemExit(f"error: {name} needs --data_path")
    return section


def measure(name: str, *, is_quick: bool, data: Sequence[str] = ()) -> Measured:
    """Run the missing runs of a section; return its facts, the panels of its figure, and its horizontal
    axis.
    """
    section = read_section(name, is_quick=is_quick, data=data)
    with tempfile.TemporaryDirectory() as scratch:
        folder = ROOT / "output/evidence" / name
        if is_quick:
            folder = Path(scratch)
        runs = run_all(section, folder)
        facts = describe(section, runs)
        for of in section["prepared"]:
            curves = read_run(folder / of).curves
            metrics = section["prepared_metrics"].items()
            facts[of] = {key: curves[metric].last for key, metric in metrics if metric in curves}
    return facts, draw(section, runs), section.get("x_name", "step")


def run_all(section: Section, folder: Path) -> Runs:
    """The runs of each case; those missing from the folder are run."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in section["prepare"].items():
        done = folder / f"{name}.done"
        if not done.exists():
            run_alone(section | {"command": command, "folder": folder, "run": folder / name})
            done.touch()
    jobs = [(name, seed) for name, case in section["cases"].items() for seed in range(1, case["seeds"] + 1)]
    with ThreadPoolExecutor(NUM_JOBS) as pool:
        runs = list(pool.map(lambda job: run_case(section, folder, *job), jobs))
    return {name: [run for run in runs if run["name"] == name] for name in section["cases"]}


def run_case(section: Section, folder: Path, name: str, seed: int) -> dict[str, Any]:
    """The kept curves of a run by step, and the cumulative seconds of its steps."""
    place = folder / f"{name}-{seed}".replace(":", "_").replace(" ", "_")
    if not (place / FINISHED_FILE).is_file():
        case = section["cases"][name]
        environment = section["environment"] | case.get("environment", {})
        run_alone(section | case | {"folder": folder, "run": place, "seed": seed, "environment": environment})
    columns = section["cases"][name].get("best_of_n")
    if columns:
        return {"name": name, "seed": seed} | best_of_n.measure_best(place, columns, section["score"])
    curves = read_run(place).curves
    kept = {key: thin(curves[metric], section["every"]) for key, metric in section["metrics"].items()}
    run: dict[str, Any] = {"name": name, "seed": seed}
    for key, metric in section["means"].items():
        run[key] = statistics.fmean(curves[metric].values)
    took = curves["perf/step_seconds"]
    clock = dict(zip(took.steps, accumulate(took.values), strict=True))
    run["steps"] = kept[section["score"]].steps
    run["seconds"] = [round(clock.get(step, 0.0), 1) for step in run["steps"]]
    for axis, factor in section["x_axes"].items():
        run[axis] = [step * factor for step in run["steps"]]
    for key, curve in kept.items():
        run[key] = curve.values
        if curve.steps != run["steps"]:
            run[f"{key}_steps"] = curve.steps
    shown = ", ".join(f"{value:.3f}" for value in run[section["score"]])
    print(f"{name}, seed {seed}: {shown}; {run['seconds'][-1]} seconds", flush=True)
    return run


def run_alone(values: Mapping[str, Any]) -> None:
    """Run `command` with `values` filled in, in one thread; its output is shown if it fails."""
    text = values["command"]
    while "{" in text:  # words and flags contain keys too
        text = text.format(**values)
    command = shlex.split(text)
    environment = {key: value.format(**values) for key, value in values["environment"].items()}
    env = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"} | environment
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {shlex.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def thin(curve: Curve, every: int) -> Curve:
    """Curve of the means of `every` successive values, each at the step of the last one."""
    starts = range(0, len(curve.values) - every + 1, every)
    steps = [curve.steps[start + every - 1] for start in starts]
    return Curve(steps, [statistics.fmean(curve.values[start : start + every]) for start in starts])


# ---- facts and figure -----------------------------------------------------------------------------------


def describe(section: Section, runs: Runs) -> dict[str, Any]:
    """Facts of a section: the final values of each case, and all runs."""
    cases = {}
    for name, rows in runs.items():
        cases[name] = summarise(section, rows, runs[section["cases"][name].get("base", name)])
    facts = {"cases": cases, "runs": [shortened(run) for rows in runs.values() for run in rows]}
    best = next((runs[name][0] for name in runs if "best_of_n" in section["cases"][name]), None)
    if best:
        others = [run for rows in runs.values() for run in rows if run is not best]
        names = section["compared"]
        facts["at_equal_kl"] = [
            row for run in others for row in best_of_n.compare_at_equal_kl(run, best, names)
        ]
    return facts


def shortened(run: dict[str, Any]) -> dict[str, Any]:
    """A run for a file of facts, with its curves rounded to `DIGITS` decimals."""
    curves = {key: value for key, value in run.items() if isinstance(value, list)}
    return run | {key: [round(number, DIGITS) for number in values] for key, values in curves.items()}


def summarise(section: Section, runs: Sequence[dict], base: Sequence[dict]) -> dict[str, Any]:
    """Final values of a case's runs; a run that ends below its first score has collapsed.

    `cost` is how much higher `base`, with runs of the same seeds, ends: the mean, and its 95 % interval.
    Other metrics are means over seeds.
    """
    score = section["score"]
    last = [run[score][-1] for run in runs]
    costs = [other[score][-1] - end for other, end in zip(base, last, strict=False)]
    summary = {
        "before": statistics.fmean(run[score][0] for run in runs),
        "after": statistics.fmean(last),
        "lowest": min(last),
        "highest": max(last),
        "deviation": statistics.pstdev(last),
        "collapsed": sum(run[score][-1] < run[score][0] for run in runs),
        "cost": mean_with_interval(costs),
    }
    for name in {*section["metrics"]} & {*runs[0]} - {score}:
        summary[name] = statistics.fmean(run[name][-1] for run in runs)
    for name in {*section["means"]} & {*runs[0]}:
        summary[name] = statistics.fmean(run[name] for run in runs)
    return summary


def mean_with_interval(numbers: Sequence[float]) -> list[float]:
    """The mean and its 95 % bootstrap interval, from 10,000 resamples."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(numbers, k=len(numbers))) for _ in range(10_000))
    return [statistics.fmean(numbers), means[250], means[9749]]


def draw(section: Section, runs: Runs) -> dict[str, dict[str, Curve]]:
    """The panels of a section's figure; a curve is the mean of its case's runs, or the lowest of them."""
    drawn = {}
    for panel, cases in section["panels"].items():
        for figure in section["figures"]:
            if panel not in figure.get("panels", [panel]):
                continue
            curves = {}
            for label, name in cases.items():
                if name in runs:
                    rows = runs[name][: section.get("drawn_seeds")]
                    if figure.get("is_lowest"):
                        rows = [min(rows, key=lambda run: run[section["score"]][-1])]
                    curves[label] = mean_curve(rows, figure["metric"], figure.get("over", "steps"))
            if curves:
                drawn[figure["title"].format(panel)] = curves
    return drawn


def mean_curve(runs: Sequence[dict[str, Any]], metric: str, over: str) -> Curve:
    """The mean of the runs' curves."""
    values = [statistics.fmean(point) for point in zip(*(run[metric] for run in runs), strict=True)]
    places = [statistics.fmean(point) for point in zip(*(run[over] for run in runs), strict=True)]
    return Curve(places, values)
