"""Flags: every problem at once, every default typed, every flag read by something."""

import ast
import dataclasses
import functools
import re
from pathlib import Path

import pytest

from common.data.data_options import DataOptions
from common.flags.args import Problems, field_type, parse_args
from common.flags.groups import TokenizerArguments
from common.flags.other_names import OLDER_FORMS, OLDER_NAMES, REMOVED, SWITCHES
from common.flags.problems import is_usable, no_effect_notes
from common.generation.hybrid_engine import HybridOptions
from common.runs.resume import compare_flags
from docs.make_configuration import find_programs
from step1_sft.arguments import SFTArguments
from step2_reward.arguments import RewardArguments
from step3_ppo.arguments import PPOArguments

ROOT = Path(__file__).resolve().parents[2]
FLAG_FILES = (
    "args.py",
    "arguments.py",
    "loss_arguments.py",
    "role_arguments.py",
)  # they define flags, and read none
TAKERS = (DataOptions, HybridOptions)  # they take the flags of their fields' names
OF_ALL_PROGRAMS = pytest.mark.parametrize(
    "program", find_programs(), ids=lambda program: program.flags.__name__
)


def parse(cls, text: str):
    problems = Problems()
    return parse_args(cls, text.split(), problems=problems), problems.messages


def test_values_have_the_types_of_their_fields():
    args, messages = parse(
        SFTArguments,
        "--model_name_or_path m --data_path a b --learning_rate 2e-5 --dropout 0.1 --zero_stage=2 "
        "--local_rank=1",
    )
    assert messages == []
    assert (args.data_path, args.learning_rate, args.dropout) == (["a", "b"], 2e-5, 0.1)
    assert (args.zero_stage, args.local_rank, args.seed) == (2, 1, 1234)


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        ("--offload", "offload", "all"), ("--packed", "packed", True), ("--packed false", "packed", False),
        ("--dropout none", "dropout", None), ("--data_path", "data_path", []),
    ],
)  # fmt: skip
def test_a_value_may_be_left_out_or_look_special(words, name, expected):
    args, messages = parse(SFTArguments, f"--model_name_or_path m {words} --weight_decay 1e-2")
    assert messages == [] and args.weight_decay == 0.01
    assert getattr(args, name) == expected


def test_all_problems_come_at_once_and_name_flag_value_and_cure():
    _, messages = parse(
        SFTArguments, "--lora_din 3 --seed x --zero_stage 7 --bogus_thing --gradient_checkpointing 3"
    )
    text = "\n".join(messages)
    assert "unknown flag --lora_din; did you mean --lora_dim?" in text
    assert "unknown flag --bogus_thing" in text
    assert "--seed x: expected a whole number" in text
    assert "--zero_stage 7: choose from 0, 1, 2, 3" in text
    assert "--gradient_checkpointing 3: expected true or false" in text
    assert "--model_name_or_path is required" in text
    assert len(messages) == 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--learning_rate --seed 3", "--learning_rate needs a value: peak"),
        ("--model_name_or_path=", "--model_name_or_path is required: base model"),
        ("stray", "unexpected argument 'stray' among the flags"),
        ("--bogus stray", "unknown flag --bogus; --help_all lists all flags"),
    ],
)
def test_a_value_that_is_missing_or_none_is_one_problem(words, message):
    args, messages = parse(SFTArguments, "--model_name_or_path m " + words)
    assert len(messages) == 1 and messages[0].startswith(message)
    assert args.learning_rate == SFTArguments().learning_rate, "the checks that follow need a number"


