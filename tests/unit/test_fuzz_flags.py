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
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_configs import tiny_config

from common.flags.args import Problems, field_type, parse_args
from common.flags.problems import describe_range
from common.runs import run_files
from common.runs.run_files import LOCK_FILE
from docs.make_configuration import find_programs
from step1_sft.arguments import SFTArguments
from step2_reward.arguments import RewardArguments
from step3_ppo.arguments import PPOArguments

NUM_CASES = 700  # of each of three: 2,100
# program: its flags, and what loads its models
PROGRAMS = {
    "step1_sft.main": (SFTArguments, ["training_loop.load_policy"]),
    "step2_reward.main": (RewardArguments, ["training_loop.load_policy", "training_loop.load_ranker"]),
    "step3_ppo.main": (PPOArguments, ["build_trainer"]),
}
MODEL = ("model_name_or_path", "actor_model_name_or_path", "critic_model_name_or_path")
ANY_NUMBER = {"entropy_coef"}  # either sign has a meaning
ODD_NUMBERS = [
    "-1", "0", "1", "2", "3", "4", "1e3", "0.5", "-0.0", "1e-320", "nan", "inf", "-inf", "1e999", "0x10",
    "1_0", "\u0663", "9" * 30, "9" * 5000, "2**3", " 5 ", "5 5",
]  # fmt: skip
ODD_TEXTS = [
    "", " ", "none", "None", "true", "False", "auto", "never", ".", "..", "/", "~", "a/b", "a:b", ":",
    "::", "a:b:c", "=", "-", "--", "--=", "-1", "x" * 300, "/y" * 2500, "\ud800", "\udcff",
    "\x00", "a\nb", "\u202e", "\U0001f600", "%s", "{}", "$HOME", "1,2,3", "0,0,0", "-1,1,1", "http://",
    "http://[", "http://h:99999/", "function:os:path", "function:os:nothing", "model:", "2*",
    "classifier:x:y", "os:path:join", "1e400*model:a", "file:a", "../../etc/passwd",
]  # fmt: skip

FILES = ["rows.jsonl", "torn.json", "list.json", "deep.json", "reward", "absent", "cache"]


class Reached(Exception):  # noqa: N818  (nothing went wrong)
    """A model would be loaded now."""


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny_model_folder, tiny_tokenizer) -> dict[str, dict[str, Any]]:
    """Return flags of each program with which it would load a model, in a folder that is the working one."""
    folder = tmp_path_factory.mktemp("fuzz")
    config = tiny_config("llama", len(tiny_tokenizer))
    config.num_labels = 1
    reward = transformers.AutoModelForSequenceClassification.from_config(config)
    reward.save_pretrained(folder / "reward")
    tiny_tokenizer.save_pretrained(folder / "reward")
    rows = [f'{{"prompt": "day {n}?", "chosen": "fine {n}", "rejected": "no"}}\n' for n in range(30)]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "torn.json").write_text("{")
    (folder / "list.json").write_text("[]")
    (folder / "deep.json").write_text("[" * 100_000)
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
    words = st.one_of(
        st.sampled_from(ODD_TEXTS), st.sampled_from(ODD_NUMBERS), st.sampled_from(FILES),
        st.text(max_size=12), st.integers().map(str), st.floats().map(str),
    )  # fmt: skip

    def good_group(name: str) -> st.SearchStrategy[list[str]]:
        field, scalar = fields[name], field_type(fields[name])[0]
        values = [str(choice) for choice in field.metadata["choices"]]
        if not values:
            numbers = {bool: ["true", "false"], int: ["1", "2", "0"], float: ["0.5", "1e-3", "1"]}
            values = numbers.get(scalar, [str(field.default)])
        return st.sampled_from(values).map(lambda value: [f"--{name}", value])

    def group(name: str, values: list[str], is_one_word: bool) -> list[str]:
        return [f"--{name}={'='.join(values)}"] if is_one_word else [f"--{name}", *values]

    good = names.flatmap(good_group)
    odd = st.builds(group, names, st.lists(words, max_size=3), st.booleans())
    odd = st.one_of(
        odd, odd, odd,
        names.map(lambda name: [f"--{name[1:]}", "1"]),
        names.map(lambda name: [f"--{name.replace('_', '-')}", "1"]),
        words.map(lambda word: [word]),
        words.map(lambda word: [f"--{word}"]),
    )  # fmt: skip
    lines = st.one_of(
        st.lists(good, max_size=3),
        st.lists(st.one_of(good, odd), max_size=4),
        st.tuples(odd, odd, st.just(["-h"])),
    )
    return lines.map(lambda found: [word for group in found for word in group])


