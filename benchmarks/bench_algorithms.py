#!/usr/bin/env python
"""What each algorithm, policy loss, correction and divergence learns, on problems whose answers are checked.

python benchmarks/bench_algorithms.py [--figure FILE.svg] [--runs 3] [--quick]

Each run is a command of the table, `training_scripts/verifiable/run.sh` with LEVEL=gsm: word problems
(`pip install --no-deps reasoning-gym`), 20 steps of 32 problems with 8 answers each, from one SFT model whose
teacher was careless. It is seen by its right answers to 256 held-out problems, every 5 steps.
--runs: how many seeds of step 3, from 1 on; as many runs at a time as this process may use cores, one thread
each. What was run in OUTPUT_DIR (default output/verifiable/gsm) is not run again. --quick: sums, three runs.

The last line is a JSON object: `runs_of` has all curves with seed and seconds, `final` the mean score of each
name after the last step; `ratio` is PPO's score over the SFT model's.
"""

import statistics
import sys
from pathlib import Path

if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from benchmarks.learning import NUM_JOBS, ROOT, Case, Task, mean_curve
from benchmarks.measuring import print_result, read_args
from tools.report.charts import render_picture

STALE = "--rollout_staleness 4 --rollout_correction"
# By the panel that shows it: the name of a curve, and the script's words. A name stands where it comes first.
PANELS = {
    "one answer at a time": {
        "ppo": "ppo",
        "reinforce++": "reinforce++",
        "remax": "remax",
    },
    "groups": {name: name for name in ("grpo", "dr_grpo", "rloo", "reinforce++-baseline")},
    "policy losses, grpo": {
        "grpo": "grpo",
        "ppo:dual_clip=3": "grpo --policy_loss ppo:dual_clip=3",
        "gspo": "grpo --policy_loss gspo",
        "cispo": "grpo --policy_loss cispo",
    },
    "corrections, grpo, rollouts 4 steps old": {
        "none": f"grpo {STALE} none",
        "tis": f"grpo {STALE} tis:2",
        "mis": f"grpo {STALE} mis:0.5,2",
        "seq_tis": f"grpo {STALE} seq_tis:2",
        "seq_mis": f"grpo {STALE} seq_mis:0.5,2",
        "geo_rs": f"grpo {STALE} geo_rs:0.999,1.001",
    },
    "distillation from what grpo trained, no reward": {
        "reverse_kl": "distill",
        "forward_kl": "distill --distill_loss forward_kl",
        "jsd:0.5": "distill --distill_loss jsd:0.5",
        "sampled": "distill --distill_loss sampled",
    },
}
FLAGS, QUICK_FLAGS = "--max_train_steps 20 --eval_interval 5", "--max_train_steps 2 --eval_fraction 0.2"
CASES = {name: words for panel in PANELS.values() for name, words in panel.items()}
QUICK = ("ppo", "gspo", "tis")


def main() -> None:
    """Train the models, print a table, draw the curves."""
    args = read_args(__doc__, 3, has_figure=True)
    task = Task("gsm", ROOT / "output/verifiable/gsm", FLAGS)
    names = QUICK if args.quick else list(CASES)
    cases = [Case(name, CASES[name], args.runs) for name in names]
    runs = task.run_all(cases, quick=QUICK_FLAGS if args.quick else "")
    curves = {name: mean_curve(of) for name, of in runs.items()}
    print(f"\n{'held-out score':<24}{'before':>8}{'after':>8}  {'lowest, highest':<18}{'seconds':>8}")
    for name, of in runs.items():
        last, seconds = [run["scores"][-1] for run in of], statistics.fmean(run["seconds"][-1] for run in of)
        spread = f"{min(last):.3f}, {max(last):.3f}"
        before, after = curves[name].values[0], curves[name].last
        print(f"{name:<24}{before:>8.3f}{after:>8.3f}  {spread:<18}{seconds:>8.0f}")
    if args.figure:
        shown = {title: {n: curves[n] for n in panel if n in curves} for title, panel in PANELS.items()}
        Path(args.figure).write_text(render_picture({title: of for title, of in shown.items() if of}))
    ppo = curves["ppo"]
    print_result(
        "algorithms",
        ppo.last,
        ppo.values[0],
        runs=args.runs,
        level="sums" if args.quick else task.level,
        runs_at_a_time=NUM_JOBS,
        final={name: round(curve.last, 4) for name, curve in curves.items()},
        runs_of=[run for of in runs.values() for run in of],
    )


if __name__ == "__main__":
    main()
