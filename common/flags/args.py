"""Command-line flags as dataclasses: each field is a flag. Does not import torch.

A program's flags are one flat dataclass, composed of the groups in `groups.py`, so each flag has one
definition, one default and one help text. `parse_args` reads a command line into it and collects all problems
(unknown flags with the nearest known one, values of the wrong type, missing flags) in `Problems`. A program's
start-up checks add theirs; `exit_if_any` prints all of them and exits with code 2 before a model is loaded.
"""

import argparse
import copy
import dataclasses
import difflib
import functools
import gc
import os
import re
import shlex
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from common.flags.config_file import Setting, read_config
from common.flags.other_names import IGNORED, OLDER_NAMES, REMOVED, SWITCHES, WITHOUT_VALUE, split_values
from common.flags.problems import KINDS, RANGE, Problems, describe_range, is_usable, shortened
from common.flags.streams import exit_at_ctrl_c, harden_streams

VERSION = "1.0.0"  # as in pyproject.toml
MAX_SHOWN = 40  # with more flags, --help shows only the usual ones
REQUIRED = object()
T = TypeVar("T")


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple = (),
    only_with: str = "",
    may_change: bool = False,
    is_usual: bool = False,
    **limits: float,
) -> Any:
    """Dataclass field that `parse_args` turns into a flag.

    `default=REQUIRED` makes the flag mandatory.
    `only_with` lists flags, NAME, NAME=VALUE or NAME!=VALUE, at least one of which the flag needs to have an
    effect. `may_change`: a resumed run may pass another value; results then change by rounding only.
    `is_usual`: --help shows the flag in programs with more than `MAX_SHOWN` flags. `limits` bound a number,
    or each number of a list: `low` and `high` are inclusive, `above` and `below` exclusive.
    """
    metadata = {
        "help": help,
        "choices": choices,
        "only_with": only_with,
        "may_change": may_change,
        "is_usual": is_usual,
        "range": limits,
        "required": default is REQUIRED,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=None if default is REQUIRED else default, metadata=metadata)


def same_flag(group: type, name: str, default: Any = dataclasses.MISSING) -> Any:
    """Dataclass field of a flag that `group` defines, with another default if one is given."""
    field = copy.copy(group.__dataclass_fields__[name])
    if default is not dataclasses.MISSING:
        field.default = default
    return field


def default_of(field: dataclasses.Field) -> Any:
    """Default value of a field."""
    return field.default_factory() if field_type(field)[1] else field.default


def field_type(field: dataclasses.Field) -> tuple[type, bool]:
    """(scalar type, is a list) of a field's annotation such as `int | None` or `list[str]`."""
    annotation = field.type
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0], True
    if isinstance(annotation, types.UnionType):
        annotation = next(a for a in typing.get_args(annotation) if a is not type(None))
    return annotation, False


def typed(field: dataclasses.Field, value: Any) -> Any:
    """A saved value, converted to the flag's current type, which may have changed. Raises ValueError."""
    scalar, is_list = field_type(field)
    if is_list or value is None or isinstance(value, scalar):
        return value
    return scalar(str(value))


def _build_parser(cls: type, description: str, *, shows_all: bool) -> argparse.ArgumentParser:
    fields = dataclasses.fields(cls)
    shows_all = shows_all or len(fields) <= MAX_SHOWN
    if not shows_all:
        description += " Only the most common flags are listed; --help_all lists all."
    parser = argparse.ArgumentParser(
        # With its folder, as four programs are called main.py.
        usage="/".join(Path(sys.argv[0]).parts[-2:]) + " [--flag value ...]",
        description=description,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=36),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        exit_on_error=False,
    )
    # -1e-3 and -2*model:PATH are values, not flags: no flag of a program begins with a digit.
    parser._negative_number_matcher = re.compile(r"-\.?\d")  # type: ignore[attr-defined]
    groups: dict[str, Any] = {}
    names = {field.name for field in fields}
    for field in fields:
        title = _group_title(cls, field.name)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        older = OLDER_NAMES.get(field.name)
        _add_flag(groups[title], field, older if older not in names else None, shows_all=shows_all)
    _add_other_names(parser, names, shows_all=shows_all)
    text = "YAML file of flags; the command line takes precedence"
    parser.add_argument("--config", nargs="?", metavar="FILE", help=text)
    text = "print the version" if shows_all else argparse.SUPPRESS
    parser.add_argument("--version", action="version", version=f"triptych {VERSION}", help=text)
    return parser


def _group_title(cls: type, name: str) -> str:
    """Title of a flag's group: the first line of the docstring of the dataclass that first defines it."""
    bases = [base for base in reversed(cls.__mro__) if dataclasses.is_dataclass(base)]
    owner = next(base for base in bases if name in base.__dataclass_fields__)
    return (owner.__doc__ or owner.__name__).splitlines()[0].removesuffix(".")


