"""A start that must not be made, and a step that must not. No torch in here."""

import os
import re
import sys
from typing import Any


class Problems:
    """Everything that is wrong with a start-up, told in one message."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.unread_flags: set[str] = set()  # their defaults stand in for values that cannot be used

    def add(self, message: str, *, flag: str = "") -> None:
        """Remember one problem: it names the flag or file, the value and the cure.

        `flag` is one whose value cannot be used. A later message that names it is dropped: it would speak of
        the default.
        """
        is_about_default = self.unread_flags & set(re.findall(r"--\w+", message))
        if message not in self.messages and not is_about_default:
            self.messages.append(message)
        if flag:
            self.unread_flags.add(flag)

    def check(self, is_good: bool, message: str) -> None:
        """Add `message` unless `is_good`."""
        if not is_good:
            self.add(message)

    def exit_if_any(self, *, is_told_by_all: bool = False) -> None:
        """Leave with exit code 2 when anything was added; only the first process prints, or all."""
        if not self.messages:
            return
        rank = os.environ.get("RANK", "0")
        if is_told_by_all or not rank.isdigit() or int(rank) == 0:
            count = len(self.messages)
            print(f"error: {count} problem{'s' if count > 1 else ''}, nothing was started:", file=sys.stderr)
            for message in self.messages:
                print(f"  - {message}", file=sys.stderr)
            sys.stderr.flush()
        raise SystemExit(2)


class StepRefused(RuntimeError):
    """A step was refused before anything was changed; the message names the cause and the cure.

    Every rank raises it alike. `batches` is what the step was to be made of, where that is known.
    """

    def __init__(self, message: str, batches: list[Any] | None = None) -> None:
        super().__init__(message)
        self.batches = batches or []


class TooManyBadSteps(RuntimeError):
    """More steps were refused than --max_bad_steps: the run ends with its state saved."""