def test_only_given_flags_without_effect_are_named():
    words = ["--num_padding_at_beginning", "1", "--compute_fp32_loss"]
    args, messages = parse(SFTArguments, "--model_name_or_path m " + " ".join(words))
    assert messages == []
    notes = no_effect_notes(args, words)
    assert {n.split()[0] for n in notes} == {"--num_padding_at_beginning", "--compute_fp32_loss"}
    assert no_effect_notes(args, []) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--enable_ema", ("ema_decay", 0.992)),
        ("--enable_ema --ema_decay 0.5", ("ema_decay", 0.5)),
        ("--enable_tensorboard --trackers wandb", ("trackers", ["wandb", "tensorboard"])),
        ("--enable_test_mode --test_stop_step 7", ("max_train_steps", 7)),
    ],
)
def test_a_flag_of_deepspeed_chat_stands_for_one_of_ours(words, expected):
    args, messages = parse(PPOArguments, "--actor_model_name_or_path a " + words)
    assert messages == [] and getattr(args, expected[0]) == expected[1]
    (message,) = parse(PPOArguments, "--actor_model_name_or_path a --enable_ema maybe")[1]
    assert message == "--enable_ema maybe: expected true or false"


def test_a_removed_flag_is_refused():
    changes = (ROOT / "CHANGELOG.md").read_text().split("\n### Removed and renamed\n")[1]
    for name in REMOVED:
        _, (message,) = parse(PPOArguments, f"--actor_model_name_or_path a --{name} m")
        assert message == f"--{name} has been removed; CHANGELOG.md names its replacement"
    assert [name for name in REMOVED.keys() | OLDER_FORMS.keys() if f"`--{name}" not in changes] == []
    names = {field.name for program in find_programs() for field in dataclasses.fields(program.flags)}
    of_steps = {field.name for field in dataclasses.fields(PPOArguments)}
    assert not REMOVED.keys() & of_steps and not SWITCHES.keys() & of_steps
    assert {flag for flag, _ in SWITCHES.values()} | OLDER_NAMES.keys() <= names


@OF_ALL_PROGRAMS
def test_a_program_that_takes_flags_without_effect_says_so(program):
    needs_another = any(field.metadata["only_with"] for field in dataclasses.fields(program.flags))
    if needs_another or issubclass(program.flags, TokenizerArguments):
        assert re.search(r"\b(print_notes|no_effect_notes)\(args", sources_of(program.file)), "told by nobody"


@OF_ALL_PROGRAMS
def test_defaults_have_their_type_and_their_choices(program):
    for field in dataclasses.fields(program.flags):
        assert field.metadata["help"], field.name
        value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        scalar, is_list = field_type(field)
        if value is not None and not is_list:
            assert isinstance(value, scalar), field.name
        if field.metadata["choices"] and value:
            assert value in field.metadata["choices"], field.name


@functools.cache
def sources_of(program: Path) -> str:
    """The text of a program's file and of all that it imports from this repository, flags' own apart."""
    found, waiting = {}, [program]
    while waiting:
        file = waiting.pop()
        if file in found or not file.is_file():
            continue
        found[file] = file.read_text()
        for node in ast.walk(ast.parse(found[file])):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for place in (ROOT.joinpath(*name.split(".")) for name in names):
                waiting += [place.with_suffix(".py"), place / "__init__.py"]
    return "\n".join(text for file, text in found.items() if file.name not in FLAG_FILES)


def unread_flags(cls, sources: str) -> list[str]:
    """The flags that no code reads: neither by name, nor as a role's, `args.actor.lora_dim`."""
    unread = []
    for name in (field.name for field in dataclasses.fields(cls)):
        of_role = name.removeprefix("actor_").removeprefix("critic_")
        forms = rf"\bargs\.{name}\b|\"{name}\"|\b(role|like)\.{of_role}\b"
        if any(name in taker.__dataclass_fields__ and f"{taker.__name__}.of(" in sources for taker in TAKERS):
            forms += rf"|\b(options|self)\.{name}\b"
        if not re.search(forms, sources):
            unread.append(name)
    return unread


@OF_ALL_PROGRAMS
def test_every_flag_of_a_program_is_read_by_that_program(program):
    assert unread_flags(program.flags, sources_of(program.file)) == []


def test_a_flag_that_nothing_reads_is_found():
    sources = sources_of(ROOT / "step3_ppo/main.py")
    without = sources.replace("args.gae_lambda", "0.95").replace('"gae_lambda"', '""')
    assert "gae_lambda" in unread_flags(PPOArguments, without)


