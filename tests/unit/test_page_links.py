"""Every relative link of every page points at a file that exists, and at a heading that it has."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from page_commands import ROOT, pages

from docs.make_configuration import anchor

LINK = re.compile(r"\]\(([^()\s]+(?:\([^()\s]*\)[^()\s]*)*)\)")
IMAGE = re.compile(r'\b(?:src|srcset)="([^"\s]+)"')
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors_of(page: Path) -> set[str]:
    """What can stand behind # in a link to the page; a heading that comes again gets -1, -2."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        name = anchor(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip()))
        count = sum(re.sub(r"-\d+$", "", other) == name for other in found)
        found.append(f"{name}-{count}" if count else name)
    return set(found)


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))
    broken = []
    for link in LINK.findall(text) + IMAGE.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, heading = unquote(link).partition("#")
        target = (page.parent / place).resolve() if place else page
        is_broken = not target.exists() or (heading and heading not in anchors_of(target))
        if is_broken:
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_page_links_exist(page):
    assert broken_links(page) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "other.md").write_text("# A `name`, of_x!\n## Twice\n## Twice\n```\n# none\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-name-of_x) [c](other.md#twice-1) [d](https://x.y) `[e](no.md)`\n"
        "[f](no.md) [g](other.md#none) [h](#here) [i](other.md#twice-2)\n```\n[j](no.md)\n```\n"
        '<source srcset="other.md"><img src="no.png">'
    )
    assert broken_links(page) == ["no.md", "other.md#none", "#here", "other.md#twice-2", "no.png"]
