"""docs/seed_rows.md keeps what it says: each row stands there once, and all that it names exists.

A complaint is a line of text that names the row, or what does not exist; a page without any is right.
"""

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from step1_sft.arguments import SFTArguments
from step2_reward.arguments import RewardArguments, RewardEvalArguments
from step3_ppo.arguments import PPOArguments

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "seed_rows.md"
ROWS = [
    f"{letter}{number}" for letter, last in (("R", 65), ("O", 35), ("A", 35)) for number in range(1, last + 1)
]
FLAGS = {
    field.name
    for program in (SFTArguments, RewardArguments, RewardEvalArguments, PPOArguments)
    for field in dataclasses.fields(program)
}
MOST_WORDS = 10  # of what a row asks for
ROW_ID = re.compile(r"[A-Z]\d+")
NAMED = re.compile(r"`([^`]+)`")


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of a table: what a row asks for, then where it is and its tests, or a reason."""

    id: str
    asks: str
    rest: list[str]


def read_rows(page: str) -> list[Row]:
    """Return the rows of all tables, headings and rules left out."""
    found = []
    for line in page.splitlines():
        if not line.startswith("|"):
            continue
        row_id, asks, *rest = (cell.strip() for cell in line.strip().strip("|").split("|"))
        if row_id != "row" and not set(row_id) <= set("-: "):
            found.append(Row(row_id, asks, rest))
    return found


def names_in(file: Path) -> set[str]:
    """Return functions, classes and their methods, `Class.method`, as the syntax tree has them."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def complaint_about(name: str, root: Path, flags: set[str]) -> str:
    """Return what is wrong with what stands between backticks, "" with a flag, a file or a place in one."""
    if name.startswith("--"):
        return "" if name[2:] in flags else f"{name} is a flag of no program"
    path, colons, place = name.partition("::")
    if "/" not in path and not path.endswith((".py", ".md")):
        return f"{name} is neither a flag nor a file"
    if not (root / path).exists():
        return f"{path} does not exist"
    place = place.partition("[")[0]  # the id of a parametrised case
    if colons and not (path.endswith(".py") and place in names_in(root / path)):
        return f"{path} has no {place}"
    return ""


def is_test(name: str) -> bool:
    """Whether a place is one that pytest runs."""
    path, _, place = name.partition("::")
    file = path.rpartition("/")[2]
    return path.startswith("tests/") and file.startswith("test_") and place.startswith("test_")


def complaints_about_ids(rows: list[Row], page: str, wanted: list[str]) -> Iterator[str]:
    counts = Counter(row.id for row in rows)
    yield from (f"{row_id} is missing" for row_id in wanted if not counts[row_id])
    yield from (f"{row_id} stands there {count} times" for row_id, count in counts.items() if count > 1)
    yield from (f"{row_id} is no row" for row_id in counts if row_id not in wanted)
    text = "\n".join(line for line in page.splitlines() if not line.startswith("|"))
    yield from (f"{row_id} of the text is no row" for row_id in ROW_ID.findall(text) if row_id not in wanted)


def complaints_about_row(row: Row) -> Iterator[str]:
    """A row has its few words, and either a place with tests or a reason."""
    if not 0 < len(row.asks.split()) <= MOST_WORDS:
        yield f"{row.id} asks in {len(row.asks.split())} words, not in 1 to {MOST_WORDS}"
    if len(row.rest) == 1:
        if not row.rest[0]:
            yield f"{row.id} has no reason"
        return
    if len(row.rest) != 2:
        yield f"{row.id} has {2 + len(row.rest)} cells"
        return
    here, tests = row.rest[0], NAMED.findall(row.rest[1])
    if not here:
        yield f"{row.id} is nowhere"
    if not tests:
        yield f"{row.id} is shown by no test"
    yield from (f"{row.id}: {name} is no test" for name in tests if not is_test(name))


def complaints_about(page: str, *, root: Path, flags: set[str], wanted: list[str]) -> list[str]:
    """Return all that is wrong with a page."""
    rows = read_rows(page)
    found = [*complaints_about_ids(rows, page, wanted)]
    for row in rows:
        found += complaints_about_row(row)
    named = dict.fromkeys(NAMED.findall(page))
    return found + [text for name in named if (text := complaint_about(name, root, flags))]