def partner_values(partner: str, args) -> tuple[str, object, object]:
    """A flag that another one needs, a value with which that one acts, and one with which it does not."""
    name, sign, wanted = re.fullmatch(r"(\w+)(!?=)?(.*)", partner).groups()
    field = next(field for field in dataclasses.fields(args) if field.name == name)
    assert not sign or wanted in map(str, field.metadata["choices"] or [field.default]), "no such value"
    met, unmet = {"=": (wanted, "another"), "!=": ("another", wanted)}.get(sign, ("another", field.default))
    return (name, [met], []) if field_type(field)[1] else (name, met, unmet)


@OF_ALL_PROGRAMS
def test_a_flag_that_does_nothing_without_another_says_so(program):
    everywhere = {field.name for other in find_programs() for field in dataclasses.fields(other.flags)}
    for field in dataclasses.fields(program.flags):
        words, args = [f"--{field.name}", "1"], program.flags()
        named = {p: re.match(r"\w+", p)[0] for p in field.metadata["only_with"].split()}
        assert set(named.values()) <= everywhere
        partners = [partner_values(p, args) for p, name in named.items() if hasattr(args, name)]
        unmet = dataclasses.replace(args, **{name: value for name, _, value in partners})
        assert no_effect_notes(unmet, words) == [], "it has its default"
        unmet = dataclasses.replace(unmet, **{field.name: "another"})
        notes = no_effect_notes(unmet, words)
        assert len(notes) == bool(partners)
        if notes:
            assert notes[0].startswith(f"--{field.name} has no effect")
        for name, met, _ in partners:
            assert no_effect_notes(dataclasses.replace(unmet, **{name: met}), words) == []


def test_what_cannot_be_used_is_refused():
    for usable in (2**53, 3.4e38, "x" * 255, "http://h/?" + "q" * 500):
        assert is_usable(usable)
    for value in (2**53 + 1, 1e39, float("nan"), "\u00e4" * 128, "a/" * 2048, "a\x00", "ab\udcff"):
        assert not is_usable(value)


def test_negative_values_of_every_form_are_values():
    words = "--truncated_score -1e-3 --entropy_coef -.5 --reward -2*model:a model:b"
    problems = Problems()
    line = ["--actor_model_name_or_path", "m", *words.split()]
    args = parse_args(PPOArguments, line, problems=problems)
    assert problems.messages == []
    assert (args.truncated_score, args.entropy_coef) == (-1e-3, -0.5)
    assert args.reward == ["-2*model:a", "model:b"]


def test_how_often_is_steps_an_epoch_or_a_time():
    def read(text: str) -> tuple[int, int, bool]:
        found, messages = parse(SFTArguments, f"--model_name_or_path m --save_interval {text}")
        assert messages == []
        return found.save_interval.steps, found.save_interval.seconds, bool(found.save_interval)

    assert [read(text) for text in ("0", "7", "epoch")] == [(0, 0, False), (7, 0, True), (0, 0, True)]
    assert [read(text)[:2] for text in ("90s", "30m", "2h")] == [(0, 90), (0, 1800), (0, 7200)]
    for text in ("-1", "1.5", "0m", "h", "2d", "epochs", "1e3", "\u0663", "9" * 99):
        _, messages = parse(SFTArguments, f"--model_name_or_path m --eval_interval={text}")
        assert messages and messages[0].startswith(f"--eval_interval {text.split()[0][:60]}"), text


