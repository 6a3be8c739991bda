"""What five algorithms learn of word problems whose answers are checked, over samples and over seconds.

Each run is training_scripts/verifiable/run.sh with LEVEL=gsm: 20 steps of 32 problems with 8 answers each,
all from one SFT model, seen by 256 held-out problems every 5 steps. Seconds are those of the steps on a core,
while the other has another run. `distill` learns from what 20 steps of GRPO with another seed made, whose
samples and seconds are not counted. 25 minutes on two quiet cores. It needs
`pip install --no-deps reasoning-gym`.
"""

import argparse
from typing import Any

from benchmarks.learning import ROOT, Case, Task, mean_curve
from tools.report.run_reader import Curve

X_NAME = "samples, or seconds"
SEEDS = 3
NAMES = ("ppo", "grpo", "rloo", "reinforce++", "distill")
SAMPLES = 32 * 8  # of a step
WHAT = "held-out problems right"


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, dict[str, Curve]]]:
    """Return each algorithm's curves, means of its seeds: samples, seconds, the share that is right."""
    task = Task("gsm", ROOT / "output/evidence/verifiable", "--max_train_steps 20 --eval_interval 5")
    quick = "--max_train_steps 2 --eval_fraction 0.2" if args.quick else ""
    runs = task.run_all([Case(name, name, SEEDS) for name in NAMES], quick=quick)
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
