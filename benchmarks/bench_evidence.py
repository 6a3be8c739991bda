#!/usr/bin/env python
"""Regenerates a page of docs/results: its facts and its figure.

python benchmarks/bench_evidence.py NAME [--quick] [--data_path FILE ...] [--trl_python PYTHON ...]

NAME is a file of benchmarks/evidence, whose first lines describe the runs and their duration. The facts go to
docs/results/NAME.json with command, commit and machine, the curves to docs/results/NAME.svg. Runs are kept in
output/evidence/NAME: rerun the same command to resume. --quick: tiny, nothing is kept.

The last line is a JSON object: the facts.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]  # when run as a script

from benchmarks.evidence import runs
from benchmarks.measuring import describe_machine
from tools.report.charts import render_picture

NAMES = ("mismatch", "bf16_gap", "stability", "rewards", "preferences", "verifiable", "peers", "scale")


def main() -> None:
    """Measure, plot, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is saved")
    data_help = "for rewards: files of pairs; for preferences: a folder with train.jsonl and eval.jsonl"
    parser.add_argument("--data_path", nargs="+", default=[], help=data_help)
    trl_help = "for peers: interpreters of make_peer_env.sh trl-1.16 and, for PPO, trl-1.12"
    parser.add_argument("--trl_python", nargs="+", default=[], help=trl_help)
    args = parser.parse_args()
    if args.name == "peers":
        from benchmarks.evidence import peers

        facts, panels, x_name = peers.measure(args.trl_python, is_quick=args.quick)
    elif args.name == "scale":
        from benchmarks.evidence import scale

        facts, panels, x_name = scale.measure(is_quick=args.quick)
    else:
        data = [str(Path(path).resolve()) for path in args.data_path]
        facts, panels, x_name = runs.measure(args.name, is_quick=args.quick, data=data)
    facts = {"name": args.name} | describe_machine() | facts
    picture = render_picture(panels, x_name)
    if not args.quick:
        folder = ROOT / "docs/results"
        (folder / f"{args.name}.json").write_text(as_json(facts))
        (folder / f"{args.name}.svg").write_text(picture)
    print(json.dumps(facts))


def as_json(facts: dict[str, Any]) -> str:
    """The facts as a file, with one line for each innermost list or object."""
    text = json.dumps(facts, indent=1)
    return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda inner: re.sub(r"\s+", " ", inner[0]), text) + "\n"


if __name__ == "__main__":
    main()
