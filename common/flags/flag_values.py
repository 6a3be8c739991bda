"""What a flag's value can be, whatever the flag: told at once, before it fails far from the command line; and
which of the given flags do nothing."""

import argparse
import dataclasses
import re
import sys
from math import inf
from typing import Any

from common.flags.other_names import IGNORED, OLDER_NAMES, SWITCHES
from common.flags.refusal import Problems

LARGEST_INT = 2**53  # beyond it float64 skips numbers
LARGEST_FLOAT = 3.4e38  # of fp32, in which losses are computed
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, on Linux
LONGEST_SHOWN = 60  # characters


def check_value(value: object) -> None:
    """Raise ValueError, with what was expected, for a value that cannot be used anywhere."""
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        raise ValueError("expected a smaller number: 2**53 at most")
    if isinstance(value, float) and abs(value) > LARGEST_FLOAT:
        raise ValueError("expected a number that fp32 can hold: 3.4e38 at most")
    if isinstance(value, str):
        _check_text(value)


def describe_range(
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> str:
    """Return a flag's range in words, such as `at least 0 and below 1`; empty without a limit."""
    if low is not None and high is not None:
        return f"from {low} to {high}"
    limits = {"at least": low, "above": above, "at most": high, "below": below}
    return " and ".join(f"{word} {limit}" for word, limit in limits.items() if limit is not None)


def is_in_range(
    value: float, low: float = -inf, high: float = inf, above: float = -inf, below: float = inf
) -> bool:
    """Return whether a number lies from `low` to `high`, above `above` and below `below`."""
    return low <= value <= high and above < value < below


def shortened(text: str) -> str:
    """Return a value for a message: the beginning of a long one."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def has_hub_form(name: str) -> bool:
    """Return whether a name could be one of a hub, NAME or OWNER/NAME; any other can only be a path."""
    return not name.startswith(("/", ".", "~")) and name.count("/") < 2


def _check_text(text: str) -> None:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"expected UTF-8 text, which ends at character {error.start}") from error
    if b"\0" in data:
        raise ValueError("expected text without NUL characters")
    is_address = "://" in text
    longest = max(len(part) for part in data.split(b"/"))
    if not is_address and longest > LONGEST_NAME:
        raise ValueError(f"expected names of {LONGEST_NAME} bytes at most, one has {longest}")
    if len(data) > LONGEST_PATH:
        raise ValueError(f"expected a text of {LONGEST_PATH} bytes at most, it has {len(data)}")


def apply_switches(given: argparse.Namespace, problems: Problems) -> None:
    """Put the flags that switches stand for among those that were given."""
    for name, (flag_name, value) in SWITCHES.items():
        text = getattr(given, name, None)
        if text is None or text.lower() == "false":
            continue
        if text.lower() != "true":
            problems.add(f"--{name} {shortened(text)}: expected true or false")
            continue
        before = getattr(given, flag_name, None)
        if flag_name == "trackers":
            given.trackers = [*(before or []), value]
        elif before is None:
            setattr(given, flag_name, value)


def given_flags(argv: list[str] | None = None) -> set[str]:
    """Return the names, without dashes, of the flags on the command line."""
    words = sys.argv[1:] if argv is None else argv
    return {word.split("=")[0].removeprefix("--") for word in words if word.startswith("--")}


def no_effect_notes(args: Any, argv: list[str] | None = None) -> list[str]:
    """Return one line for each flag that was given and does nothing: in any run, or without another flag.

    One that would only do something with another, and has its default, is not told of.
    """
    given = given_flags(argv)
    fields = dataclasses.fields(args)
    ignored = (given & IGNORED.keys()) - {field.name for field in fields}
    lines = [f"--{name} has no effect: {IGNORED[name]}" for name in sorted(ignored)]
    for field in (f for f in fields if given & {f.name, OLDER_NAMES.get(f.name)}):
        partners = field.metadata["only_with"].split()
        acts = not partners or any(_is_set(args, partner) for partner in partners)
        if _is_set(args, field.name) and not acts:
            lines.append(f"--{field.name} has no effect without {' or '.join(map(_shown, partners))}")
    return lines


def _is_set(args: Any, partner: str) -> bool:
    """Return whether a flag of `only_with` has its value, or without one another than its default."""
    name, sign, wanted = re.fullmatch(r"(\w+)(!?=)?(.*)", partner).groups()
    value = getattr(args, name)
    if not sign:
        return value != getattr(type(args), name, [])
    is_same = wanted in value if isinstance(value, list) else str(value) == wanted
    return is_same == (sign == "=")


def _shown(partner: str) -> str:
    """Return what a person would have to give."""
    name, sign, wanted = re.fullmatch(r"(\w+)(!?=)?(.*)", partner).groups()
    return f"another --{name} than {wanted}" if sign == "!=" else f"--{name} {wanted}".rstrip()
