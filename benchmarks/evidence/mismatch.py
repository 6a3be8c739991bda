"""What it costs when the sampler's log-probabilities are not the trainer's: sums whose answers are checked.

Each run is training_scripts/verifiable/run.sh: 150 steps of 25 sums with 4 answers each, which are drawn by a
sampler with an error of so many nats a token (sampler_error.py). The trainer computes log-probabilities anew,
as most PPO programs do; a corrected run weighs them by `--rollout_correction tis:2`. A run has collapsed when
the score of its last 15 steps is below that of its first 15. All take an hour and a half on two quiet cores.
"""

import argparse
from typing import Any

from benchmarks.learning import ROOT, Case, Task, facts_of, mean_curve, summarise
from tools.report.run_reader import Curve

SEEDS, SEEDS_OF_LARGE = 8, 4
NATS, LARGE = ("1e-3", "1e-2", "3e-2"), ("1e-1", "3e-1", "1")
CORRECTED = ", corrected"


def build_cases() -> dict[str, dict[str, Case]]:
    """Return the cases of each panel by the name of their curve; those without an error are in two panels."""
    panels = {}
    for algorithm in ("ppo", "reinforce++"):
        exact = Case(f"{algorithm} 0", algorithm, SEEDS)
        kinds = [("biased", NATS, SEEDS), ("unbiased", NATS, SEEDS), ("biased", LARGE, SEEDS_OF_LARGE)]
        for kind, sizes, seeds in kinds:
            title = f"{algorithm}, {'large ' * (sizes == LARGE)}{kind} error"
            panels[title] = cases = {"0": exact}
            for more, how in (("", "none"), (CORRECTED, "tis:2")):
                words = f"{algorithm} --plugins benchmarks.evidence.sampler_error --rollout_correction {how}"
                for nats in sizes[bool(more) :]:  # what the smallest does is not worth correcting
                    name = f"{algorithm} {kind} {nats}{more}"
                    cases[f"{nats}{more}"] = Case(name, words, seeds, {"SAMPLER_ERROR": f"{kind}:{nats}"})
    return panels


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, dict[str, Curve]]]:
    """Return what each case ended with, and the curves of the means of its seeds."""
    metrics = {"score": "objective/score", "kl": "objective/kl"}
    flags = "--per_device_generation_batch_size 25 --max_train_steps 150"
    task = Task("sums", ROOT / "output/evidence/mismatch", flags, **metrics, every=15)
    panels = build_cases()
    cases = {case.name: case for panel in panels.values() for case in panel.values()}
    if args.quick:
        cases = {name: cases[name] for name in ("ppo 0", "ppo biased 3e-2", "ppo unbiased 3e-2, corrected")}
    runs = task.run_all(list(cases.values()), quick="--max_train_steps 2" if args.quick else "")
    curves: dict[str, dict[str, Curve]] = {}
    for title, panel in panels.items():
        of_title = {name: runs[case.name] for name, case in panel.items() if case.name in runs}
        curves[f"score: {title}"] = {name: mean_curve(of) for name, of in of_title.items()}
        curves[f"KL: {title}"] = {name: mean_curve(of, "kl") for name, of in of_title.items()}
    found = {name: summarise(of, runs[f"{name.split()[0]} 0"]) for name, of in runs.items()}
    return facts_of(found, runs), curves
