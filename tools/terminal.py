"""Text for a terminal: colours, control characters spelled out, an end without traceback. No torch here."""

import os
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

from rich.console import Console

# Texts of models and data are no markup. Colours are left out where stdout is no terminal, and for NO_COLOR.
CONSOLE = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)


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
