"""--config FILE: flags of a YAML file, beside those of the command line."""

import dataclasses
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train
from common.flags.args import Problems, default_of, field_type, parse_args
from common.flags.config_file import text_of_config
from common.flags.value_forms import Interval
from step1_sft.arguments import SFTArguments
from step2_reward.arguments import RewardArguments
from step3_ppo.arguments import PPOArguments

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)


def parse(text: str, words: str = "", cls: type = SFTArguments, **options):
    path = Path("run.yaml")  # in the test's own folder
    path.write_text(text, encoding="utf-8")
    problems = Problems()
    argv = ["--config", "run.yaml", *words.split()]
    return parse_args(cls, argv, problems=problems, **options), problems.messages


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_flags_of_a_file_have_the_types_of_their_fields():
    args, messages = parse(
        """
        model_name_or_path: "123"   # quoted or not, the flag's type counts
        data_path: [a.jsonl, 'b, c.jsonl']
        data-output-path: ~/cache
        learning_rate: 1e-4
        packed: true
        max_train_steps: 7
        """
    )
    assert not messages
    assert args.model_name_or_path == "123" and args.data_path == ["a.jsonl", "b, c.jsonl"]
    assert args.data_output_path == "~/cache" and args.learning_rate == 1e-4
    assert args.packed is True and args.max_train_steps == 7


def test_the_command_line_takes_precedence():
    text = "model_name_or_path: m\ndata_path: [a, b]\nlora_dim: 8\nseed: 1\n"
    args, messages = parse(text, "--data_path c --lora_dim 4")
    assert not messages and (args.data_path, args.lora_dim, args.seed) == (["c"], 4, 1)
    args, messages = parse("model_name_or_path: m\ndata_path: one\n")
    assert not messages and args.data_path == ["one"], "one value is a list of one"


