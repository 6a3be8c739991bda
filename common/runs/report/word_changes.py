"""What changed from one text to the next, by words. PURE."""

import difflib
import re
from typing import NamedTuple

_PIECE = re.compile(r"\s+|\w+|[^\w\s]")
MAX_WORDS = 2000  # beyond it matching takes seconds


class Change(NamedTuple):
    """A piece of text that stayed (`same`), came (`new`) or went (`gone`)."""

    text: str
    kind: str


def split_words(text: str) -> list[str]:
    """Return words, single marks, and the space between them; joined they are the text again."""
    return _PIECE.findall(text)


def find_changes(before: str, after: str) -> list[Change]:
    """Return the pieces of both texts in order: without `gone` they are `after`, without `new` `before`."""
    old, new = split_words(before), split_words(after)
    if max(len(old), len(new)) > MAX_WORDS:
        return [Change(after, "same")] if before == after else [Change(before, "gone"), Change(after, "new")]
    changes: list[Change] = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, first, end, new_first, new_end in matcher.get_opcodes():
        if kind == "equal":
            changes.append(Change("".join(new[new_first:new_end]), "same"))
            continue
        if end > first:
            changes.append(Change("".join(old[first:end]), "gone"))
        if new_end > new_first:
            changes.append(Change("".join(new[new_first:new_end]), "new"))
    return changes


def similarity(before: str, after: str) -> float:
    """Return the share of words that both texts have in one order, from 0 to 1."""
    old, new = (
        [piece for piece in split_words(text)[:MAX_WORDS] if not piece.isspace()] for text in (before, after)
    )
    return difflib.SequenceMatcher(None, old, new, autojunk=False).ratio() if old or new else 1.0