def _add_flag(group: Any, field: dataclasses.Field, older: str | None, *, shows_all: bool) -> None:
    """Add a flag and its older name to a group of a parser; a missing value is parsed as None."""
    scalar, is_list = field_type(field)
    metadata = field.metadata
    metavar = "|".join(map(str, metadata["choices"])) or scalar.__name__.upper()
    const = WITHOUT_VALUE.get(field.name)
    if scalar is bool:
        metavar = "true|false"
        const = "true"
    text = argparse.SUPPRESS
    if shows_all or metadata["is_usual"]:
        values = default_of(field)
        if not is_list:
            values = [values]
        default = " ".join(str(value) for value in values if value is not None) or "empty"
        text = metadata["help"]
        if not shows_all:  # the meaning of the flag and of its default
            first, *others = text.split("; ")
            text = "; ".join([first, *(part for part in others if part.startswith(f"{default}:"))])
        if metadata["required"]:
            text += " (required)"
        elif default != "empty":
            text += f" (default: {default})"
        text = text.replace("%", "%%")
    names = [f"--{name}" for name in (field.name, older) if name]
    group.add_argument(*names, nargs="*" if is_list else "?", const=const, metavar=metavar, help=text)


def _add_other_names(parser: argparse.ArgumentParser, names: set[str], *, shows_all: bool) -> None:
    """Add DeepSpeed-Chat's switches and flags without effect to the parser of a program with these flags."""
    group = parser.add_argument_group("DeepSpeed-Chat's flags")
    for name, (flag_name, value) in SWITCHES.items():
        if flag_name in names:
            text = f"as --{flag_name} {value}" if shows_all else argparse.SUPPRESS
            group.add_argument(f"--{name}", nargs="?", const="true", metavar="true|false", help=text)
    for name, reason in IGNORED.items():
        if "eot_token" in names and name not in names:  # the program loads a tokenizer
            text = f"no effect: {reason}" if shows_all else argparse.SUPPRESS
            group.add_argument(f"--{name}", nargs="*", metavar="...", help=text)


def parse_args(
    cls: type[T],
    argv: Sequence[str] | None = None,
    *,
    description: str = "",
    problems: Problems,
    leading: str = "",
    parts: Mapping[str, type] | None = None,
) -> T:
    """Parse `argv` (default: sys.argv[1:]) into an instance of the dataclass `cls`.

    Problems are added to `problems`; the caller adds its own checks and then calls `exit_if_any`. Arguments
    before the first flag are values of the flag `leading`. A --config file may have flags of other programs
    under the keys of `parts`, whose values are their dataclasses: these go before the text of KEY_flags.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if leading and argv and not argv[0].startswith("-"):
        argv = [f"--{leading}", *argv]
    shows_all = "--help_all" in argv
    parser = _build_parser(cls, description, shows_all=shows_all)
    try:
        namespace, unknown = parser.parse_known_args(["--help"] if shows_all else argv)
    except argparse.ArgumentError as error:
        problems.add(str(error))
        problems.exit_if_any()
    given = vars(namespace)
    _apply_switches(given, problems)
    places: dict[str, str] = {}
    if "config" in given:
        given, places = _add_config(cls, parser, given, parts or {}, problems)
    problems.notes += split_values(given, cls.__dataclass_fields__)
    # Arguments after an unknown flag are its values.
    for word in [word for word in unknown if word.startswith("-")] or unknown:
        _add_unknown(shortened(word), list(cls.__dataclass_fields__), problems)
    values = _convert_all(cls, given, places, problems)
    problems.given |= given.keys()
    for field in dataclasses.fields(cls):
        if field.metadata["required"] and given.get(field.name, "") in ("", []):
            problems.add(f"--{field.name} is required: {field.metadata['help']}")
    return cls(**values)


def say_loading() -> None:
    """Print, on the first rank of a program that begins, what it loads: its imports take several seconds."""
    if os.environ.get("RANK", "0") == "0":
        harden_streams()
        print("[   0 s] loading torch, transformers and deepspeed", file=sys.stderr)


def begin_tool(cls: type, description: str, parse: Callable = parse_args, **options: Any) -> None:
    """Exit, before a tool's slow imports, if the help is asked for or flags are invalid.

    `description` is the tool's docstring; `parse(cls, **options)` reads the flags as its main function does,
    which adds its own checks.
    """
    problems = Problems()
    paths = [word.rpartition("=")[2] for word in sys.argv[1:]]
    # A pipe, as of --config <(...), can be read once: by the tool itself.
    if not any(os.path.exists(path) and Path(path).is_fifo() for path in paths):
        parse(cls, description=description.splitlines()[0], problems=problems, **options)
    problems.exit_if_any()
    # Threads that wait for work spin for milliseconds, and take a core from ranks and programs beside them: a
    # step then takes up to ten times as long. OpenMP reads this when torch is imported: spin for 0.03 ms.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    gc.disable()  # until the program runs: collections take a quarter of the time of its imports
    exit_at_ctrl_c()


def begin_script(cls: type, description: str) -> None:
    """As `begin_tool`, for a step, which then prints what is loaded."""
    begin_tool(cls, description)
    say_loading()


def _convert_all(
    cls: type, given: Mapping[str, Any], places: Mapping[str, str], problems: Problems
) -> dict[str, Any]:
    """Values of the given flags, by name; `places` has the lines of those in a file."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        text = given.get(field.name)
        place = places.get(field.name, "")
        if text is None and field.name in given:
            problems.add(f"{place}--{field.name} needs a value: {field.metadata['help']}")
        elif text is not None and (text or not field.metadata["required"]):
            try:
                is_list = isinstance(text, list)
                values[field.name] = [_convert(field, t) for t in text] if is_list else _convert(field, text)
            except ValueError as error:  # the default is used, so that later checks can run
                problems.add(f"{place}{error}", flag=f"--{field.name}")
    return values


