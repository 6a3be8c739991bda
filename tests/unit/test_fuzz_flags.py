"""Arbitrary command lines of the programs: each ends in one clear message, or where a model is loaded."""

import contextlib
import dataclasses
import importlib
import io
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.flags.args import Problems, field_type, parse_args
from common.flags.problems import describe_range
from common.runs import run_files
from common.runs.run_files import LOCK_FILE
from docs.make_configuration import find_programs
from step1_sft.arguments import SFTArguments
from step2_reward.arguments import RewardArguments
from step3_ppo.arguments import PPOArguments

NUM_CASES = 200  # of each of three: 600
# program: its flags, and what loads its models
PROGRAMS = {
    "step1_sft.main": (SFTArguments, ["training_loop.load_policy"]),
    "step2_reward.main": (RewardArguments, ["training_loop.load_policy", "training_loop.load_ranker"]),
    "step3_ppo.main": (PPOArguments, ["build_trainer"]),
}
ANY_NUMBER = {"entropy_coef", "reward_default_score", "truncated_score"}  # either sign has a meaning
FILES = {"torn.json": "{", "list.json": "[]", "deep.json": "[" * 100_000}
ODD_WORDS = [
    *FILES, "rows.jsonl", "reward", "absent", "cache",
    "-1", "0", "1", "2", "3", "4", "1e3", "0.5", "-0.0", "1e-320", "nan", "inf", "-inf", "1e999", "0x10",
    "1_0", "\u0663", "9" * 30, "9" * 5000, "2**3", " 5 ", "5 5",
    "", " ", "none", "None", "true", "False", "auto", "never", ".", "..", "/", "~", "a/b", "a:b", ":",
    "::", "a:b:c", "=", "-", "--", "--=", "x" * 300, "/y" * 2500, "\ud800", "\udcff",
    "\x00", "a\nb", "\u202e", "\U0001f600", "%s", "{}", "$HOME", "1,2,3", "0,0,0", "-1,1,1", "http://",
    "http://[", "http://h:99999/", "function:os:path", "function:os:nothing", "model:", "2*",
    "classifier:x:y", "os:path:join", "1e400*model:a", "file:a", "../../etc/passwd",
]  # fmt: skip


class Reached(Exception):  # noqa: N818  (nothing went wrong)
    """A model would be loaded now."""


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny_model_folder, reward_export) -> dict[str, dict[str, Any]]:
    """Return flags of each program with which it would load a model, in a folder that is the working one."""
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "reward").symlink_to(reward_export)
    rows = [f'{{"prompt": "day {n}?", "chosen": "fine {n}", "rejected": "no"}}\n' for n in range(30)]
    for name, text in (FILES | {"rows.jsonl": "".join(rows)}).items():
        (folder / name).write_text(text)
    shared = {"data_path": "rows.jsonl", "data_output_path": "cache", "output_dir": "output"}
    single = {"max_seq_len": 32, "per_device_train_batch_size": 2}
    single |= shared | {"model_name_or_path": tiny_model_folder("llama")}
    ppo = {"actor_model_name_or_path": tiny_model_folder("llama"), "critic_model_name_or_path": "reward"}
    ppo |= {"per_device_generation_batch_size": 2, "per_device_training_batch_size": 2}
    ppo |= {"max_prompt_seq_len": 16, "max_answer_seq_len": 8}
    with contextlib.chdir(folder):
        yield {"step1_sft.main": single, "step2_reward.main": single, "step3_ppo.main": shared | ppo}


