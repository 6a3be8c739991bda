"""Checks before any model is loaded. The programs' own tests show each message as a user sees it."""

import pytest

from common.flags.args import Problems
from common.programs.startup import OF_A_LAUNCHER, check_environment, check_run, find_template
from common.ranks import distributed
from step1_sft.arguments import SFTArguments


@pytest.mark.parametrize(
    ("given", "default", "stage", "is_good"),
    [
        ("fp32", "bf16", 0, False),
        ("bf16", "fp32", 0, True),
        ("", "fp32", 0, False),
        ("", "bf16", 0, True),  # bf16 runs at stage 1 at least, also where it is the machine's default
        ("", "fp32", 1, True),
    ],
)
def test_optimizer_offload_is_judged_by_the_stage_that_is_run(given, default, stage, is_good, monkeypatch):
    monkeypatch.setattr(distributed, "dtype_name", lambda flag: flag or default)
    problems = Problems()
    check_run(SFTArguments(offload="optimizer", dtype=given, zero_stage=stage), problems)
    assert (problems.messages == []) == is_good


def test_the_template_that_a_model_was_trained_with_is_the_default(tmp_path, make_tokenizer):
    """Another one is told; so is a chat template that is not used."""
    tokenizer = make_tokenizer()

    def found(given: str = "") -> tuple[str, str]:
        args, problems = SFTArguments(template=given), Problems()
        _, notes = find_template("--model_name_or_path", str(tmp_path), args, tokenizer, problems)
        assert problems.messages == []
        return args.template, " ".join(notes)

    assert found() == ("human_assistant", "")
    (tmp_path / "triptych.json").write_text('{"template": "plain"}')
    assert found() == ("plain", "")
    name, said = found("human_assistant")
    assert name == "human_assistant" and f"{tmp_path} was trained with --template plain; leave the" in said
    (tmp_path / "triptych.json").write_text("{}")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    name, said = found()
    assert name == "human_assistant" and "has a chat template of its own, which is not used" in said
    assert found("chat") == ("chat", "")


def problems_in(monkeypatch, **environment: str) -> list[str]:
    """Return what is wrong with an environment that has these variables of a launcher and no others."""
    for name in (*OF_A_LAUNCHER, "MASTER_ADDR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    problems = Problems()
    assert check_environment(problems) == (problems.messages == [])
    return problems.messages


GOOD = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("environment", [{}, GOOD, {"WORLD_SIZE": "1"}, {"OMP_NUM_THREADS": "4,2"}])
def test_good_surroundings(monkeypatch, environment):
    assert problems_in(monkeypatch, **environment) == []


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 is in the environment and RANK is not"),
        (GOOD | {"RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        (GOOD | {"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
        (GOOD | {"MASTER_ADDR": ""}, "RANK is in the environment and MASTER_ADDR not"),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS=0"),
    ],
)
def test_bad_surroundings_are_named_with_a_cure(monkeypatch, environment, words):
    (message,) = problems_in(monkeypatch, **environment)
    assert words in message and ";" in message


def test_a_bad_rank_does_not_hide_the_message(monkeypatch, capsys):
    """Nobody may be the first process then: all speak."""
    monkeypatch.setenv("RANK", "one")
    problems = Problems()
    problems.add("something")
    with pytest.raises(SystemExit):
        problems.exit_if_any()
    assert "something" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit):
        problems.exit_if_any()
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit):
        problems.exit_if_any(is_told_by_all=True)
    assert "something" in capsys.readouterr().err