def _add_config(
    cls: type,
    parser: argparse.ArgumentParser,
    given: dict[str, Any],
    parts: Mapping[str, type],
    problems: Problems,
) -> tuple[dict[str, Any], dict[str, str]]:
    """The given flags and those of the --config file, with the places of the latter."""
    path = given.pop("config")
    if path is None:
        problems.add("--config needs a value: a YAML file with flags by their names")
        problems.exit_if_any()
    settings = read_config(path, problems, tuple(parts))
    of_file, places = _read_settings(parser, settings[""], cls, problems)
    _apply_switches(of_file, problems)
    for part, its_class in parts.items():
        its_parser = _build_parser(its_class, "", shows_all=True)
        its_flags, its_places = _read_settings(its_parser, settings[part], its_class, problems)
        _convert_all(its_class, its_flags, its_places, problems)
        words = [word for name, text in its_flags.items() for word in _to_words(name, text)]
        name = f"{part}_flags"
        texts = [shlex.join(words), given.get(name, of_file.get(name, ""))]
        if words:
            given[name] = " ".join(filter(None, texts))
    return of_file | given, {name: place for name, place in places.items() if name not in given}


def _to_words(name: str, text: str | list[str]) -> list[str]:
    """A flag of a file on a command line."""
    if isinstance(text, list):
        return [f"--{name}", *text]
    return [f"--{name}={text}"]


def _read_settings(
    parser: argparse.ArgumentParser, settings: Sequence[Setting], cls: type, problems: Problems
) -> tuple[dict[str, Any], dict[str, str]]:
    """Texts of the flags of a file and their places, by name."""
    texts: dict[str, Any] = {}
    places: dict[str, str] = {}
    for name, value, place in settings:
        action = parser._option_string_actions.get(f"--{name}")
        if action is None or name in ("config", "help", "help_all", "version"):
            _add_unknown(f"--{name}", list(cls.__dataclass_fields__), problems, place)
        elif value is None:
            problems.add(f"{place}--{name} needs a value")
        elif isinstance(value, list) and action.nargs != "*":
            problems.add(f"{place}--{name} takes one value, not a list")
        elif action.dest in texts:
            first = places[action.dest].removesuffix(": ")
            problems.add(f"{place}--{name} is another name of the flag in {first}")
        else:
            if action.nargs == "*" and isinstance(value, str):
                value = [value]
            texts[action.dest] = value
            places[action.dest] = place
    return texts, places


def _apply_switches(given: dict[str, Any], problems: Problems) -> None:
    """Add the flags that the given switches set."""
    for name in [name for name in SWITCHES if name in given]:
        (flag_name, value) = SWITCHES[name]
        text = given[name].lower()
        if text not in ("true", "false"):
            problems.add(f"--{name} {shortened(text)}: expected true or false")
        elif text == "true" and flag_name == "trackers":
            given["trackers"] = [*given.get("trackers", []), value]
        elif text == "true":
            given.setdefault(flag_name, value)


def _add_unknown(word: str, known: list[str], problems: Problems, place: str = "") -> None:
    """Add the problem of an argument that is neither a flag of the program nor a flag's value; `place`
    precedes the message.
    """
    name = word.split("=")[0]
    bare = name.removeprefix("--")
    if bare in REMOVED:
        problems.add(f"{place}{name} has been removed; CHANGELOG.md names its replacement")
    elif word.startswith("-"):
        near = difflib.get_close_matches(bare.replace("-", "_"), known, n=1)
        hint = f"; did you mean --{near[0]}?" if near else "; --help_all lists all flags"
        problems.add(f"{place}unknown flag {name}{hint}")
    else:
        problems.add(f"unexpected argument {word!r} among the flags")


def _convert(field: dataclasses.Field, text: str) -> Any:
    """Value of a flag. Raises ValueError, with the message, for an invalid text."""
    scalar = field_type(field)[0]
    limits = field.metadata["range"]
    choices = field.metadata["choices"]
    shown = f"--{field.name} {shortened(text)}"
    if scalar is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{shown}: expected true or false")
        return text.lower() == "true"
    if text.lower() == "none" and types.NoneType in typing.get_args(field.type):
        return None
    try:
        value = scalar(text)
        if not is_usable(value):
            raise ValueError(text)
    except ValueError as error:
        raise ValueError(f"{shown}: expected {KINDS[scalar]}") from error
    if not all(RANGE[name][1](value, limit) for name, limit in limits.items()):
        raise ValueError(f"{shown} must be {describe_range(limits)}")
    if choices and value not in choices:
        raise ValueError(f"{shown}: choose from {', '.join(map(str, choices))}")
    return value
