#!/usr/bin/env python
"""Writes docs/configuration.md: every flag of every program, from the dataclasses that define them.

python docs/make_configuration.py            # write the page
python docs/make_configuration.py --check    # exit code 1 when the page is not what would be written

A program is found by its call of `parse_args(CLASS, ...)`, or `parse_step_args` where it has those of a step
too, which stand on the page with the step. Flags of a group that several programs share stand
on the page once.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script: import from the repository root, not from this folder
    sys.path[0] = str(ROOT)

from common.flags.args import CheckpointArguments, field_type
from common.flags.flag_values import describe_range
from common.flags.other_names import IGNORED, OLDER_NAMES, REMOVED, SWITCHES

PAGE = ROOT / "docs/configuration.md"
COMMAND = "python docs/make_configuration.py"
# What is started by another name than its file's, by the class of its flags.
COMMANDS = {
    "ArenaArguments": "arena.py",
    "ExportArguments": "arena.py export",
}
PARSERS = ("parse_args", "parse_step_args")
# Not for users to start, or with flags that are no dataclass: helpers of launch scripts, peers, tests.
LEFT_OUT = {"tests", "benchmarks", "training_scripts", "docs", "examples", "output"}
HEAD = f"""# Every flag

Made by `{COMMAND}` from the dataclasses that the programs read; `PROGRAM --help` says the same.
Do not edit it by hand.

A list takes several words: `--data_path a.jsonl b.jsonl`. A switch is on by its name alone, and
`--packed false` is off. *On resume*: what a run that goes on from a checkpoint ([resume.md](resume.md)) may
have otherwise than before. A flag *without effect* is accepted for DeepSpeed-Chat's scripts, and the program
says why it does nothing.

## Programs

A program has the flags of its own section and of the groups that are named here.
"""


class Program(NamedTuple):
    """What a user starts, and the dataclass of its flags."""

    command: str
    flags: type
    purpose: str  # the first line of its docstring
    file: Path = ROOT  # where its flags are parsed


def find_programs() -> list[Program]:
    """Return the programs by where they stand: the steps first, in their order, then what is beside them."""
    found = []
    for path in sorted(_own_files()):
        place = path.relative_to(ROOT)
        module = ast.parse(path.read_text())
        for name in _parsed_classes(module):
            flags = getattr(importlib.import_module(".".join(place.with_suffix("").parts)), name)
            purpose = (ast.get_docstring(module) or "").splitlines()[0]
            command = COMMANDS.get(name, _command(place))
            found.append((_order(place), Program(command, flags, purpose, path)))
    return [program for _, program in sorted(found, key=lambda item: item[0])]


def _own_files() -> Iterator[Path]:
    for path in ROOT.iterdir():  # the environment below .venv is not even walked
        if path.suffix == ".py":
            yield path
        elif path.is_dir() and path.name not in LEFT_OUT and not path.name.startswith("."):
            yield from path.rglob("*.py")


def _parsed_classes(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PARSERS and node.args:
            name = ast.unparse(node.args[0])
            yield from [name] if name[0].isupper() else []


def _order(place: Path) -> tuple[int, bool, str]:
    is_step = place.parts[0].startswith("step")
    rank = 0 if is_step else 2 if place.parts[0] == "tools" else 1
    return rank, is_step and place.name != "main.py", place.as_posix() if not is_step else place.parent.name


def _command(place: Path) -> str:
    if place.name == "__main__.py":
        return f"python -m {'.'.join(place.parent.parts)}"
    return f"python -m tools.{place.stem}" if place.parts[0] == "tools" else place.as_posix()


def own_flags(group: type) -> list[dataclasses.Field]:
    """Return the fields that a dataclass itself defines, in their order, without what it inherits."""
    names = inspect.get_annotations(group)
    return [field for field in dataclasses.fields(group) if field.name in names]


def groups_of(program: Program) -> list[type]:
    """Return the dataclasses that a program's flags are put together from, its own first."""
    return [base for base in program.flags.__mro__ if dataclasses.is_dataclass(base) and own_flags(base)]


