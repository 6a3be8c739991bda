"""docs/families.md says what a sweep over the families of the installed transformers finds."""

import pytest
import transformers
from family_sweep import FAMILIES, PAGE, SAMPLE, Row, build_page, sweep

pytestmark = pytest.mark.skipif("5.23." in transformers.__version__, reason="the page is of 5.24's families")


def rows_of_page() -> dict[str, Row]:
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {cells[0]: Row(*cells) for cells in lines[1:]}


def test_the_page_is_of_all_families_of_this_transformers():
    assert list(rows_of_page()) == FAMILIES
    assert PAGE.read_text() == build_page(list(rows_of_page().values()))
    assert transformers.__version__ in PAGE.read_text()


@pytest.mark.parametrize("family", SAMPLE)
def test_every_eighth_family_is_what_the_page_says(family):
    assert sweep(family) == rows_of_page()[family]


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in SAMPLE])
def test_every_other_family_is_what_the_page_says(family):
    assert sweep(family) == rows_of_page()[family]