def words_of(cls: type) -> st.SearchStrategy[list[str]]:
    """Give a few words for a command line: flags that exist or nearly do, with values right and wrong."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    names = st.sampled_from(sorted(fields))
    words = st.one_of(st.sampled_from(ODD_WORDS), st.text(max_size=12), st.floats().map(str))

    def good_group(name: str) -> st.SearchStrategy[list[str]]:
        numbers = {bool: ["true", "false"], int: ["1", "2", "0"], float: ["0.5", "1e-3", "1"]}
        values = fields[name].metadata["choices"] or numbers.get(
            field_type(fields[name])[0], [fields[name].default]
        )
        return st.sampled_from(values).map(lambda value: [f"--{name}", str(value)])

    good, values = names.flatmap(good_group), st.lists(words, max_size=3)
    odd = st.one_of(
        st.builds(lambda name, values: [f"--{name}", *values], names, values),
        st.builds(lambda name, values: [f"--{name}={'='.join(values)}"], names, values),
        names.map(lambda name: [f"--{name[1:]}", "1"]),
        names.map(lambda name: [f"--{name.replace('_', '-')}", "1"]),
        words.map(lambda word: [word]),
        words.map(lambda word: [f"--{word}"]),
    )
    lines = st.one_of(
        st.lists(good, max_size=3),
        st.lists(odd, min_size=1, max_size=4),
        st.lists(st.one_of(good, odd), max_size=4),
        st.tuples(odd, odd, st.just(["-h"])),
    )
    return lines.map(lambda found: [word for group in found for word in group])


def outcome_of(program: str, words: list[str]) -> tuple[str, str]:
    """Return how a program ended, and what it said; whatever it raises besides is the caller's to see."""
    module = importlib.import_module(program)
    said = io.StringIO()
    with contextlib.ExitStack() as patches, contextlib.redirect_stderr(said):
        # --auto: a plan is made by a process that takes seconds, see tests/programs/test_auto.py
        patches.enter_context(mock.patch("common.programs.startup.make_plan", lambda *_, **__: {}))
        for name in PROGRAMS[program][1]:
            patches.enter_context(mock.patch(f"{program}.{name}", mock.Mock(side_effect=Reached)))
        try:
            module.main(words)
        except Reached:
            return "reached", said.getvalue()
        except SystemExit as left:
            return f"exit {left.code}", said.getvalue()
    return "returned", said.getvalue()


def check_command_line(program: str, words: list[str]) -> str:
    """Return how it ended; fail unless that is right."""
    ended, said = outcome_of(program, words)
    line = f"{words}: {ended}\n{said}"
    # When the data are read, the folder is the run's already.
    assert [path.name for path in Path("output").glob("*")] in ([], [LOCK_FILE]), line
    run_files.release_lock(None)
    shutil.rmtree("output", ignore_errors=True)
    if ended == "exit 0":
        assert {"-h", "--help", "--help_all"} & {word.split("=")[0] for word in words}, line
    elif ended == "exit 2":
        header, _, listed = said[said.index("error: ") :].partition(":\n")
        assert re.fullmatch(r"error: \d+ problems?, nothing was started", header), line
        messages = re.split(r"^  - ", listed.rstrip(), flags=re.MULTILINE)[1:]
        assert messages, line
        for message in messages:
            # It names the flag; only --reward's parts and a word that is no flag stand for themselves.
            assert re.search(r"--[a-z]|unexpected argument|unknown flag", message), line
            assert len(message) < 5000, line
    elif ended == "returned":
        assert any(word.startswith("--dry_run") for word in words), line
    else:
        assert ended == "reached", line
    return ended


@pytest.fixture(autouse=True)
def same_surroundings(process_group):
    """A run may set variables and the import path: as they were afterwards."""
    before, path = dict(os.environ), list(sys.path)
    yield
    os.environ.clear()
    os.environ.update(before)
    sys.path[:] = path


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("num_cases", [20, pytest.param(NUM_CASES, marks=pytest.mark.slow)])
def test_arbitrary_command_lines(good, program, num_cases):
    endings: dict[str, int] = {}
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

    @settings(max_examples=num_cases, deadline=None, suppress_health_check=slow, derandomize=True)
    @given(words=words_of(PROGRAMS[program][0]), left_out=st.sampled_from(["", "", "", "", *good[program]]))
    def check(words, left_out):
        start = {name: value for name, value in good[program].items() if name != left_out}
        line = [word for name, value in start.items() for word in (f"--{name}", str(value))]
        ended = check_command_line(program, [*line, *words])
        endings[ended] = endings.get(ended, 0) + 1

    check()
    assert endings["reached"] >= num_cases // 20 and endings["exit 2"] >= num_cases // 4, endings


def test_every_number_has_a_range_and_is_refused_next_to_it():
    for program in find_programs():
        for field in dataclasses.fields(program.flags):
            scalar, limits = field_type(field)[0], field.metadata["range"]
            if scalar not in (int, float) or field.metadata["choices"] or field.name in ANY_NUMBER:
                continue
            assert limits, f"{program.command} --{field.name}"
            step = 1 if scalar is int else 1e-6
            beyond = {"low": -step, "high": step, "above": 0, "below": 0}
            for value in (limit + beyond[name] for name, limit in limits.items()):
                problems = Problems()
                parse_args(program.flags, [f"--{field.name}", str(value)], problems=problems)
                told = [text for text in problems.messages if "is required" not in text]
                expected = f"--{field.name} {value} must be {describe_range(limits)}"
                assert told == [expected], program.command
