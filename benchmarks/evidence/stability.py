"""PPO from twenty seeds, and ten of them with a mistake: word problems whose answers are checked.

Each run is training_scripts/verifiable/run.sh with LEVEL=gsm: 20 steps of 32 problems with 4 answers each and
four optimizer steps, cut into micro-batches of 800 tokens at most. A run has collapsed when it ends below the
SFT model's score. All take an hour on two quiet CPU cores. Needs `pip install --no-deps reasoning-gym`.
"""

import argparse
from typing import Any

from benchmarks.evidence.faults import FAULTS
from benchmarks.learning import KL, ROOT, SCORE, Case, Task, facts_of, mean_curve, summarise
from tools.report.run_reader import Curve

OURS = "ours"
SEEDS, WITH_MISTAKE = 20, 10
PLUGIN = "ppo --plugins benchmarks.evidence.faults"


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, dict[str, Curve]]]:
    """Return what each case ended with, and the curves of their means and of the lowest seeds."""
    flags = "--num_samples_per_prompt 4 --per_device_training_batch_size 32 --max_tokens_per_micro_batch 800"
    flags += " --max_train_steps 20 --eval_interval 10"
    task = Task("gsm", ROOT / "output/evidence/stability", flags)
    cases = [Case(OURS, "ppo", SEEDS)]
    cases += [Case(name, PLUGIN, WITH_MISTAKE, {"FAULT": name}) for name in FAULTS]
    quick = "--max_tokens_per_micro_batch 200 --max_train_steps 2 --eval_fraction 0.2"
    runs = task.run_all(cases, quick=quick if args.quick else "")
    found = {name: summarise(of, runs[OURS]) for name, of in runs.items()}
    same = {name: of[:WITH_MISTAKE] for name, of in runs.items()}
    curves = {
        f"{SCORE}, mean of the same seeds": {name: mean_curve(of) for name, of in same.items()},
        f"{SCORE}, the seed that ends lowest": {
            name: mean_curve([min(of, key=lambda run: run["scores"][-1])]) for name, of in same.items()
        },
        f"{KL}, mean of the same seeds": {name: mean_curve(of, "kl") for name, of in same.items()},
    }
    return facts_of(found, runs), curves
