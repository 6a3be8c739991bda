"""What a terminal shows of answers while they are written: one after the other, or two side by side."""

import contextlib
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

# They turn text around: what is shown would not be what was said.
_TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_SHOWN_INSTEAD = "\ufffd"


def printable(text: str) -> str:
    """Return the text without what a terminal would obey: escape sequences, carriage returns, bells."""
    return "".join(
        _SHOWN_INSTEAD if c in _TURNING or (unicodedata.category(c) == "Cc" and c not in "\n\t") else c
        for c in text
    )


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C in the block sets, and does nothing else. For the main thread.

    A second Ctrl-C, before the answer has ended, does what one did before the block: it leaves the program.
    """
    is_interrupted, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def interrupt(*_: Any) -> None:
        is_interrupted.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield is_interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class OneAfterAnother(contextlib.nullcontext):
    """Texts as they come; a pipe or a file gets them to the letter."""

    def add(self, number: int, text: str) -> None:
        """Show the next piece of a text."""
        print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


class SideBySide(Live):
    """Two texts in two columns of a terminal; as a context it draws them as they grow, and leaves them."""

    def __init__(self, console: Console | None = None) -> None:
        # A live picture that is taller than the screen cannot be redrawn: it is cut, and printed whole below.
        console = console or Console(highlight=False)
        self._texts: list[Text] = []
        super().__init__(console=console, transient=True, get_renderable=self._table)

    def __enter__(self) -> "SideBySide":
        # Text objects, never markup: [red] in an answer is an answer's.
        self._texts = [Text(overflow="fold"), Text(overflow="fold")]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.console.print(self._table())

    def add(self, number: int, text: str) -> None:
        """Show the next piece of a text."""
        self._texts[number].append(printable(text))

    def _table(self) -> Table:
        table = Table.grid(Column(ratio=1), Column(ratio=1), expand=True, padding=(0, 2))
        table.add_row(*self._texts)
        return table
