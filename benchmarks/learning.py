"""Runs of training_scripts/verifiable/run.sh, several at a time, and their curves on held-out problems."""

import os
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
    """What a curve is of: the script's words."""

    name: str
    words: str
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

    def prepare(self, *algorithms: str) -> None:
        """Make what runs begin with: the SFT model, and what these algorithms train of it."""
        self.call("sft", self.folder / "sft")
        for name in algorithms:
            if not (self.folder / name / FINISHED_FILE).is_file():
                self.call(f"{name} {self.flags}", self.folder / name)

    def call(self, words: str, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        """Run the script; what it prints is shown where it fails."""
        knobs = {
            "LEVEL": self.level,
            "OUTPUT_DIR": str(self.folder),
            "RUN_DIR": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        command = ["bash", SCRIPT, *words.split()]
        env = os.environ | knobs | (environment or {})
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"error: {' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")

    def run_all(self, cases: Sequence[Case], num_seeds: int) -> dict[str, list[dict[str, Any]]]:
        """Return the runs of each case, seeds from 1 on; what is there already is only read."""
        jobs = [(case, seed) for seed in range(1, num_seeds + 1) for case in cases]
        with ThreadPoolExecutor(NUM_JOBS) as pool:
            runs = list(pool.map(lambda job: self._run(*job), jobs))
        return {case.name: [run for run in runs if run["name"] == case.name] for case in cases}

    def _run(self, case: Case, seed: int) -> dict[str, Any]:
        """Return a run's evaluations by step, with the run's clock at the end of each."""
        folder = self.folder / f"{case.name}-{seed}".replace(":", "_").replace(" ", "_")
        if not (folder / FINISHED_FILE).is_file():
            self.call(f"{case.words} {self.flags} --seed {seed}", folder, case.environment)
        run = read_run(folder)
        score, kl = (thin(run.curves[name], self.every) for name in (self.score, self.kl))
        clock = {row["step"]: row["seconds"] for row in run.rows if "seconds" in row}
        seconds = [round(clock.get(step, 0.0)) for step in score.steps]
        shown = ", ".join(f"{value:.3f}" for value in score.values)
        print(f"{case.name}, seed {seed}: {shown}; {seconds[-1]} seconds", flush=True)
        gap = statistics.fmean(run.curves["policy/logprob_gap"].values)  # |sampler - trainer|, nats a token
        found = {"steps": score.steps, "seconds": seconds, "scores": score.values, "kl": kl.values}
        return {"name": case.name, "seed": seed, "gap": gap} | found


def thin(curve: Curve, every: int) -> Curve:
    """Return the curve of the means of `every` values, each at the last one's step."""
    starts = range(0, len(curve.values) - every + 1, every)
    steps = [curve.steps[start + every - 1] for start in starts]
    return Curve(steps, [statistics.fmean(curve.values[start : start + every]) for start in starts])


def summarise(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return what the runs of a case ended with; one has collapsed that ends below its first score."""
    last = [run["scores"][-1] for run in runs]
    return {
        "before": statistics.fmean(run["scores"][0] for run in runs),
        "after": statistics.fmean(last),
        "lowest": min(last),
        "highest": max(last),
        "deviation": statistics.pstdev(last),
        "collapsed": sum(run["scores"][-1] < run["scores"][0] for run in runs),
        "kl": statistics.fmean(run["kl"][-1] for run in runs),
        "gap": statistics.fmean(run["gap"] for run in runs),
    }


def mean_curve(runs: Sequence[dict[str, Any]], what: str = "scores") -> Curve:
    """Return the mean of the runs' curves."""
    return Curve(
        runs[0]["steps"], [statistics.fmean(of) for of in zip(*(run[what] for run in runs), strict=True)]
    )
