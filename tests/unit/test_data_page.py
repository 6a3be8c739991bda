"""docs/data.md names every data set and every form, and each example serves the steps that it says."""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from common.data.adapters.base import ADAPTERS
from common.data.adapters.local_files import AnyForm
from common.data.adapters.row_forms import ROW_FORMS
from common.data.example import missing_for
from common.data.raw_rows import RawRows
from common.data.registry import load_source

PAGE = (Path(__file__).parents[2] / "docs/data.md").read_text()
ENTRY = re.compile(
    r"### (?P<names>`.+`)\n\n```json\n(?P<rows>(?:\{.+\}\n)+)```\nSteps? (?P<steps>\d(?:, \d)*)\."
)


class Entry(NamedTuple):
    names: tuple[str, ...]
    rows: list[dict]
    steps: set[int]


def entries(section: str) -> list[Entry]:
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    found = [
        Entry(
            tuple(re.findall(r"`([^`]+)`", match["names"])),
            [json.loads(line) for line in match["rows"].splitlines()],
            {int(step) for step in match["steps"].split(", ")},
        )
        for match in ENTRY.finditer(text)
    ]
    assert len(found) == text.count("\n### "), "an entry has another form than the rest"
    return found


NAMED, FORMS = entries("Data sets by name"), entries("Forms")


def served_steps(adapter, rows):
    arranged = adapter.arrange(RawRows(rows, "page"))
    found = [example for i in range(len(arranged)) for example in adapter.to_examples(arranged[i])]
    return {step for step in (1, 2, 3) if any(missing_for(step, example) is None for example in found)}


def test_the_page_names_what_is_registered():
    own = {name for name, kind in ADAPTERS.items() if kind.__module__.startswith("common.")}
    told = [name for entry in NAMED for name in entry.names]
    assert len(told) == len(set(told)) and set(told) == own


def test_the_page_has_every_form_in_the_order_of_the_program():
    assert [entry.names for entry in FORMS] == [form.columns for form in ROW_FORMS]
    assert [entry.steps for entry in FORMS] == [set(form.stages) for form in ROW_FORMS]


@pytest.mark.parametrize("entry", NAMED, ids=lambda entry: entry.names[0])
def test_an_example_of_a_data_set_serves_the_steps_that_it_says(entry):
    for name in entry.names:
        adapter = load_source(name).adapter
        assert served_steps(adapter, entry.rows) == entry.steps
        needed = adapter.columns()
        assert all(set(needed) <= row.keys() for row in entry.rows)


@pytest.mark.parametrize("entry", FORMS, ids=lambda entry: "/".join(entry.names))
def test_an_example_of_a_form_serves_the_steps_that_it_says(entry):
    assert served_steps(AnyForm(), entry.rows) == entry.steps


def test_the_commands_of_the_page_name_what_is_there(tmp_path):
    (place,) = set(re.findall(r"`--data_path (common\.\S+):mkqa.jsonl.gz`", PAGE))
    path = tmp_path / "mkqa.jsonl"
    (row,) = next(entry.rows for entry in NAMED if entry.names == ("mkqa-Chinese",))
    path.write_text(json.dumps(row))
    source = load_source(f"{place}:{path}")
    (example,) = source.adapter.to_examples(source.train[0])
    assert (example.prompt[0].content, example.chosen) == ("有多暖和？", "２０度")
