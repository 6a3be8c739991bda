"""What five algorithms learn of word problems whose answers are checked, over samples and over seconds.

Each run is one of bench_algorithms.py's, made again for its clock: 20 steps of 32 problems, 8 answers each,
all from one SFT model, seen by 256 held-out problems every 5 steps. Seconds are those of the steps on a core,
while the other has another run. `distill` learns from what 20 steps of GRPO with another seed made, whose
samples and seconds are not counted. 25 minutes on two quiet cores. It needs
`pip install --no-deps reasoning-gym`.
"""

import argparse
from typing import Any

from benchmarks.bench_algorithms import FLAGS, QUICK_FLAGS
from benchmarks.learning import ROOT, Case, Task, mean_curve
from tools.report.run_reader import Curve

X_NAME = "samples, or seconds"
SEEDS = 3
NAMES = ("ppo", "grpo", "rloo", "reinforce++", "distill")
SAMPLES = 32 * 8  # of a step
WHAT = "held-out problems right"


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, dict[str, Curve]]]:
    """Return each algorithm's curves, means of its seeds: samples, seconds, the share that is right."""
    task = Task("gsm", ROOT / "output/evidence/verifiable", FLAGS)
    cases = [Case(name, name, SEEDS) for name in NAMES]
    runs = task.run_all(cases, quick=QUICK_FLAGS if args.quick else "")
    found = {}
    for name, of in runs.items():
        scores = mean_curve(of)
        last = [run["scores"][-1] for run in of]
        seconds = mean_curve(of, "seconds").values
        found[name] = {"samples": [step * SAMPLES for step in scores.steps], "seconds": seconds}
        found[name] |= {"scores": scores.values, "lowest": min(last), "highest": max(last)}
    panels = {
        f"{WHAT}, over {over}": {name: Curve(of[over], of["scores"]) for name, of in found.items()}
        for over in ("samples", "seconds")
    }
    return {"cases": found, "runs": [run for of in runs.values() for run in of]}, panels
