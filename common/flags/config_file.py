"""Flags in a YAML file: reading `--config FILE`, and writing the file of a run.

Does not import torch.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import yaml

from common.flags.problems import Problems


class Setting(NamedTuple):
    """A flag in a file."""

    name: str
    value: str | list[str] | None  # None: there is no value
    place: str  # "run.yaml, line 3: "


def read_config(path: str, problems: Problems, parts: tuple[str, ...] = ()) -> dict[str, list[Setting]]:
    """Settings of a file in their order: the program's under "", and those under each of the keys `parts`.

    Problems name file and line; exits if the file cannot be read.
    """
    settings: dict[str, list[Setting]] = {"": []} | {part: [] for part in parts}
    root = None
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file, Loader=yaml.SafeLoader)
        problems.add_if(
            not isinstance(root, yaml.MappingNode | None), f"--config {path}: expected lines 'flag: value'"
        )
    except OSError as error:
        problems.add(f"--config {path}: {error.strerror}")
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        problems.add(f"--config {path}: {' '.join(str(error).split())}")
    problems.exit_if_any()  # the flags are not known: later problems would follow from this one
    for key, node, place in _entries(root, path, problems):
        if key in parts and isinstance(node, yaml.MappingNode):
            for name, value, its_place in _entries(node, path, problems):
                _add(settings[key], name, value, its_place, problems)
        else:
            _add(settings[""], key, node, place, problems)
    return settings


def _entries(mapping: Any, path: str, problems: Problems) -> Iterator[tuple[str, Any, str]]:
    """Keys of a mapping with their nodes and places; a key that occurs again is a problem."""
    lines: dict[str, int] = {}
    for key_node, node in mapping.value if mapping is not None else ():
        key = str(key_node.value).removeprefix("--").replace("-", "_")
        line = key_node.start_mark.line + 1
        place = f"{path}, line {line}: "
        if key in lines:
            problems.add(f"{place}{key} is given twice, first in line {lines[key]}; remove one")
            continue
        lines[key] = line
        yield key, node, place


def _add(settings: list[Setting], name: str, node: Any, place: str, problems: Problems) -> None:
    nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(item, yaml.ScalarNode) for item in nodes):
        problems.add(f"{place}{name}: expected a value or a list of values")
        return
    values = ["none" if item.tag.endswith(":null") else item.value for item in nodes]
    if isinstance(node, yaml.SequenceNode):
        settings.append(Setting(name, values, place))
    elif node.value or not node.tag.endswith(":null"):
        settings.append(Setting(name, values[0], place))
    else:
        settings.append(Setting(name, None, place))  # "flag:" without a value


def text_of_config(args: Any, default_of: Callable[[dataclasses.Field], Any], program: str) -> str:
    """YAML text with the flags of a run that differ from their defaults."""
    values = {}
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        if isinstance(value, str):
            value = str(value)  # of an Interval, which PyYAML does not know
        if value != default_of(field):
            values[field.name] = value
    values.pop("auto", None)  # what it chose is among them
    # PyYAML writes Unicode's other line ends as they are, and reads them as spaces.
    is_printable = json.dumps(values, ensure_ascii=False).isprintable()
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=is_printable, width=100)
    return f"# python {program} --config THIS_FILE starts this run; other flags have their defaults.\n{text}"
