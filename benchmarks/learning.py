"""Runs of training_scripts/verifiable/run.sh, several at a time, and their curves on held-out problems."""

import os
import random
import statistics
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from common.runs.run_files import FINISHED_FILE
from tools.report.run_reader import Curve, read_run

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = "training_scripts/verifiable/run.sh"
SCORE, KL = "eval/pass_rate", "eval/kl"
NUM_JOBS = len(os.sched_getaffinity(0))  # runs at a time, one thread each


@dataclass(frozen=True)
class Case:
    """What a curve is of: the script's words, run with seeds from 1 on."""

    name: str
    words: str
    num_seeds: int
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Task:
    """The script's level, where its runs go, the flags that all of them have, and the metrics that are kept.

    `every`: a point of a curve is the mean of so many values.
    """

    level: str
    folder: Path
    flags: str
    score: str = SCORE
    kl: str = KL
    every: int = 1

    def run_all(self, cases: Sequence[Case], *, quick: str = "") -> dict[str, list[dict[str, Any]]]:
        """Return the runs of each case; what is there already is only read.

        `quick`: sums with these flags, one seed each, in a folder that goes away.
        """
        if quick:
            with tempfile.TemporaryDirectory() as folder:
                tiny = replace(self, level="sums", folder=Path(folder), flags=quick, every=1)
                return tiny.run_all([replace(case, num_seeds=1) for case in cases])
        self.call("sft", self.folder / "sft")
        teacher = self.folder / "grpo"
        if any("distill" in case.words for case in cases) and not (teacher / FINISHED_FILE).is_file():
            self.call(f"grpo {self.flags}", teacher)
        most = max(case.num_seeds for case in cases)
        jobs = [(case, seed) for seed in range(1, most + 1) for case in cases if seed <= case.num_seeds]
        with ThreadPoolExecutor(NUM_JOBS) as pool:
            runs = list(pool.map(lambda job: self._run(*job), jobs))
        return {case.name: [run for run in runs if run["name"] == case.name] for case in cases}

    def call(self, words: str, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        """Run the script."""
        knobs = {"LEVEL": self.level, "OUTPUT_DIR": str(self.folder), "RUN_DIR": str(folder)}
        run_alone(["bash", SCRIPT, *words.split()], knobs | dict(environment or {}))

    def _run(self, case: Case, seed: int) -> dict[str, Any]:
        """Return a run's evaluations by step, with the seconds that its steps took up to each."""
        folder = self.folder / f"{case.name}-{seed}".replace(":", "_").replace(" ", "_")
        if not (folder / FINISHED_FILE).is_file():
            self.call(f"{case.words} {self.flags} --seed {seed}", folder, case.environment)
        run = read_run(folder)
        score, kl = (thin(run.curves[name], self.every) for name in (self.score, self.kl))
        took = run.curves["perf/step_seconds"]
        clock = dict(zip(took.steps, accumulate(took.values), strict=True))
        seconds = [round(clock.get(step, 0.0), 1) for step in score.steps]
        shown = ", ".join(f"{value:.3f}" for value in score.values)
        print(f"{case.name}, seed {seed}: {shown}; {seconds[-1]} seconds", flush=True)
        gap = statistics.fmean(run.curves["policy/logprob_gap"].values)  # |sampler - trainer|, nats a token
        found = {"steps": score.steps, "seconds": seconds, "scores": score.values, "kl": kl.values}
        return {"name": case.name, "seed": seed, "gap": gap} | found


def run_alone(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run a command in the repository with one thread; what it prints is shown where it fails."""
    env = os.environ | {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"} | environment
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def thin(curve: Curve, every: int) -> Curve:
    """Return the curve of the means of `every` values, each at the last one's step."""
    starts = range(0, len(curve.values) - every + 1, every)
    steps = [curve.steps[start + every - 1] for start in starts]
    return Curve(steps, [statistics.fmean(curve.values[start : start + every]) for start in starts])


def summarise(runs: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the runs of a case ended with; one has collapsed that ends below its first score.

    `cost` is by how much `base`, runs of the same seeds, end above: the mean, and its 95 % interval.
    """
    last = [run["scores"][-1] for run in runs]
    costs = [of["scores"][-1] - score for of, score in zip(base[: len(last)], last, strict=True)]
    return {
        "before": statistics.fmean(run["scores"][0] for run in runs),
        "after": statistics.fmean(last),
        "lowest": min(last),
        "highest": max(last),
        "deviation": statistics.pstdev(last),
        "collapsed": sum(run["scores"][-1] < run["scores"][0] for run in runs),
        "cost": mean_with_interval(costs),
        "kl": statistics.fmean(run["kl"][-1] for run in runs),
        "gap": statistics.fmean(run["gap"] for run in runs),
    }


def facts_of(cases: dict[str, Any], runs: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return what a section's file has: what each case came to, and the runs of all."""
    return {"cases": cases, "runs": [run for of in runs.values() for run in of]}


def mean_with_interval(numbers: Sequence[float]) -> list[float]:
    """Return the mean and its 95 % interval, by 10,000 means of as many numbers drawn with replacement."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(numbers, k=len(numbers))) for _ in range(10_000))
    return [statistics.fmean(numbers), means[250], means[9749]]


def mean_curve(runs: Sequence[dict[str, Any]], what: str = "scores", *, over: str = "steps") -> Curve:
    """Return the mean of the runs' curves."""
    means = [statistics.fmean(of) for of in zip(*(run[what] for run in runs), strict=True)]
    return Curve(runs[0][over], means)
