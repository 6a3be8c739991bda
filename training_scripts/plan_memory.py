#!/usr/bin/env python
"""Computes the GiB of each row of models.txt in each step, and writes them there.

The figures are those of `python -m tools.plan` for the flags of run.sh, with models of the shapes in
model_shapes.json: nothing is downloaded or loaded.
"""

import re
import sys
from pathlib import Path

if not __package__:  # run as a script: import from the repository root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.flags.args import Problems
from common.programs import startup
from tools.memory_plan import MemoryPlan
from tools.planned_run import read_run
from tools.step_flags import PlanArguments, parse_step_args
from training_scripts import launch_table as table


def planned_gib(step: str, row: table.Row) -> float:
    """Peak GiB per GPU of a step (sft, reward, dpo, ppo) with the table's settings."""
    nodes, gpus, gib = row.gpus.removesuffix("GB").split("x")
    words = ["--gpu", "a100-80g", "--num_nodes", nodes, "--num_gpus", gpus, "--gpu_memory_gib", gib]
    words += ["--stage", str(table.STEPS.index(table.FOLDER_OF_STEP[step]) + 1)]
    for role in ("actor_", "critic_") if step == "ppo" else ("",):
        words += [f"--{role}model_name_or_path", row.model]
    problems = Problems()
    args = parse_step_args(PlanArguments, [*words, *table.step_flags(step, row)], problems=problems)
    return round(MemoryPlan(read_run(args, problems)).peak.total / 2**30, 1)


def with_figures(text: str) -> str:
    """The table with newly planned figures."""
    for row in (row for row in table.ROWS if row.model != "*"):
        figures = {f"{step}_gib": str(planned_gib(step, row)) for step in table.FOLDER_OF_STEP}
        [line] = [line for line in text.splitlines() if line.split()[:2] == [row.model, row.machine]]
        new = "".join(figure.ljust(len(f"{name}  ")) for name, figure in figures.items())
        at = len(line) - len(re.search(r"(?:\S+\s+){3}\S+$", line)[0])
        text = text.replace(line, (line[:at] + new).rstrip())
    return text


def main() -> None:
    """Plan and write."""
    startup.quiet_libraries()
    table.TABLE.write_text(with_figures(table.TABLE.read_text()))


if __name__ == "__main__":
    main()
