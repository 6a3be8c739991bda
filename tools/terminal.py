"""Text for a terminal: colours, control characters spelled out, an end without traceback. No torch here."""

import os
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

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
    kept = "\n\u200c\u200d"  # the latter two are parts of words and of emoji
    hidden = {c for c in set(text) - set(kept) if unicodedata.category(c) in ("Cc", "Cf", "Cs")}
    return "".join(c.encode("unicode_escape").decode() if c in hidden else c for c in text)


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
