"""What a terminal shows of answers while they are written: one after the other, or two side by side."""

import contextlib
import os
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterator
from types import FrameType

from rich.console import Console
from rich.live import Live
from rich.table import Table
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

    A second Ctrl-C, before the answer has ended, leaves the program.
    """
    is_interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_interrupted.is_set():
            os.write(2, b"stopped by Ctrl-C\n")
            os._exit(130)
        is_interrupted.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield is_interrupted
    finally:
        signal.signal(signal.SIGINT, before)


class PlainDisplay(contextlib.nullcontext):
    """Answers as lines of text, each behind its label; a pipe or a file gets them to the letter."""

    def __init__(self, labels: list[str]) -> None:
        super().__init__()
        self.labels = labels
        self._shown = printable if sys.stdout.isatty() else str

    def begin(self, number: int) -> None:
        """Start the answer of a model."""
        print(f"{self.labels[number]}> ", end="", flush=True)

    def add(self, number: int, text: str) -> None:
        """Show the next piece of the answer."""
        print(self._shown(text), end="", flush=True)

    def end(self, number: int, note: str) -> None:
        """Close the answer; `note` is told behind it."""
        print(f"\n{' ' * len(self.labels[number])}  {note}" if note else "", flush=True)


class SideBySide:
    """The answers of two models in two columns of a terminal; as a context it draws them, and leaves them."""

    def __init__(self, labels: list[str], console: Console | None = None) -> None:
        self.labels, self.console = labels, console or Console(highlight=False)

    def __enter__(self) -> None:
        self._texts, self._notes = ["", ""], ["", ""]
        # A live picture that is taller than the screen cannot be redrawn: it is cut, and printed whole below.
        self._live = Live(console=self.console, transient=True, get_renderable=self._table)
        self._live.start()

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self.console.print(self._table())

    def begin(self, number: int) -> None:
        """Start the answer of a model."""

    def add(self, number: int, text: str) -> None:
        """Show the next piece of the answer."""
        self._texts[number] += printable(text)

    def end(self, number: int, note: str) -> None:
        """Close the answer; `note` is told under it."""
        self._notes[number] = note

    def _table(self) -> Table:
        table = Table.grid(expand=True, padding=(0, 2))
        for _ in self.labels:
            table.add_column(ratio=1)
        # Text objects, never markup: [red] in an answer is an answer's.
        table.add_row(*(Text(label, style="bold", overflow="fold") for label in self.labels))
        table.add_row(*map(Text, self._texts))
        if any(self._notes):
            table.add_row(*(Text(note, style="dim") for note in self._notes))
        return table
