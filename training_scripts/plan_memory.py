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
from typing import NamedTuple

if not __package__:  # run as a script: import from the repository root
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from common.flags.args import Problems
from common.programs import startup
from tools.memory_plan import MemoryPlan, plan_memory
from tools.plan import check_run
from tools.planned_run import PlanArguments, known_config
from tools.step_flags import parse_step_args
from training_scripts.launch_table import (
    FOLDER,
    FOLDER_OF_STEP,
    STEPS,
    TABLE,
    Row,
    all_scripts,
    hub_name,
    read_rows,
    step_flags,
)

NUMBERS = {"one": 1, "two": 2, "four": 4, "eight": 8}
HARDWARE = re.compile(
    r"^# Hardware: (?:(?P<nodes>\w+) machines of )?(?P<gpus>\w+) GPUs? of (?P<gib>\d+) GB", re.MULTILINE
)
MEMORY = re.compile(r"^# Memory: .*$", re.MULTILINE)
RECORD = '#!/usr/bin/env bash\nprintf \'%s\\0\' "$@" >"$RECORD"\n'  # a launcher that writes down its words


class Hardware(NamedTuple):
    """What a script's header asks for."""

    num_nodes: int
    num_gpus: int  # of each
    memory_gib: int


def read_hardware(text: str) -> Hardware:
    """Return the hardware of a script's header; ValueError when it names none."""
    found = HARDWARE.search(text)
    if not found:
        raise ValueError("its header has no line such as '# Hardware: eight GPUs of 80 GB in one machine.'")
    nodes, gpus, gib = found.group("nodes"), found.group("gpus"), found.group("gib")
    return Hardware(NUMBERS[nodes or "one"], NUMBERS[gpus], int(gib))


def program_words(script: Path) -> list[str]:
    """Return the flags that a script gives its program. It runs, with a stand-in for the launcher."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        launcher = Path(folder) / "deepspeed"
        launcher.write_text(RECORD)
        launcher.chmod(0o755)
        hostfile = Path(folder) / "hosts"
        hostfile.write_text("first slots=8\n")
        env = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(record)}
        env |= {"OUTPUT_DIR": f"{folder}/output", "HOSTFILE": str(hostfile)}
        subprocess.run(["bash", str(script)], env=env, capture_output=True, check=True, timeout=60)
        words = record.read_text().split("\0")[:-1]
    return words[next(i for i, word in enumerate(words) if word.endswith(".py")) + 1 :]


def plan_run(step: str, words: list[str], hardware: Hardware) -> MemoryPlan:
    """Return the plan of a step's program with these flags; ValueError when a model's shape is not known."""
    words = list(words)
    for i, word in enumerate(words):
        if word.endswith("model_name_or_path"):
            words[i + 1] = hub_name(words[i + 1])
            if known_config(words[i + 1]) is None:
                raise ValueError(f"{words[i + 1]} is not in model_shapes.json; add what its config.json says")
    nodes, gpus, gib = map(str, hardware)
    words += ["--num_nodes", nodes, "--num_gpus", gpus, "--gpu_memory_gib", gib, "--gpu", "a100-80g"]
    problems, stage = Problems(), str(STEPS.index(step) + 1)
    args = parse_step_args(PlanArguments, ["--stage", stage, *words], problems=problems)
    return plan_memory(check_run(args, problems))


def planned_gib(step: str, row: Row) -> float:
    """Return the GiB on each GPU at the peak of a step (sft, reward, dpo, ppo) by the table's settings."""
    roles = ("actor_", "critic_") if step == "ppo" else ("",)
    words = [word for role in roles for word in (f"--{role}model_name_or_path", row.model)]
    nodes, gpus, gib = row.gpus.removesuffix("GB").split("x")
    hardware = Hardware(int(nodes), int(gpus), int(gib))
    plan = plan_run(FOLDER_OF_STEP[step], [*words, *step_flags(step, row)], hardware)
    return round(plan.peak.total / 2**30, 1)


def with_planned(text: str) -> str:
    """Return the table with the figures that are planned now."""
    for row in (row for row in read_rows() if row.model != "*"):
        figures = {f"{step}_gib": str(planned_gib(step, row)) for step in FOLDER_OF_STEP}
        [line] = [line for line in text.splitlines() if line.split()[:2] == [row.model, row.machine]]
        new = [figure.ljust(len(f"{name}  ")) for name, figure in figures.items()]
        at = len(line) - len(re.search(r"(?:\S+\s+){3}\S+$", line)[0])
        text = text.replace(line, (line[:at] + "".join(new)).rstrip())
    return text


def memory_line(script: Path) -> str:
    """Return what the header of a script is to say about memory."""
    hardware = read_hardware(script.read_text())
    plan = plan_run(script.relative_to(FOLDER).parts[0], program_words(script), hardware)
    peak, gib = plan.peak.total / 2**30, hardware.memory_gib
    cpu = f", {plan.cpu_peak / 2**30:.0f} GiB of each machine's CPU" if plan.cpu_peak >= 2**30 else ""
    does_fit = f"of {gib:.0f} GiB" if plan.fits else f"GiB, more than the {gib:.0f} that there are,"
    return f"# Memory: {peak:.1f} {does_fit} on each GPU at the peak{cpu}, as planned by tools.plan."


def with_line(text: str, line: str) -> str:
    """Return a script with this line about memory, after the one about hardware."""
    if MEMORY.search(text):
        return MEMORY.sub(line, text, count=1)
    return re.sub(r"^(# Hardware: .*)$", rf"\1\n{line}", text, count=1, flags=re.MULTILINE)


def main() -> None:
    """Plan, and show or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="*", type=Path, metavar="SCRIPT", help="empty: all of them")
    parser.add_argument("--write", action="store_true", help="write the headers")
    args = parser.parse_args()
    startup.quiet_libraries()
    num_stale = 0
    for script in [path.resolve() for path in args.scripts] or all_scripts():
        with contextlib.redirect_stdout(sys.stderr):
            line = memory_line(script)
        text = script.read_text()
        is_stale = with_line(text, line) != text
        if is_stale and args.write:
            script.write_text(with_line(text, line))
        num_stale += is_stale and not args.write
        print(
            f"{'stale ' if is_stale else ''}{script.relative_to(FOLDER)}: {line.removeprefix('# Memory: ')}"
        )
    if not args.scripts:
        text = TABLE.read_text()
        planned = with_planned(text)
        if args.write:
            TABLE.write_text(planned)
        num_stale += planned != text and not args.write
        print(f"{'stale ' if planned != text and not args.write else ''}{TABLE.name}: GiB of its rows")
    raise SystemExit(1 if num_stale else 0)


if __name__ == "__main__":
    main()
