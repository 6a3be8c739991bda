"""Text for a terminal: colours where there are any, brackets where there are none. PURE."""

import os
import sys
import unicodedata
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple, TextIO

# SGR codes, ECMA-48 8.3.117. A special token has a background: it shows though its text be blank.
STYLES = {
    "learned": "32",
    "learned special": "30;42",
    "context": "90",
    "special": "30;47",
    "rejected": "31",
    "rejected special": "30;41",
    "cut": "33",
    "title": "1",
    "note": "33",
    "good": "1;32",
    "bad": "1;31",
}
MAX_SHOWN = 1600  # characters of one span; of a longer one the beginning and the end are shown


class Span(NamedTuple):
    """A piece of text of one kind, a key of STYLES."""

    text: str
    kind: str

    @property
    def counts(self) -> bool:
        """Whether it is learned or scored."""
        return self.kind.startswith(("learned", "rejected"))


class Painter:
    """Writes spans; `[[` and `]]` stand around what counts when there are no colours."""

    def __init__(self, *, has_color: bool, bar: str = "#") -> None:
        self.has_color, self.bar = has_color, bar

    @classmethod
    def for_stream(cls, stream: TextIO, *, no_color: bool) -> "Painter":
        """Colours for a terminal, unless refused by the flag, by NO_COLOR (no-color.org) or by TERM=dumb."""
        refused = no_color or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        is_wide = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
        return cls(has_color=stream.isatty() and not refused, bar="█" if is_wide else "#")

    def paint(self, text: str, kind: str) -> str:
        """`text` in its style; the style ends with each line, so that a margin can stand between."""
        if not self.has_color or not text:
            return text
        lines = (f"\x1b[{STYLES[kind]}m{line}\x1b[0m" if line else "" for line in text.split("\n"))
        return "\n".join(lines)

    def show(self, spans: Iterable[Span]) -> str:
        """Spans end to end, control characters visible and long spans shortened."""
        shown = [Span(shorten(visible(span.text)), span.kind) for span in spans if span.text]
        if shown:
            shown[0] = Span(spell_first_breaks(shown[0].text), shown[0].kind)
        if self.has_color:
            return "".join(self.paint(*span) for span in shown)
        result = ""
        for counts, group in groupby(shown, key=lambda span: span.counts):
            text = "".join(span.text for span in group)
            result += f"[[{text}]]" if counts else text
        return result


def visible(text: str) -> str:
    """Text whose control characters are spelled out: a row must not steer the terminal."""
    return "".join(_spelled(c) if _is_hidden(c) else c for c in text)


def _is_hidden(character: str) -> bool:
    if character in "\n\u200c\u200d":  # the latter two are parts of words and of emoji
        return False
    return unicodedata.category(character) in ("Cc", "Cf", "Cs")


def _spelled(character: str) -> str:
    return character.encode("unicode_escape").decode()


def shorten(text: str) -> str:
    """The beginning and the end of a text of more than MAX_SHOWN characters."""
    hidden = len(text) - MAX_SHOWN
    if hidden <= 0:
        return text
    return f"{text[: MAX_SHOWN // 2]} [... {hidden:,} characters ...] {text[-MAX_SHOWN // 2 :]}"


def spell_first_breaks(text: str) -> str:
    r"""Line breaks at the very start as \n: a template's own would look like empty lines of ours."""
    bare = text.lstrip("\n")
    return "\\n" * (len(text) - len(bare)) + bare


def indent(text: str, margin: str) -> str:
    """Every line behind `margin`."""
    return "\n".join((margin + line).rstrip() for line in text.split("\n"))


def make_stdout_tolerant() -> None:
    """A character that the terminal's encoding lacks becomes a question mark, not an error."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
