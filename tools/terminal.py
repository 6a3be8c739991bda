"""Text for a terminal: colours, escaped control characters. Imports no torch."""

import unicodedata

from rich.console import Console

# Texts of models and data are not markup. No colours if stdout is not a terminal, or for NO_COLOR.
CONSOLE = Console(markup=False, emoji=False, highlight=False, soft_wrap=True)


def visible(text: str, kept: str = "\n") -> str:
    """The text with control characters other than `kept` escaped: a row must not control the terminal."""
    parts = "\u200c\u200d"  # zero-width joiners of words and emoji
    hidden = {c for c in set(text) - set(kept + parts) if unicodedata.category(c) in ("Cc", "Cf", "Cs")}
    return "".join(c.encode("unicode_escape").decode() if c in hidden else c for c in text)
