"""docs/migration.md has every flag of DeepSpeed-Chat, and each means what the page says it means."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

import train
from chat import ChatArguments
from common.flags.args import Problems, parse_args
from common.flags.other_names import IGNORED, OLDER_NAMES, SWITCHES
from common.flags.problems import no_effect_notes
from serving.prompt_eval import PromptEvalArguments
from step1_sft.arguments import SFTArguments
from step2_reward.arguments import RewardArguments, RewardEvalArguments
from step3_ppo.arguments import PPOArguments

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/migration.md").read_text()
OURS = {
    "SFT": SFTArguments,
    "RM": RewardArguments,
    "DPO": RewardArguments,
    "PPO": PPOArguments,
    "prompt_eval": PromptEvalArguments,
    "rw_eval": RewardEvalArguments,
    "chat": ChatArguments,
    "train": train.TrainArguments,
}
REQUIRED, OFF = "REQUIRED", False
FACTS, CHOICES = [], {}
for line in (ROOT / "tests/unit/deepspeed_chat_flags.txt").read_text().splitlines()[1:]:
    flag, programs, default, *choices = line.split(" | ")
    if choices:
        CHOICES[flag] = choices[0].split()
    for program in programs.split():
        FACTS.append((flag, program, REQUIRED if default == REQUIRED else json.loads(default)))
ROW = re.compile(r"^\| `--([\w-]+)` \| ([\w, ]+) \| (same|changed|no effect) \|(.*)\|$", re.MULTILINE)
STATUS = {
    (flag, program): (status, why.strip())
    for flag, programs, status, why in ROW.findall(PAGE)
    for program in programs.split(", ")
}


def field_of(flag: str, program: str) -> dataclasses.Field | None:
    """The field that a flag sets; None for one without effect."""
    fields = {field.name: field for field in dataclasses.fields(OURS[program])}
    name = flag.replace("-", "_")
    now = {older: now for now, older in OLDER_NAMES.items()} | {
        n: target for n, (target, _) in SWITCHES.items()
    }
    return fields.get(name) or (None if name in IGNORED else fields[now[name]])


def our_default(field: dataclasses.Field) -> Any:
    if field.metadata["required"]:
        return REQUIRED
    return field.default if field.default is not dataclasses.MISSING else field.default_factory()


def read(program: str, *words: str) -> tuple[Any, list[str]]:
    """The arguments, and what is wrong with them: flags that are required and not given are not."""
    problems = Problems()
    words = tuple(train._with_underscores(word) for word in words) if program == "train" else words
    args = parse_args(OURS[program], list(words), problems=problems)
    return args, [message for message in problems.messages if "is required: " not in message]


def test_the_page_has_every_flag_of_every_program_and_no_other():
    assert STATUS.keys() == {(flag, program) for flag, program, _ in FACTS}
    assert len(ROW.findall(PAGE)) == PAGE.split("\n## Every flag\n")[1].split("\n## ")[0].count("\n| `--"), (
        "a row has another form"
    )
    assert len({flag for flag, _, _ in FACTS}) == 103 and len(FACTS) == 194


@pytest.mark.parametrize(("flag", "program", "default"), FACTS, ids=lambda value: str(value))
def test_a_flag_means_what_the_page_says_as_their_scripts_write_it(flag, program, default):
    field, (status, why) = field_of(flag, program), STATUS[flag, program]
    assert (status == "no effect") == (field is None)
    assert why or status == "same", "a change without a reason"
    if field is not None and flag not in SWITCHES:
        ours = our_default(field)
        theirs = "" if default is None and ours == "" else default
        is_same = ours in (theirs, str(theirs))  # a number may be one form of text among others
        assert is_same or status != "same", f"the default is {ours!r}, theirs {default!r}"
    if default is OFF:
        words: list[list[str]] = [[]]
    elif flag in CHOICES:
        words = [[choice] for choice in CHOICES[flag]]
    else:
        known = [] if default is REQUIRED or default is None else default
        words = [[str(item) for item in known]] if isinstance(known, list) else [[str(known)]]
        is_text = field is not None and field.type in (str, list[str])
        words = words if words != [[]] else [["text" if is_text else "1"]]
    for values in words:
        args, problems = read(program, f"--{flag}", *values)
        assert problems == []
        notes = no_effect_notes(args, [f"--{flag}"])
        assert any("has no effect: " in note for note in notes) == (status == "no effect")
        if field is None or flag in SWITCHES:  # tests/unit/test_args.py has what switches do
            continue
        given = getattr(args, field.name)
        shown = [str(item) for item in given] if isinstance(given, list) else [str(given)]
        meant = {"offload": ["all"]}.get(flag, ["True"]) if default is OFF else values
        assert [s.removesuffix(".0") for s in shown] == [m.removesuffix(".0") for m in meant] or float(
            shown[0]
        ) == float(meant[0])
