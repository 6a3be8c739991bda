"""docs/configuration.md is what its program would write, and has every flag of every program."""

import dataclasses
import re

import pytest

from docs.make_configuration import COMMAND, PAGE, ROOT, anchor, build_page, find_programs


@pytest.fixture(scope="module")
def programs():
    return find_programs()


def test_the_page_is_up_to_date(programs):
    assert PAGE.read_text() == build_page(programs), f"docs/configuration.md is old; run: {COMMAND}"


def test_the_programs_are_all_that_parse_flags(programs):
    call = re.compile(r"\b(?:parse_args|parse_step_args|begin|read_flags)\(\s*([A-Z]\w+)")
    folders = ("step1_sft", "step2_reward", "step3_ppo", "serving", "tools")
    files = [*ROOT.glob("*.py"), *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    parsed = {name for file in files for name in call.findall(file.read_text())}
    assert parsed == {program.flags.__name__ for program in programs}


def test_every_flag_stands_in_the_section_or_a_group_of_its_program(programs):
    page = PAGE.read_text()
    for program in programs:
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{program.command}` |")]
        sections = [
            part for part in page.split("\n#") if f"(#{anchor(part.split(chr(10))[0].strip('# '))})" in row
        ]
        told = "".join(sections)
        for field in dataclasses.fields(program.flags):
            assert f"\n| `--{field.name}` |" in told, (program.command, field.name)
