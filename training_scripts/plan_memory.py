#!/usr/bin/env python
"""Works out how much memory each launch script and each row of models.txt takes, and states it there.

python training_scripts/plan_memory.py [SCRIPT ...]           show it; exit code 1 where one differs
python training_scripts/plan_memory.py --write [SCRIPT ...]   write the headers and the table

The figures are those of `python -m tools.plan` for the flags that the script gives its program, on the
hardware of its header, with models of the shapes in model_shapes.json: nothing is downloaded or loaded.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

if not __package__:  # run as a script: import from the repository root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.flags.args import Problems
from common.programs import startup
from tools.memory_plan import MemoryPlan
from tools.planned_run import PlanArguments, known_config, read_run
from tools.step_flags import parse_step_args
from training_scripts import launch_table as table

NUMBERS = {"one": "1", "two": "2", "four": "4", "eight": "8"}
HARDWARE = re.compile(r"^# Hardware: (?:(\w+) machines of )?(\w+) GPUs? of (\d+) GB.*$", re.MULTILINE)
MEMORY = re.compile(r"^# Memory: .*$", re.MULTILINE)
LAUNCHER = '#!/usr/bin/env bash\nprintf \'%s\\0\' "$@" >"$RECORD"\n'  # one that writes down its words


def program_words(script: Path) -> list[str]:
    """Return the flags that a script gives its program. It runs, with a stand-in for the launcher."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "deepspeed").write_text(LAUNCHER)
        (folder / "deepspeed").chmod(0o755)
        (folder / "hosts").write_text("first slots=8\n")
        env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": f"{folder}/record"}
        env |= {"OUTPUT_DIR": f"{folder}/output", "HOSTFILE": f"{folder}/hosts"}
        subprocess.run(["bash", str(script)], env=env, capture_output=True, check=True, timeout=60)
        words = (folder / "record").read_text().split("\0")[:-1]
    return words[next(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]


def plan_run(step: str, words: list[str], machines: tuple[str, str, str]) -> MemoryPlan:
    """Return the plan of a step's program on (machines, GPUs of each, GB of a GPU).

    Raises ValueError when a model's shape is not known.
    """
    words = list(words)
    for i, word in enumerate(words):
        if word.endswith("model_name_or_path"):
            words[i + 1] = table.hub_name(words[i + 1])
            if known_config(words[i + 1]) is None:
                raise ValueError(f"{words[i + 1]} is not in model_shapes.json; add what its config.json says")
    for flag, value in zip(("num_nodes", "num_gpus", "gpu_memory_gib"), machines, strict=True):
        words += [f"--{flag}", value]
    words += ["--gpu", "a100-80g", "--stage", str(table.STEPS.index(step) + 1)]
    problems = Problems()
    return MemoryPlan(read_run(parse_step_args(PlanArguments, words, problems=problems), problems))


def planned_gib(step: str, row: table.Row) -> float:
    """Return the GiB on each GPU at the peak of a step (sft, reward, dpo, ppo) by the table's settings."""
    roles = ("actor_", "critic_") if step == "ppo" else ("",)
    words = [word for role in roles for word in (f"--{role}model_name_or_path", row.model)]
    machines = tuple(row.gpus.removesuffix("GB").split("x"))
    plan = plan_run(table.FOLDER_OF_STEP[step], [*words, *table.step_flags(step, row)], machines)
    return round(plan.peak.total / 2**30, 1)


def with_figures(text: str) -> str:
    """Return the table with the figures that are planned now."""
    for row in (row for row in table.ROWS if row.model != "*"):
        figures = {f"{step}_gib": str(planned_gib(step, row)) for step in table.FOLDER_OF_STEP}
        [line] = [line for line in text.splitlines() if line.split()[:2] == [row.model, row.machine]]
        new = "".join(figure.ljust(len(f"{name}  ")) for name, figure in figures.items())
        at = len(line) - len(re.search(r"(?:\S+\s+){3}\S+$", line)[0])
        text = text.replace(line, (line[:at] + new).rstrip())
    return text


def with_memory(text: str, script: Path) -> str:
    """Return a script with the line about memory that it is to have, after the one about hardware.

    Raises ValueError when its header names no hardware.
    """
    found = HARDWARE.search(text)
    if not found:
        raise ValueError(f"{script}: no line such as '# Hardware: eight GPUs of 80 GB in one machine.'")
    nodes, gpus, gib = found.groups()
    step = script.relative_to(table.FOLDER).parts[0]
    plan = plan_run(step, program_words(script), (NUMBERS[nodes or "one"], NUMBERS[gpus], gib))
    peak = f"{plan.peak.total / 2**30:.1f}"
    cpu = f", {plan.cpu_peak / 2**30:.0f} GiB of each machine's CPU" if plan.cpu_peak >= 2**30 else ""
    does_fit = f"of {gib} GiB" if plan.fits else f"GiB, more than the {gib} that there are,"
    line = f"# Memory: {peak} {does_fit} on each GPU at the peak{cpu}, as planned by tools.plan."
    if MEMORY.search(text):
        return MEMORY.sub(line, text, count=1)
    return text.replace(found[0], f"{found[0]}\n{line}", 1)


def main() -> None:
    """Plan, and show or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="*", type=Path, metavar="SCRIPT", help="empty: all of them")
    parser.add_argument("--write", action="store_true", help="write the headers")
    args = parser.parse_args()
    startup.quiet_libraries()
    num_stale = 0
    for file in [path.resolve() for path in args.scripts] or [*table.all_scripts(), table.TABLE]:
        text = file.read_text()
        with contextlib.redirect_stdout(sys.stderr):
            new = with_figures(text) if file == table.TABLE else with_memory(text, file)
        told = "GiB of its rows" if file == table.TABLE else MEMORY.search(new)[0].removeprefix("# Memory: ")
        if args.write and new != text:
            file.write_text(new)
        is_stale = new != text and not args.write
        num_stale += is_stale
        print(f"{'stale ' if is_stale else ''}{file.relative_to(table.FOLDER)}: {told}")
    raise SystemExit(1 if num_stale else 0)


if __name__ == "__main__":
    main()
