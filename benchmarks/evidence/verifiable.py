"""What each algorithm, policy loss, correction and divergence learns where answers can be checked.

Each run is a command of the table, `training_scripts/verifiable/run.sh` with LEVEL=gsm: word problems
(`pip install --no-deps reasoning-gym`), 20 steps of 32 problems with 8 answers each, from one SFT model whose
teacher was careless. It is seen by its right answers to 256 held-out problems, every 5 steps. As many runs at
a time as this process may use cores, one thread each; seconds are those of the steps. A student of `distill`
learns from what 20 steps of GRPO with another seed made, whose samples and seconds are not counted. An hour
on two quiet cores.
"""

import argparse
from collections.abc import Iterable
from typing import Any

from benchmarks.learning import ROOT, Case, Task, facts_of, mean_curve
from tools.report.run_reader import Curve

X_NAME = "samples, or seconds"
SEEDS = 3
SAMPLES = 32 * 8  # of a step
STALE = "grpo --rollout_staleness 4 --rollout_correction"
# By the panel that shows it: the name of a curve, and the script's words.
PANELS = {
    "algorithms": {name: name for name in ("ppo", "grpo", "rloo", "reinforce++", "distill")},
    "more algorithms": {name: name for name in ("remax", "dr_grpo", "reinforce++-baseline")},
    "policy losses of grpo": {
        "ppo:dual_clip=3": "grpo --policy_loss ppo:dual_clip=3",
        "gspo": "grpo --policy_loss gspo",
        "cispo": "grpo --policy_loss cispo",
    },
    "corrections, grpo, rollouts 4 steps old": {
        "none": f"{STALE} none",
        "tis": f"{STALE} tis:2",
        "mis": f"{STALE} mis:0.5,2",
        "seq_tis": f"{STALE} seq_tis:2",
        "seq_mis": f"{STALE} seq_mis:0.5,2",
        "geo_rs": f"{STALE} geo_rs:0.999,1.001",
    },
    "divergences of distill, no reward": {
        "forward_kl": "distill --distill_loss forward_kl",
        "jsd:0.5": "distill --distill_loss jsd:0.5",
        "sampled": "distill --distill_loss sampled",
    },
}
CASES = {name: words for panel in PANELS.values() for name, words in panel.items()}
QUICK = ("ppo", "distill", "gspo", "tis")
FLAGS, QUICK_FLAGS = "--max_train_steps 20 --eval_interval 5", "--max_train_steps 2 --eval_fraction 0.2"


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, dict[str, Curve]]]:
    """Return the curves of each case, means of its seeds: samples, seconds, the share that is right."""
    task = Task("gsm", ROOT / "output/evidence/verifiable", FLAGS)
    cases = [Case(name, CASES[name], SEEDS) for name in (QUICK if args.quick else CASES)]
    runs = task.run_all(cases, quick=QUICK_FLAGS if args.quick else "")
    found = {}
    for name, of in runs.items():
        scores, seconds = mean_curve(of), mean_curve(of, "seconds")
        last = [run["scores"][-1] for run in of]
        found[name] = {"words": CASES[name], "samples": [step * SAMPLES for step in scores.steps]}
        found[name] |= {"seconds": seconds.values, "scores": scores.values}
        found[name] |= {"lowest": min(last), "highest": max(last)}

    def panel(names: Iterable[str], over: str) -> dict[str, Curve]:
        return {name: Curve(found[name][over], found[name]["scores"]) for name in names if name in found}

    panels = {f"{title}, over samples": panel(names, "samples") for title, names in PANELS.items()}
    panels["algorithms, over seconds"] = panel(PANELS["algorithms"], "seconds")
    return facts_of(found, runs), {title: of for title, of in panels.items() if of}
