#!/usr/bin/env python
"""Writes the figures of benchmarks/baselines into docs/performance.md.

python docs/make_performance.py

The rows of a baseline's tables, up to the line that links it, and its commit and threads are replaced.
Sentences are written by hand: tests/unit/test_performance_page.py names the ratios that they lack.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/performance.md"
COMMAND = "python docs/make_performance.py"
GPU_TESTS = "gpu_tests.h200.json"  # outcomes of tests, not a benchmark


def read_baselines() -> dict[str, dict]:
    """Baselines by the names of their files."""
    paths = sorted((ROOT / "benchmarks/baselines").glob("*.json"))
    return {path.name: json.loads(path.read_text()) for path in paths if path.name != GPU_TESTS}


def as_row(cells: list[str]) -> str:
    """A row of a table, as the pages write it: an empty cell is one space."""
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def rows_of(baseline: dict) -> list[list[str]]:
    """Name and median of whatever has a median, of several runs with the lowest and the highest value."""
    # Tokens a second, but seconds of a step and milliseconds of a GPU's.
    decimals = 2 if baseline["name"] == "gpu" else int(baseline["name"].endswith("_step"))
    columns = ("median", "low", "high")[: 1 if baseline["runs"] == 1 else 3]
    tables = [baseline.get("rates", {}), *(s.get("rates", {}) for s in baseline.get("sections", {}).values())]
    return [
        [name, *(f"{row[key]:,.{decimals}f}" for key in columns)]
        for table in tables
        for name, row in table.items()
        if "median" in row
    ]


def source_line(name: str, baseline: dict) -> str:
    """Start of the line after a baseline's tables."""
    threads = "1 thread;" if baseline["threads"] == 1 else f"{baseline['threads']} threads;"
    return f"Baseline: [{name}](../benchmarks/baselines/{name}), commit {baseline['commit']}, {threads}"


def update_page(page: str, baselines: dict[str, dict]) -> str:
    """The page with the figures of these baselines.

    Raises ValueError for a line or a row that it lacks, as of a table that had no ranges of several runs.
    """
    for name, baseline in baselines.items():
        line = re.compile(
            rf"^Baseline: \[{re.escape(name)}\]\(\S+\), commit \w+, \d+ threads?;", re.MULTILINE
        )
        source = source_line(name, baseline)
        page, end = _replace(page, line, 0, source, name)
        # The tables of a baseline stand after the line of the one before.
        start = page.rfind("\nBaseline: ", 0, end - len(source)) + 1
        for cells in rows_of(baseline):
            # A first column with the section's name, as of generation, stays.
            row = re.compile(
                rf"(?<=\| ){re.escape(cells[0])}(?: \| [\d,.]+){{{len(cells) - 1}}} \|$", re.MULTILINE
            )
            new_row = as_row(cells)
            page, start = _replace(
                page, row, start, new_row.removeprefix("| "), f"{name}: {new_row}", until=source
            )
    return page


def _replace(page: str, old: re.Pattern, start: int, new: str, name: str, until: str = "") -> tuple[str, int]:
    """The page with the first match between `start` and `until` replaced, and the new text's end."""
    match = old.search(page, start, page.rfind(until))
    if match is None:
        raise ValueError(f"docs/performance.md has no line for {name}")
    return page[: match.start()] + new + page[match.end() :], match.start() + len(new)


if __name__ == "__main__":
    PAGE.write_text(update_page(PAGE.read_text(), read_baselines()))
