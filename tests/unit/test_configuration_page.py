"""docs/configuration.md is what its program would write, and has every flag of every program."""

import dataclasses
import re
from dataclasses import dataclass

import pytest

from common.flags.args import REQUIRED, CheckpointArguments, TokenizerArguments, flag
from docs.make_configuration import COMMAND, PAGE, ROOT, Program, anchor, build_page, find_programs, groups_of


@pytest.fixture(scope="module")
def programs():
    return find_programs()


def test_the_page_is_up_to_date(programs):
    assert PAGE.read_text() == build_page(programs), f"docs/configuration.md is old; run: {COMMAND}"


def test_the_programs_are_all_that_parse_flags(programs):
    call = re.compile(r"\b(?:parse_args|parse_step_args|begin)\(\s*([A-Z]\w+)")
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


@dataclass
class OwnGroupArguments:
    """A group. More of it."""

    colour: str = flag("", "which | it is", choices=("", "red"), may_change=True)


@dataclass
class MadeUpArguments(OwnGroupArguments, CheckpointArguments):
    """Made up."""

    size: int = flag(REQUIRED, "how large")
    words: list[str] = flag(["a", "b"], "what is said")
    save_interval: int = flag(7, "saves", may_change=True)


@dataclass
class SecondArguments(TokenizerArguments, OwnGroupArguments):
    """No run to go on with."""


def test_rows_by_hand():
    page = build_page([Program("made_up.py", MadeUpArguments, "Makes up")])
    assert "| `--size` | required | whole number | how large | as it was |" in page
    assert "| `--words` | `a` `b` | text, several | what is said | as it was |" in page
    assert "| `--save_interval` | `7` | whole number | saves (in place of the group's) | may change |" in page
    assert "| `--colour` | empty | empty, `red` | which \\| it is | may change |" in page
    assert "| `--print_loss` | **without effect**: the loss is printed at every step |" in page
    assert "| `--disable_dropout` | as `--dropout 0` |" in page
    assert page.count("`--colour`") == 1 and "## Shared groups\n" in page


def test_a_shared_group_stands_once_and_a_default_shows():
    programs = [Program("made_up.py", MadeUpArguments, ""), Program("second.py", SecondArguments, "")]
    page = build_page(programs)
    assert page.count("| `--colour` |") == 1 and page.count("### OwnGroup flags") == 1
    assert "[OwnGroup](#owngroup-flags)" in page
    assert groups_of(programs[1]) == [TokenizerArguments, OwnGroupArguments]
    alone = build_page(programs[1:])
    assert "| `--colour` | empty | empty, `red` | which \\| it is |\n" in alone, "nothing is resumed"