def build_page(programs: list[Program]) -> str:
    """Return the whole page."""
    uses = Counter(group for program in programs for group in groups_of(program))
    resumed = {g for p in programs if issubclass(p.flags, CheckpointArguments) for g in groups_of(p)}
    lines = [HEAD.rstrip("\n"), "", "| program | | flags |", "|---|---|---|"]
    for program in programs:
        groups = [_link(group, uses, programs) for group in groups_of(program)]
        purpose = program.purpose.rstrip(".").replace("|", "\\|")
        lines.append(f"| `{program.command}` | {purpose} | {', '.join(groups)} |")
    for program in programs:
        lines += ["", f"## {_heading(program)}"]
        for group in groups_of(program):
            if uses[group] == 1:
                title = [] if group is program.flags else ["", f"### {_title(group)}"]
                lines += [*title, "", *_table(group, group in resumed)]
    lines += ["", "## Shared groups"]
    for group in [group for group, count in uses.items() if count > 1]:
        lines += ["", f"### {_title(group)}", "", *_table(group, group in resumed)]
    return "\n".join(lines + _other_names()) + "\n"


def _other_names() -> list[str]:
    """Return the tables of flags that no program defines."""
    rows = [f"| `--{name}` | as `--{flag} {value}` |" for name, (flag, value) in SWITCHES.items()]
    rows += [f"| `--{old}` | as `--{flag}` where no flag is called so |" for flag, old in OLDER_NAMES.items()]
    rows += [f"| `--{name}` | **without effect**: {reason} |" for name, reason in IGNORED.items()]
    told = (
        "A program takes a name whose flag it has, and every one that loads a tokenizer what has no effect."
    )
    lines = ["", "## Other names", "", told, "", "| flag | |", "|---|---|", *rows]
    lines += ["", "## Removed", "", "These are refused.", "", "| flag | instead |", "|---|---|"]
    return lines + [f"| `--{name}` | {instead} |" for name, (_, instead) in REMOVED.items()]


def _heading(program: Program) -> str:
    return f"`{program.command}`"


def _title(group: type) -> str:
    return f"{re.sub('Arguments$', '', group.__name__)} flags"


def anchor(heading: str) -> str:
    """Return what follows # in a link to a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _link(group: type, uses: Counter, programs: list[Program]) -> str:
    own = [program for program in programs if program.flags is group and uses[group] == 1]
    if own:
        return f"[its own](#{anchor(_heading(own[0]))})"
    return f"[{re.sub('Arguments$', '', group.__name__)}](#{anchor(_title(group))})"


def _table(group: type, is_resumed: bool) -> list[str]:
    told = (inspect.getdoc(group) or "").splitlines()[0]
    columns = ["flag", "default", "values", "meaning", *(["on resume"] if is_resumed else [])]
    lines = [told, "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for field in own_flags(group):
        cells = [f"`--{field.name}`", _default(field), _values(field), _meaning(field, group)]
        if is_resumed:
            cells.append("may change" if field.metadata["may_change"] else "as it was")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _default(field: dataclasses.Field) -> str:
    if field.metadata.get("required"):
        return "required"
    value: Any = field.default_factory() if field_type(field)[1] else field.default
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
    kind = {bool: "switch", int: "whole number", float: "number", str: "text"}[scalar]
    limits = describe_range(**field.metadata["range"])
    return ", ".join(filter(None, [kind, limits, "several" if is_list else ""]))


def _meaning(field: dataclasses.Field, group: type) -> str:
    text = field.metadata["help"]
    bases = (base for base in group.__mro__[1:] if dataclasses.is_dataclass(base))
    if any(field.name in inspect.get_annotations(base) for base in bases):
        text += " (in place of the group's)"
    return re.sub(r"[|<>*]", r"\\\g<0>", text)


def main(argv: list[str]) -> int:
    """Write the page, or with --check compare; return the exit code."""
    page = build_page(find_programs())
    if argv == ["--check"]:
        is_same = PAGE.exists() and PAGE.read_text() == page
        print(f"{PAGE.name} is up to date" if is_same else f"{PAGE.name} is not up to date; run: {COMMAND}")
        return int(not is_same)
    if argv:
        print(f"error: unknown words {' '.join(argv)}; nothing or --check is taken", file=sys.stderr)
        return 2
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
