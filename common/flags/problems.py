"""Problems found at start-up, collected into one message; flag value types; warnings about flags without
effect.

Does not import torch.
"""

import contextlib
import dataclasses
import operator
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from common.flags.other_names import IGNORED, OLDER_NAMES
from common.flags.value_forms import Interval

# int: above it float64 skips integers. float: maximum of fp32, the dtype of losses.
LARGEST = {int: 2**53, float: 3.4e38}
LONGEST_NAME, LONGEST_PATH = 255, 4095  # bytes, on Linux
KINDS = {
    int: "a whole number, 2**53 at most",
    float: "a number that fp32 can hold",
    str: f"UTF-8 text without NUL, {LONGEST_PATH} bytes and names of {LONGEST_NAME} at most",
    Interval: "a number of steps, epoch, or a time such as 90s, 30m or 2h",
}
LONGEST_SHOWN = 60  # characters
RANGE = {
    "low": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "high": ("at most", operator.le),
    "below": ("below", operator.lt),
}


class Problems:
    """All problems of a start-up, reported in one message."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.notes: list[str] = []  # about flags in an older spelling
        self.unread_flags: set[str] = set()  # flags with invalid values, whose defaults are used
        self.given: set[str] = set()  # names of the flags on the command line and in --config

    def add(self, message: str, *, flag: str = "") -> None:
        """Add a problem that names the flag or file, the value and the cure.

        `flag` is one with an invalid value. Later messages that name it are dropped, because they would be
        about its default.
        """
        is_about_default = self.unread_flags & set(re.findall(r"--\w+", message))
        if message not in self.messages and not is_about_default:
            self.messages.append(message)
        if flag:
            self.unread_flags.add(flag)

    def add_if(self, is_wrong: Any, message: str) -> None:
        """Add `message` if `is_wrong`, a condition of any type."""
        if is_wrong:
            self.add(message)

    @contextlib.contextmanager
    def catch(self, prefix: str = "") -> Iterator[None]:
        """Context that adds the message of a ValueError, after `prefix`."""
        try:
            yield
        except ValueError as error:
            self.add(f"{prefix}{error}")

    def exit_if_any(self, *, on_every_rank: bool = False) -> None:
        """Exit with code 2 if there are problems. The first process of each machine prints them, because a
        machine may lack a file that others have; with `on_every_rank`, every process.
        """
        if not self.messages:
            return
        rank = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
        if on_every_rank or not rank.isdigit() or int(rank) == 0:
            count = len(self.messages)
            print(f"error: {count} problem{'s' if count > 1 else ''}, nothing was started:", file=sys.stderr)
            for message in self.messages:
                print(f"  - {message}", file=sys.stderr)
            sys.stderr.flush()
        raise SystemExit(2)


def shortened(text: str) -> str:
    """A value for a message, truncated if it is long."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def describe_range(limits: dict[str, float]) -> str:
    """A flag's range in words, such as `at least 0 and below 1`; empty without limits."""
    return " and ".join(f"{RANGE[name][0]} {limit}" for name, limit in limits.items())


def is_usable(value: object) -> bool:
    """Whether a value is usable anywhere: a number that fp32 or float64 holds, or text that is valid in file
    names and addresses.
    """
    if not isinstance(value, str):
        return abs(value) <= LARGEST[type(value)]
    try:
        data = value.encode()
    except UnicodeEncodeError:
        return False
    longest = 0 if "://" in value else max(len(part) for part in data.split(b"/"))
    return b"\0" not in data and longest <= LONGEST_NAME and len(data) <= LONGEST_PATH


def has_hub_form(name: str) -> bool:
    """Whether a name has the form of a hub name, NAME or OWNER/NAME; any other can only be a path."""
    return not name.startswith(("/", ".", "~")) and name.count("/") < 2


def given_flags(argv: Sequence[str] | None = None) -> set[str]:
    """Names, without dashes, of the flags on the command line."""
    words = sys.argv[1:] if argv is None else argv
    return {word.split("=")[0].removeprefix("--") for word in words if word.startswith("--")}


def no_effect_notes(args: Any, argv: Sequence[str] | None = None) -> list[str]:
    """A line for each given flag without effect, in any run or without another flag.

    Flags left at their default are not reported.
    """
    given = given_flags(argv)
    fields = dataclasses.fields(args)
    ignored = (given & IGNORED.keys()) - {field.name for field in fields}
    lines = [f"--{name} has no effect: {IGNORED[name]}" for name in sorted(ignored)]
    for field in (f for f in fields if given & {f.name, OLDER_NAMES.get(f.name)}):
        partners = re.findall(r"(\w+)(!?=|)(\S*)", field.metadata["only_with"])  # name, sign, value
        partners = [partner for partner in partners if hasattr(args, partner[0])]  # that the program has
        acts = not partners or any(_is_set(args, *partner) for partner in partners)
        if _is_set(args, field.name) and not acts:
            shown = [
                f"a --{name} other than {value}" if sign == "!=" else f"--{name} {value}".rstrip()
                for name, sign, value in partners
            ]
            lines.append(f"--{field.name} has no effect without {' or '.join(shown)}")
    return lines


def _is_set(args: Any, name: str, sign: str = "", wanted: str = "") -> bool:
    """Whether a flag has the value in `only_with`, or without a value there, one other than its default."""
    value = getattr(args, name)
    if not sign:
        return value != getattr(type(args), name, [])
    is_same = wanted in value if isinstance(value, list) else str(value) == wanted
    return is_same == (sign == "=")
