"""Values that no flag can have, and surroundings in which no run can start."""

import pytest

from common.flags.args import Problems, parse_args
from common.flags.problems import is_usable
from common.programs.startup import OF_A_LAUNCHER, check_environment
from step3_ppo.arguments import PPOArguments


def test_what_cannot_be_used_is_refused():
    for usable in (2**53, 3.4e38, "x" * 255, "http://h/?" + "q" * 500):
        assert is_usable(usable)
    for value in (2**53 + 1, 1e39, float("nan"), "\u00e4" * 128, "a/" * 2048, "a\x00", "ab\udcff"):
        assert not is_usable(value)


def test_negative_values_of_every_form_are_values():
    words = "--truncated -1e-3 --entropy_coef -.5 --reward -2*model:a model:b"
    problems = Problems()
    line = ["--actor_model_name_or_path", "m", *words.split()]
    args = parse_args(PPOArguments, line, problems=problems)
    assert problems.messages == []
    assert (args.truncated, args.entropy_coef) == ("-1e-3", -0.5)
    assert args.reward == ["-2*model:a", "model:b"]


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