def outcome_of(program: str, words: list[str]) -> tuple[str, str]:
    """Return how a program ended, and what it said; whatever it raises besides is the caller's to see."""
    module = importlib.import_module(program)
    said = io.StringIO()
    stop_here = mock.Mock(side_effect=Reached)
    with (
        mock.patch.object(sys, "argv", [program, *words]),
        contextlib.ExitStack() as patches,
        contextlib.redirect_stderr(said),
    ):
        for name in PROGRAMS[program][1]:
            patches.enter_context(mock.patch(f"{program}.{name}", stop_here))
        try:
            module.main()
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
        assert {"-h", "--help"} & {word.split("=")[0] for word in words}, line
    elif ended == "exit 2":
        header, _, listed = said[said.index("error: ") :].partition(":\n")
        assert re.fullmatch(r"error: \d+ problems?, nothing was started", header), line
        messages = re.split(r"^  - ", listed.rstrip(), flags=re.MULTILINE)[1:]
        assert messages, line
        for message in messages:
            # It names the flag; only --reward's parts and a word that is no flag stand for themselves.
            assert re.search(r"--[a-z]|unexpected word|unknown flag", message), line
            assert len(message) < 5000, line
    elif ended == "returned":
        assert any(word.startswith("--dry_run") for word in words), line
    else:
        assert ended == "reached", line
    return ended


def fuzz(good: dict, program: str, num_cases: int) -> None:
    cls = PROGRAMS[program][0]
    endings: dict[str, int] = {}
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

    @settings(max_examples=num_cases, deadline=None, suppress_health_check=slow, derandomize=True)
    @given(words=words_of(cls), left_out=st.sampled_from(["", "", "", "", *sorted(good[program])]))
    def check(words, left_out):
        start = {name: value for name, value in good[program].items() if name != left_out}
        line = [word for name, value in start.items() for word in (f"--{name}", str(value))]
        ended = check_command_line(program, [*line, *words])
        endings[ended] = endings.get(ended, 0) + 1

    check()
    assert endings["reached"] > num_cases // 20 and endings["exit 2"] > num_cases // 4, endings


def just_outside(field: dataclasses.Field) -> list[str]:
    """Return the values next to a numeric flag's range."""
    limits, step = field.metadata["range"], 1 if field_type(field)[0] is int else 1e-6
    outside = [limits[name] + sign * step for name, sign in (("low", -1), ("high", 1)) if name in limits]
    return [str(value) for value in [*outside, *(limits[n] for n in ("above", "below") if n in limits)]]


def test_every_number_has_a_range():
    for program in find_programs():
        for field in dataclasses.fields(program.flags):
            is_number = field_type(field)[0] in (int, float) and not field.metadata["choices"]
            if not is_number or field.name in ANY_NUMBER:
                continue
            assert field.metadata["range"], f"{program.command} --{field.name}"
            for value in just_outside(field):
                problems = Problems()
                parse_args(program.flags, [f"--{field.name}", value], problems=problems)
                told = [text for text in problems.messages if "is required" not in text]
                expected = f"must be {describe_range(field.metadata['range'])}"
                assert told == [f"--{field.name} {value} {expected}"], program.command


@pytest.fixture(autouse=True)
def same_surroundings(process_group, monkeypatch):
    """A run may set variables and the import path: as they were afterwards, and no hub is asked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before, path = dict(os.environ), list(sys.path)
    yield
    os.environ.clear()
    os.environ.update(before)
    sys.path[:] = path


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("num_cases", [20, pytest.param(NUM_CASES, marks=pytest.mark.slow)])
def test_arbitrary_command_lines(good, program, num_cases):
    fuzz(good, program, num_cases)