OLDER_VALUES = {  # an older spelling, and what it sets
    "--clip_range 0.2,0.28": {"clip_range": 0.2, "clip_range_high": 0.28},
    "--distill_loss 0.5*jsd:0.3": {"distill_loss": "jsd", "distill_weight": 0.5, "distill_beta": 0.3},
    "--distill_loss 4*sampled": {"distill_loss": "sampled", "distill_weight": 4.0},
    "--early_stop_kl 1e-2:skip": {"early_stop_kl": 0.01, "early_stop_action": "skip"},
    "--kl_in loss:k2": {"kl_in": "loss", "kl_estimator": "k2"},
    "--max_tokens_per_micro_batch 0,512": {
        "max_tokens_per_micro_batch": 0, "max_tokens_per_scoring_pass": 512,
    },
    "--optimizer muon:1e-3": {"optimizer": "muon", "muon_learning_rate": 1e-3},
    "--reward_on_error default:-1": {"reward_on_error": "default", "reward_default_score": -1.0},
    "--rollout_correction geo_rs:1.01": {"rollout_correction": "geo_rs", "correction_high": 1.01},
    "--rollout_correction mis:0.5,inf": {
        "rollout_correction": "mis", "correction_low": 0.5, "correction_high": 3e38,
    },
    "--truncated -5": {"truncated_score": -5.0},
    "--truncated bootstrap:0": {"truncated": "bootstrap", "truncated_score": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("words", OLDER_VALUES)
def test_an_older_spelling_is_taken_with_a_note_and_resumed(words):
    """By the spelling of now, and from a run that was started with the older one."""
    problems = Problems()
    line = ["--actor_model_name_or_path", "m", "--dtype", "fp32"]
    args = parse_args(PPOArguments, [*line, *words.split()], problems=problems)
    expected = dataclasses.replace(parse_args(PPOArguments, line, problems=problems), **OLDER_VALUES[words])
    assert args == expected and problems.messages == []
    (note,) = problems.notes
    assert note.startswith(f"{words} is an older spelling; write --")
    again = parse_args(PPOArguments, [*line, *note.partition(" write ")[2].split()], problems=problems)
    assert again == expected and len(problems.notes) == 1
    name, value = words.removeprefix("--").split()
    saved = vars(parse_args(PPOArguments, line, problems=problems)) | {name: value}
    for part in OLDER_VALUES[words].keys() - {name}:
        del saved[part]
    assert compare_flags(args, saved, "ORIGIN", problems) == [] == problems.messages


@pytest.mark.parametrize(
    "words",
    ["--rollout_correction tis:0", "--rollout_correction mis:0.5,0.0", "--rollout_correction none:2"]
    + [
        "--distill_loss forward_kl:0.5",
        "--distill_loss jsd:2",
        "--optimizer adamw:1e-3",
        "--truncated mask:1",
    ]
    + ["--kl_in reward:k4", "--early_stop_kl 0.1:go", "--clip_range 0.2,", "--clip_range 0.2,-1"],
)
def test_an_older_spelling_that_was_no_value_is_still_none(words):
    _, messages = parse(PPOArguments, f"--actor_model_name_or_path m {words}")
    flag, value = words.split()
    assert messages and all(text.startswith("--") for text in messages), messages
    assert flag in messages[0] or value.partition(":")[2] in messages[0]


def test_an_older_spelling_needs_its_flags():
    _, (message,) = parse(SFTArguments, "--model_name_or_path m --max_tokens_per_micro_batch 64,128")
    assert message.startswith("--max_tokens_per_micro_batch 64,128: expected a whole number")


@pytest.mark.parametrize("cls", [SFTArguments, RewardArguments, PPOArguments])
def test_help_shows_the_usual_flags_on_two_screens_and_all_on_demand(cls, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    shown = {}
    for word in ("--help", "--help_all"):
        with pytest.raises(SystemExit):
            parse_args(cls, [word], problems=Problems())
        shown[word] = capsys.readouterr().out
    fields = dataclasses.fields(cls)
    usual = {field.name for field in fields if field.metadata["is_usual"]}
    flags = {word: set(re.findall(r"^  --(\w+)", text, re.MULTILINE)) for word, text in shown.items()}
    assert flags["--help"] == usual | {"config"} and 20 <= len(flags["--help"]) <= 40
    assert shown["--help"].count("\n") <= 90 and "--help_all" in shown["--help"]
    assert flags["--help_all"] >= {"version", *(field.name for field in fields)}
    required = {field.name for field in fields if field.metadata["required"]}
    assert required and required <= flags["--help"]
