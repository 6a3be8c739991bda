"""The commands that pages show: what stands in their ```bash blocks, word by word."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Command(NamedTuple):
    """A line of a page's bash block, its continuation lines joined, without comments and variables."""

    page: str
    words: list[str]


def pages() -> list[Path]:
    """Return all Markdown files of the repository."""
    folders = [p for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".") and p.name != "output"]
    return sorted([*ROOT.glob("*.md"), *(page for folder in folders for page in folder.rglob("*.md"))])


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands_of(page: Path) -> list[Command]:
    """Return the commands of a page in their order."""
    lines = "".join(blocks(page.read_text(), "bash")).replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words:
            found.append(Command(str(page.relative_to(ROOT)), words))
    return found
