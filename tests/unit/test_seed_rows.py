"""docs/seed_rows.md keeps what it says: each row stands there once, and all that it names exists.

A complaint is a line of text that names the row, or what does not exist; a page without any is right.
"""

import ast
import dataclasses
import re
from collections import Counter
from pathlib import Path

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
TEST = re.compile(r"(test_\w+|\w+_cases)\.py::test_\w+")
NAMED = re.compile(r"`([^`]+)`")


def names_in(file: Path) -> set[str]:
    """Return functions, classes and their methods, `Class.method`, as the syntax tree has them."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def complaints_about_names(page: str, root: Path, flags: set[str]) -> list[str]:
    """Name what is no flag, file, folder, symbol or FILE::SYMBOL; a file may lack its folder."""
    files = [*root.glob("*.py"), *root.glob("[a-z]*/**/*.py")]
    names = {f"/{file.relative_to(root)}": names_in(file) for file in files}
    symbols = set().union(*(found for file, found in names.items() if not file.startswith("/tests/")))
    complaints = []
    for name in dict.fromkeys(NAMED.findall(page)):
        path, colons, symbol = name.partition("::")
        in_files = [found for file, found in names.items() if file.endswith(f"/{path}")]
        if name.startswith("--"):
            exists = name[2:] in flags
        elif colons:
            exists = any(symbol in found for found in in_files)
        else:
            exists = name in symbols or bool(in_files) or any(root.glob(name))
        if not exists:
            complaints.append(f"there is no {name}")
    return complaints


def complaints_about_rows(page: str, wanted: list[str]) -> list[str]:
    """A row has its state, a place and tests, or a reason, and what is missing where it is done in part."""
    lines = [
        line.strip().strip("|").split("|") for line in page.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)
    ]
    rows = [[cell.strip() for cell in line] for line in lines]
    counts = Counter(row[0] for row in rows)
    found = [
        f"{row} stands there {counts[row]} times"
        for row in dict.fromkeys([*wanted, *counts])
        if counts[row] != 1
    ]
    found += [f"{row} is no row" for row in counts if row not in wanted]
    for row, _, state, where, test in rows:
        tests = NAMED.findall(test)
        if state not in STATES:
            found.append(f"{row} is {state!r}, none of {STATES}")
        if not where:
            found.append(f"{row} is nowhere, for no reason")
        if (MISSING in where) != (state == "partly"):
            found.append(f"{row} is {state}, and {MISSING.strip()!r} says otherwise")
        if bool(tests) != (state in ("done", "partly")):
            found.append(f"{row} is {state} with {len(tests)} tests")
        found += [f"{row}: {name} is no test" for name in tests if not TEST.fullmatch(name)]
    return found


def test_seed_rows_page_is_complete():
    assert complaints_about_rows(PAGE, ROWS) + complaints_about_names(PAGE, ROOT, FLAGS) == []


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
    ("`test_s.py::test_total`", "`test_s.py::help_it`", "R2: test_s.py::help_it is no test"),
    ("`--width`", "`--widht`", "there is no --widht"),
    ("| O1 |", "| O2 |", "O1 stands there 0 times"),
    ("| `--width`, `Sum.add` |", "| |", "R1 is nowhere, for no reason"),
    ("| `test_s.py::test_add` |", "| - |", "R1 is done with 0 tests"),
    (" Missing: `code/`", "", "R2 is partly, and 'Missing:' says otherwise"),
]


def test_seed_rows_check_finds_each_mistake(tmp_path):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def complaints(page: str) -> list[str]:
        return complaints_about_rows(page, ["R1", "R2", "O1"]) + complaints_about_names(
            page, tmp_path, {"width"}
        )

    assert complaints(SOUND) == []
    for right, wrong, told in WRONG:
        assert told in complaints(SOUND.replace(right, wrong))