def test_the_page_is_right():
    assert complaints_about(PAGE.read_text(), root=ROOT, flags=FLAGS, wanted=ROWS) == []


# ---- a made-up page, right, and with one thing wrong at a time

SOUND = """# Rows

Of R1 there is no more to say: see `docs/page.md` and `code/`.

| row | asks for | here | shown by |
|---|---|---|---|
| R1 | one thing | `--width`, `code/sums.py::Sum.add` | `tests/test_s.py::test_add[case, 2]` |
| R2 | another | In part: `code/sums.py::total` | `tests/test_s.py::test_add`, `tests/test_s.py::test_total` |

| row | asks for | reason |
|---|---|---|
| O1 | a third | nobody needs it |
"""
TREE = {
    "docs/page.md": "",
    "code/sums.py": "class Sum:\n    def add(self): ...\n\ndef total(): ...\n",
    "tests/test_s.py": "def test_add(): ...\ndef test_total(): ...\ndef help_it(): ...\n",
}
WRONG = [
    ("test_s.py::test_total", "test_s.py::test_totals", "tests/test_s.py has no test_totals"),
    ("test_s.py::test_add[case", "test_s.py::test_ad[case", "tests/test_s.py has no test_ad"),
    ("test_s.py::test_total", "test_t.py::test_total", "tests/test_t.py does not exist"),
    ("tests/test_s.py::test_total", "tests/test_s.py::help_it", "R2: tests/test_s.py::help_it is no test"),
    ("tests/test_s.py::test_total", "tests/test_s.py", "R2: tests/test_s.py is no test"),
    ("code/sums.py::Sum.add", "code/sums.py::Sum.subtract", "code/sums.py has no Sum.subtract"),
    ("code/sums.py::total", "code/sum.py::total", "code/sum.py does not exist"),
    ("`code/`", "`codes/`", "codes/ does not exist"),
    ("docs/page.md", "page.md", "page.md does not exist"),
    ("`--width`", "`--widht`", "--widht is a flag of no program"),
    ("`--width`", "`width`", "width is neither a flag nor a file"),
    ("| O1 |", "| O2 |", "O1 is missing"),
    ("| O1 |", "| O2 |", "O2 is no row"),
    ("| O1 |", "| R1 |", "R1 stands there 2 times"),
    ("Of R1", "Of R9", "R9 of the text is no row"),
    ("| `--width`, `code/sums.py::Sum.add` |", "| |", "R1 is nowhere"),
    ("| `tests/test_s.py::test_add[case, 2]` |", "| by nothing |", "R1 is shown by no test"),
    ("| nobody needs it |", "| |", "O1 has no reason"),
    ("| nobody needs it |", "| nobody | needs | it |", "O1 has 5 cells"),
    ("| a third |", "| a b c d e f g h i j k |", "O1 asks in 11 words, not in 1 to 10"),
    ("| a third |", "| |", "O1 asks in 0 words, not in 1 to 10"),
]  # fmt: skip


@pytest.fixture
def complaints(tmp_path):
    """What is wrong with a page beside TREE."""
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return lambda page: complaints_about(page, root=tmp_path, flags={"width"}, wanted=["R1", "R2", "O1"])


def test_a_sound_page_passes(complaints):
    assert complaints(SOUND) == []


@pytest.mark.parametrize(("right", "wrong", "told"), WRONG, ids=[told for *_, told in WRONG])
def test_what_is_wrong_is_told(right, wrong, told, complaints):
    assert SOUND.count(right) == 1
    assert told in complaints(SOUND.replace(right, wrong))


def test_the_real_page_fails_with_a_wrong_name():
    page = PAGE.read_text()
    for right, wrong, told in (
        (
            "::test_from_lengths`",
            "::test_from_length`",
            "tests/unit/test_packed_batch.py has no test_from_length",
        ),
        ("`--reward_clip`", "`--reward_clap`", "--reward_clap is a flag of no program"),
        ("| R55 |", "| R5 |", "R55 is missing"),
    ):
        assert right in page
        found = complaints_about(page.replace(right, wrong), root=ROOT, flags=FLAGS, wanted=ROWS)
        assert told in found
