"""docs/seed_rows.md keeps what it says: each row stands there once, and all that it names exists.

A complaint is a line of text that names the row, or what does not exist; a page without any is right.
"""

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.flags.other_names import IGNORED, SWITCHES
from docs.make_configuration import find_programs

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "seed_rows.md").read_text()
LAST = {"R": 65, "O": 35, "V": 38, "D": 66, "A": 35}
ROWS = [f"{letter}{number}" for letter, last in LAST.items() for number in range(1, last + 1)]
FLAGS = {field.name for program in find_programs() for field in dataclasses.fields(program.flags)}
FLAGS |= IGNORED.keys() | SWITCHES.keys()
STATES = ("done", "partly", "not here", "does not apply")
MISSING = "Missing: "
MOST_WORDS = 10  # of what a row asks for
ROW_LINE = re.compile(r"\| [A-Z]\d+ \|")
TEST = re.compile(r"test_\w+\.py::test_\w+")
NAMED = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Row:
    """A line of a table."""

    id: str
    asks: str
    state: str
    where: str
    test: str


class Repository:
    """What a page may name: flags, files, and the functions, classes and methods in them."""

    def __init__(self, root: Path, flags: set[str]) -> None:
        self.root, self.flags = root, flags
        files = [*root.glob("*.py"), *root.glob("[a-z]*/**/*.py")]
        self.names = {str(file.relative_to(root)): names_in(file) for file in files}
        code = (names for file, names in self.names.items() if not file.startswith("tests/"))
        self.symbols = set().union(*code)

    def has(self, name: str) -> bool:
        """Whether there is such a flag, symbol, file, or place in a file; a folder need not be told."""
        if name.startswith("--"):
            return name[2:] in self.flags
        path, colons, place = name.partition("::")
        found = [names for file, names in self.names.items() if f"/{file}".endswith(f"/{path}")]
        if colons:
            return any(place in names for names in found)
        return name in self.symbols or bool(found) or any(self.root.glob(name))


def names_in(file: Path) -> set[str]:
    """Return functions, classes and their methods, `Class.method`, as the syntax tree has them."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def read_rows(page: str) -> list[Row]:
    """Return the rows of all tables."""
    lines = [line for line in page.splitlines() if ROW_LINE.match(line)]
    return [Row(*(cell.strip() for cell in line.strip().strip("|").split("|"))) for line in lines]


def complaints_about_row(row: Row) -> Iterator[str]:
    """A row has its few words, its state, a place and tests or a reason, and what is missing where partly."""
    tests = NAMED.findall(row.test)
    if not 0 < len(row.asks.split()) <= MOST_WORDS:
        yield f"{row.id} asks in {len(row.asks.split())} words, not in 1 to {MOST_WORDS}"
    if row.state not in STATES:
        yield f"{row.id} is {row.state!r}, none of {STATES}"
    if not row.where:
        yield f"{row.id} is nowhere, for no reason"
    if (MISSING in row.where) != (row.state == "partly"):
        yield f"{row.id} is {row.state}, and {MISSING.strip()!r} says otherwise"
    if bool(tests) != (row.state in ("done", "partly")):
        yield f"{row.id} is {row.state} with {len(tests)} tests"
    yield from (f"{row.id}: {name} is no test" for name in tests if not TEST.fullmatch(name))


def complaints_about(page: str, repository: Repository, wanted: list[str]) -> list[str]:
    """Return all that is wrong with a page."""
    rows = read_rows(page)
    counts = Counter(row.id for row in rows)
    found = [f"{row_id} is missing" for row_id in wanted if not counts[row_id]]
    found += [f"{row_id} stands there {count} times" for row_id, count in counts.items() if count > 1]
    found += [f"{row_id} is no row" for row_id in counts if row_id not in wanted]
    for row in rows:
        found += complaints_about_row(row)
    named = dict.fromkeys(NAMED.findall(page))
    return found + [f"there is no {name}" for name in named if not repository.has(name)]


def test_the_page_is_right():
    assert complaints_about(PAGE, Repository(ROOT, FLAGS), ROWS) == []


# ---- a made-up page, right, and with one thing wrong at a time

SOUND = """Rows: `docs/page.md`

| row | asks for | state | where, and what is missing | test |
|---|---|---|---|---|
| R1 | one thing | done | `--width`, `Sum.add` | `test_s.py::test_add` |
| R2 | two | partly | `sums.py::total`, `sums.py`. Missing: `code/` | `test_s.py::test_total` |
| O1 | a third | not here | nobody needs it | - |
"""
TREE = {
    "docs/page.md": "",
    "code/sums.py": "class Sum:\n    def add(self): ...\n\ndef total(): ...\n",
    "tests/unit/test_s.py": "def test_add(): ...\ndef test_total(): ...\ndef help_it(): ...\n",
}
WRONG = [
    ("test_s.py::test_total", "test_s.py::test_totals", "there is no test_s.py::test_totals"),
    ("test_s.py::test_total", "test_t.py::test_total", "there is no test_t.py::test_total"),
    ("`test_s.py::test_total`", "`test_s.py::help_it`", "R2: test_s.py::help_it is no test"),
    ("`test_s.py::test_total`", "`test_s.py`", "R2: test_s.py is no test"),
    ("`Sum.add`", "`Sum.subtract`", "there is no Sum.subtract"),
    ("`Sum.add`", "`test_add`", "there is no test_add"),
    ("sums.py::total", "sum.py::total", "there is no sum.py::total"),
    ("`sums.py`", "`ums.py`", "there is no ums.py"),
    ("`code/`", "`codes/`", "there is no codes/"),
    ("docs/page.md", "page.md", "there is no page.md"),
    ("`--width`", "`--widht`", "there is no --widht"),
    ("| O1 |", "| O2 |", "O1 is missing"),
    ("| O1 |", "| O2 |", "O2 is no row"),
    ("| O1 |", "| R1 |", "R1 stands there 2 times"),
    ("| `--width`, `Sum.add` |", "| |", "R1 is nowhere, for no reason"),
    ("| `test_s.py::test_add` |", "| - |", "R1 is done with 0 tests"),
    ("| - |", "| `test_s.py::test_add` |", "O1 is not here with 1 tests"),
    (" Missing: `code/`", "", "R2 is partly, and 'Missing:' says otherwise"),
    ("`Sum.add` |", "`Sum.add`. Missing: all |", "R1 is done, and 'Missing:' says otherwise"),
    ("| not here |", "| nowhere |", f"O1 is 'nowhere', none of {STATES}"),
    ("| a third |", "| a b c d e f g h i j k |", "O1 asks in 11 words, not in 1 to 10"),
]  # fmt: skip


@pytest.fixture
def complaints(tmp_path):
    """What is wrong with a page beside TREE."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return lambda page: complaints_about(page, Repository(tmp_path, {"width"}), ["R1", "R2", "O1"])


def test_a_sound_page_passes(complaints):
    assert complaints(SOUND) == []


@pytest.mark.parametrize(("right", "wrong", "told"), WRONG, ids=[told for *_, told in WRONG])
def test_what_is_wrong_is_told(right, wrong, told, complaints):
    assert SOUND.count(right) == 1
    assert told in complaints(SOUND.replace(right, wrong))
