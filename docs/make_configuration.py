#!/usr/bin/env python
"""Writes docs/configuration.md: every flag of every program, from the dataclasses that define them.

python docs/make_configuration.py

Flags that several programs share stand on the page once.
"""

import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(ROOT)

from common.flags.args import CheckpointArguments, field_type
from common.flags.other_names import IGNORED, OLDER_NAMES, SWITCHES
from common.flags.problems import describe_range
from common.flags.value_forms import Interval, KLLimit, TokenCaps

PAGE = ROOT / "docs/configuration.md"
COMMAND = "python docs/make_configuration.py"
# What a user starts, and the class of its flags.
PROGRAMS = {
    "step1_sft/main.py": "step1_sft.main.SFTArguments",
    "step2_reward/main.py": "step2_reward.main.RewardArguments",
    "step3_ppo/main.py": "step3_ppo.main.PPOArguments",
    "step2_reward/rw_eval.py": "step2_reward.rw_eval.RewardEvalArguments",
    "chat.py": "chat.ChatArguments",
    "export.py": "export.CheckpointExportArguments",
    "arena.py": "arena.ArenaArguments",
    "arena.py export": "arena.ExportArguments",
    "serving/prompt_eval.py": "serving.prompt_eval.PromptEvalArguments",
    "serving/reward_server.py": "serving.reward_server.ServeArguments",
    "train.py": "train.TrainArguments",
    "python -m tools.check_data": "tools.check_data.CheckDataArguments",
    "python -m tools.check_model": "tools.check_model.CheckModelArguments",
    "python -m tools.plan": "tools.plan.PlanArguments",
    "python -m tools.report": "tools.report.__main__.ReportArguments",
}
HEAD = f"""# Every flag

Made by `{COMMAND}` from the dataclasses that the programs read; `PROGRAM --help_all` says the same.
Do not edit it by hand.

A list takes several words: `--data_path a.jsonl b.jsonl`. A switch is on by its name alone, and
`--packed false` is off. *On resume*: what a run that resumes from a checkpoint ([resume.md](resume.md)) may
have otherwise than before. A flag *without effect* is accepted for DeepSpeed-Chat's scripts, and the program
says why it does nothing.

From Python a program is a function of the same words: `from step1_sft.main import main`, then
`main(["--data_path", "a.jsonl", "--max_train_steps", "5"])`. It raises `SystemExit` where it would leave,
and one process can run one program after the other.

## Programs

A program has the flags of the sections that are named here.
"""


class Program(NamedTuple):
    """What a user starts, and the dataclass of its flags."""

    command: str
    flags: type
    purpose: str  # the first line of its docstring
    file: Path  # where its flags are parsed


def find_programs() -> list[Program]:
    """Return the programs in the order of the page."""
    found = []
    for command, place in PROGRAMS.items():
        name, _, kind = place.rpartition(".")
        module = importlib.import_module(name)
        purpose, file = module.__doc__.splitlines()[0], Path(module.__file__)
        found.append(Program(command, getattr(module, kind), purpose, file))
    return found


def own_flags(group: type) -> list[dataclasses.Field]:
    """Return the fields that a dataclass itself defines, in their order, without what it inherits."""
    names = inspect.get_annotations(group)
    return [field for field in dataclasses.fields(group) if field.name in names]


def groups_of(program: Program) -> list[type]:
    """Return the dataclasses that a program's flags are put together from, its own first."""
    return [base for base in program.flags.__mro__ if dataclasses.is_dataclass(base) and own_flags(base)]


def build_page(programs: list[Program]) -> str:
    """Return the whole page."""
    headings = {group: f"{_title(group)} flags" for program in programs for group in groups_of(program)}
    own = {p.flags: f"`{p.command}`" for p in programs if p.flags in headings}
    headings |= own
    resumed = {g for p in programs if issubclass(p.flags, CheckpointArguments) for g in groups_of(p)}
    lines = [HEAD, "| program | | flags |", "|---|---|---|"]
    for program in programs:
        links = [
            f"[{'its own' if group is program.flags else _title(group)}](#{anchor(headings[group])})"
            for group in groups_of(program)
        ]
        purpose = program.purpose.rstrip(".").replace("|", "\\|")
        lines.append(f"| `{program.command}` | {purpose} | {', '.join(links)} |")
    for group in sorted(headings, key=lambda group: group not in own):
        lines += ["", f"## {headings[group]}", "", *_table(group, group in resumed)]
    return "\n".join(lines + _other_names()) + "\n"


def _other_names() -> list[str]:
    """Return the tables of flags that no program defines."""
    rows = [f"| `--{name}` | as `--{flag} {value}` |" for name, (flag, value) in SWITCHES.items()]
    rows += [f"| `--{old}` | as `--{flag}` where no flag is called so |" for flag, old in OLDER_NAMES.items()]
    rows += [f"| `--{name}` | **without effect**: {reason} |" for name, reason in IGNORED.items()]
    told = (
        "A program takes a name whose flag it has, and every one that loads a tokenizer what has no effect."
    )
    return ["", "## Other names", "", told, "", "| flag | |", "|---|---|", *rows]


def _title(group: type) -> str:
    return group.__name__.removesuffix("Arguments")


def anchor(heading: str) -> str:
    """Return what follows # in a link to a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _table(group: type, is_resumed: bool) -> list[str]:
    told = (inspect.getdoc(group) or "").splitlines()[0]
    columns = ["flag", "default", "values", "meaning", *(["on resume"] if is_resumed else [])]
    lines = [told, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    of_bases = {name for base in group.__mro__[1:] for name in getattr(base, "__dataclass_fields__", ())}
    for field in own_flags(group):
        meaning = field.metadata["help"] + (" (in place of the group's)" if field.name in of_bases else "")
        meaning = re.sub(r"[|<>*]", r"\\\g<0>", meaning)
        cells = [f"`--{field.name}`", _default(field), _values(field), meaning]
        if is_resumed:
            cells.append("may change" if field.metadata["may_change"] else "as it was")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _default(field: dataclasses.Field) -> str:
    if field.metadata["required"]:
        return "required"
    value = field.default_factory() if field_type(field)[1] else field.default
    if value is None or value == "" or value == []:
        return "empty"
    if isinstance(value, list):
        return " ".join(f"`{item}`" for item in value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _values(field: dataclasses.Field) -> str:
    scalar, is_list = field_type(field)
    choices = [str(choice) for choice in field.metadata["choices"]]
    if choices:
        return ", ".join(f"`{choice}`" if choice else "empty" for choice in choices)
    kinds = {bool: "switch", int: "whole number", float: "number", str: "text"}
    kinds |= {
        Interval: "steps, `epoch`, or a time: `90s`, `30m`, `2h`",
        TokenCaps: "tokens, or `TRAIN,SCORE`",
    }
    kinds |= {KLLimit: "number, at least 0, or `KL:skip`"}
    kind = kinds[scalar]
    limits = describe_range(field.metadata["range"])
    return ", ".join(filter(None, [kind, limits, "several" if is_list else ""]))


if __name__ == "__main__":
    PAGE.write_text(build_page(find_programs()))
