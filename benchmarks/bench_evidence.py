#!/usr/bin/env python
"""A section of docs/results.md, made again: its facts, its figure.

python benchmarks/bench_evidence.py NAME [--quick] [--data_path FILE ...] [--trl_python PYTHON ...]

NAME is a file of benchmarks/evidence, whose first lines say what is run and how long it takes. The facts go
to docs/results/NAME.json with command, commit and machine, the curves to docs/results/NAME.svg. Runs are kept
in output/evidence/NAME: the same command goes on where it was stopped. --quick: tiny, nothing is kept.

The last line is a JSON object: the facts.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[:0] = [str(ROOT)]

from benchmarks.measuring import describe_machine
from tools.report.charts import render_picture

NAMES = ("mismatch", "stability", "rewards", "verifiable", "peers", "scale")


def main() -> None:
    """Measure, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; nothing is kept")
    parser.add_argument("--data_path", nargs="+", help="of rewards: files of pairs")
    told = "of peers: the Pythons of make_peer_env.sh trl-1.16 and, for PPO, trl-1.12"
    parser.add_argument("--trl_python", nargs="+", default=[], help=told)
    args = parser.parse_args()
    section = importlib.import_module(f"benchmarks.evidence.{args.name}")
    facts, panels = section.measure(args)
    facts = {"name": args.name} | describe_machine() | facts
    picture = render_picture(panels, getattr(section, "X_NAME", "step"))
    if not args.quick:
        kept = ROOT / "docs/results"
        kept.mkdir(exist_ok=True)
        (kept / f"{args.name}.json").write_text(json.dumps(facts, indent=1) + "\n")
        (kept / f"{args.name}.svg").write_text(picture)
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