def test_other_names_and_switches_act_as_on_the_command_line():
    text = "model_name_or_path: m\ntest_stop_step: 3\ndisable_dropout: true\nenable_tensorboard: true\n"
    args, messages = parse(text)
    assert not messages and (args.max_train_steps, args.dropout, args.trackers) == (3, 0.0, ["tensorboard"])
    args, _ = parse(text, "--dropout 0.5 --max_train_steps 9")
    assert (args.max_train_steps, args.dropout) == (9, 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lora_dims: 8", "run.yaml, line 2: unknown flag --lora_dims; did you mean --lora_dim?"),
        ("seed: 1\n\nseed: 1", "run.yaml, line 4: seed is given twice, first in line 2; remove one"),
        (
            "lora_dim: 1\nlora-dim: 1",
            "run.yaml, line 3: lora_dim is given twice, first in line 2; remove one",
        ),
        (
            "max_train_steps: 1\ntest_stop_step: 2",
            "run.yaml, line 3: --test_stop_step is another name of the flag in run.yaml, line 2",
        ),
        ("packed: maybe", "run.yaml, line 2: --packed maybe: expected true or false"),
        ("lora_dim: -1", "run.yaml, line 2: --lora_dim -1 must be at least 0"),
        ("seed: [1, 2]", "run.yaml, line 2: --seed takes one value, not a list"),
        ("seed: {a: 1}", "run.yaml, line 2: seed: expected a value or a list of values"),
        ("data_path: [[a]]", "run.yaml, line 2: data_path: expected a value or a list of values"),
        ("seed:", "run.yaml, line 2: --seed needs a value"),
        ("disable_dropout:", "run.yaml, line 2: --disable_dropout needs a value"),
        ("config: other.yaml", "run.yaml, line 2: unknown flag --config"),
        ("max_logprob_gap: 1", "run.yaml, line 2: --max_logprob_gap has been removed"),
        ("sft: {lora_dim: 1}", "run.yaml, line 2: sft: expected a value or a list of values"),
    ],
)
def test_a_problem_names_file_and_line(text, message):
    _, messages = parse(f"model_name_or_path: m\n{text}\n")
    assert len(messages) == 1 and messages[0].startswith(message), messages


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", 'in "run.yaml", line'),
        ("- a\n", "expected lines 'flag: value'"),
        ("a: 1\n---\nb: 1\n", "line 2"),
        ("a: !!python/name:os.system x\n[", "line 2"),
        ("[" * 100_000, "--config run.yaml: "),
        ("a: \x00", "--config run.yaml: "),
    ],
)
def test_a_file_that_is_no_list_of_flags_is_one_problem(text, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(text)
    error = capsys.readouterr().err
    assert error.startswith("error: 1 problem") and message in error and "required" not in error, error


@pytest.mark.parametrize("words", [["--config"], ["--config", "absent.yaml"], ["--config", "."]])
def test_a_file_that_cannot_be_read_is_one_problem(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_args(SFTArguments, words, problems=Problems())
    assert capsys.readouterr().err.count("\n  - --config ") == 1


def test_an_empty_file_has_no_flags():
    args, messages = parse("# nothing yet\n", "--model_name_or_path m")
    assert not messages and args == SFTArguments(model_name_or_path="m")


def values_of(field: dataclasses.Field) -> st.SearchStrategy:
    """Any values that a flag takes."""
    scalar, is_list = field_type(field)
    limits = field.metadata["range"]
    low = limits.get("low", limits.get("above", -1000)) + (1 if "above" in limits and scalar is int else 0)
    high = limits.get("high", limits.get("below", low + 1000))
    value = {
        bool: st.booleans(),
        int: st.integers(math.ceil(low), math.floor(high)),
        float: st.floats(low, high, width=32, exclude_min="above" in limits, exclude_max="below" in limits),
        Interval: st.sampled_from(["3", "epoch", "10m"]).map(Interval),
        str: TEXT,
    }[scalar]
    if field.metadata["choices"]:
        value = st.sampled_from(field.metadata["choices"])
    return st.lists(value, min_size=1, max_size=3) if is_list else value


@pytest.mark.parametrize("cls", [SFTArguments, RewardArguments, PPOArguments])
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_the_text_of_a_run_gives_its_flags_again(cls, data):
    fields = [field for field in dataclasses.fields(cls) if field.metadata["range"].get("high", 1) < 1e9]
    chosen = data.draw(st.lists(st.sampled_from(fields), max_size=6, unique_by=lambda field: field.name))
    chosen += [field for field in fields if field.metadata["required"] and field not in chosen]
    older = ("clip_range", "optimizer")  # strings here would be read as an older spelling
    values = {f.name: data.draw(values_of(f), label=f.name) for f in chosen if f.name not in older}
    args = cls(**values)
    text = text_of_config(args, default_of, "main.py")
    # What --auto chose stands in the text, so that the text must not choose again.
    expected = {n for n, v in values.items() if v != default_of_name(cls, n)} - {"auto"}
    assert set(yaml.safe_load(text) or {}) == expected
    again, messages = parse(text, cls=cls)
    assert not messages and again == dataclasses.replace(args, auto=False)


def default_of_name(cls: type, name: str):
    return default_of(cls.__dataclass_fields__[name])


def test_train_takes_the_flags_of_each_step_under_its_name():
    text = "actor-model: 125m\nsft: {lora_dim: 8, data_path: [a b, c]}\nppo: {eval_prompts: 4}\nreward:\n"
    args, messages = parse(text, "--ppo_flags=--seed=3", cls=train.TrainArguments, parts=train.PARTS)
    assert messages == ["run.yaml, line 4: unknown flag --reward; did you mean --reward_model?"]
    assert args.actor_model == "125m"
    assert (
        args.sft_flags == "--lora_dim=8 --data_path 'a b' c" and args.ppo_flags == "--eval_prompts=4 --seed=3"
    )
    launches = [train.build_launch(args, step).words for step in (1, 3)]
    assert launches[0][-4:] == ["--lora_dim=8", "--data_path", "a b", "c"]
    assert launches[1][-2:] == ["--eval_prompts=4", "--seed=3"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("sft: {lora_dims: 8}", "run.yaml, line 1: unknown flag --lora_dims; did you mean --lora_dim?"),
        ("ppo:\n  eval_prompts: x", "run.yaml, line 2: --eval_prompts x: expected a whole number"),
        ("reward: {seed: 1, seed: 2}", "run.yaml, line 1: seed is given twice, first in line 1; remove one"),
        ("sft: 3", "run.yaml, line 1: unknown flag --sft"),
    ],
)
def test_a_problem_of_a_step_is_found_before_any_step_starts(part, message):
    _, messages = parse(f"{part}\n", cls=train.TrainArguments, parts=train.PARTS)
    assert len(messages) == 1 and messages[0].startswith(message), messages
