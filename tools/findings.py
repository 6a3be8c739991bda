"""What a check found, as a line for a terminal, and how far apart two ways to compute a number may be."""

import os
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from common.ranks.failures import first_line, kind_and_line

# Of the largest number that is computed: rounding alone stays well below, an error in a formula well above.
RELATIVE = {"fp32": 3e-5, "bf16": 4e-2}
# SGR codes, ECMA-48 8.3.117. A special token has a background: it shows though its text be blank.
STYLES = {
    "learned": "32",
    "learned special": "30;42",
    "context": "90",
    "special": "30;47",
    "rejected": "31",
    "rejected special": "30;41",
    "title": "1",
    "note": "33",
    "good": "1;32",
    "bad": "1;31",
}
_STATES = {True: ("ok", "good"), False: ("FAIL", "bad"), None: ("note", "note")}


def use_color() -> bool:
    """Return whether stdout is a terminal, unless NO_COLOR (no-color.org) or TERM=dumb refuses colours."""
    is_refused = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_refused


def paint(text: str, style: str) -> str:
    """Return the text in a style of STYLES, which ends with each line: a margin can stand between."""
    if not use_color():
        return text
    return "\n".join(f"\x1b[{STYLES[style]}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def visible(text: str) -> str:
    """Return the text with its control characters spelled out: a row must not steer the terminal."""
    return "".join(c.encode("unicode_escape").decode() if _is_hidden(c) else c for c in text)


def _is_hidden(character: str) -> bool:
    if character in "\n\u200c\u200d":  # the latter two are parts of words and of emoji
        return False
    return unicodedata.category(character) in ("Cc", "Cf", "Cs")


@dataclass(frozen=True)
class Finding:
    """One line of the report; `is_ok` None is a remark that decides nothing."""

    name: str
    text: str
    is_ok: bool | None = None
    why: str = ""

    def line(self) -> str:
        """Return state, name, what was found, and why it matters."""
        state, style = _STATES[self.is_ok]
        shown = paint(f"{state:<5}", style) + visible(f"{self.name:<25}{self.text}")
        return shown + paint(f"  ({self.why})", "context") if self.why else shown


def tolerance_of(dtype: str, largest: float) -> float:
    """Return how far apart numbers up to `largest` may be that are computed in different orders."""
    return RELATIVE[dtype] * max(largest, 1.0)


def compare(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float, why: str) -> Finding:
    """Return the finding on two tensors of one shape; NaN in either is a failure."""
    difference = float((found.double() - expected.double().to(found.device)).abs().max())
    text = f"largest difference {difference:.1e}, at most {tolerance:.1e}"
    return Finding(name, text, difference <= tolerance, why)


def guarded(name: str, check: Callable[..., Iterable[Finding]], *args: Any) -> Iterator[Finding]:
    """Yield what a check finds; what it raises is a failure of this name, and the next check still runs."""
    try:
        yield from check(*args)
    except Exception as error:  # the model's own code raises what it likes, and that it does is the finding
        yield Finding(name, told(error), is_ok=False)


def told(error: BaseException) -> str:
    """Return an error in one line: our own speak for themselves, others with their type."""
    return first_line(error) if type(error) is ValueError else kind_and_line(error)


def run_tool(main: Callable[[], Any]) -> None:
    """Run a tool's main function; Ctrl-C and a reader that has gone end it without a traceback."""
    if hasattr(sys.stdout, "reconfigure"):  # what the terminal's encoding lacks becomes a question mark
        sys.stdout.reconfigure(errors="replace")
    try:
        main()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
