"""Checks before any model is loaded. The programs' own tests show each message as a user sees it."""

import pytest
import torch
from pretended_gpu import pretended_gpu

from common.flags.args import Problems
from common.programs.startup import OF_A_GROUP, check_environment, check_run, find_template
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
    for name in (*OF_A_GROUP, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    problems = Problems()
    assert check_environment(problems) == (problems.messages == [])
    return problems.messages


GOOD = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("environment", [{}, GOOD, {"WORLD_SIZE": "1"}])
def test_good_surroundings(monkeypatch, environment):
    assert problems_in(monkeypatch, **environment) == []


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 in the environment"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK=one in the environment"),
        (GOOD | {"RANK": "2"}, "RANK=2 WORLD_SIZE=2 "),
        (GOOD | {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 "),
        (GOOD | {"MASTER_ADDR": ""}, "MASTER_ADDR= "),
    ],
)
def test_bad_surroundings_are_named_with_a_cure(monkeypatch, environment, words):
    (message,) = problems_in(monkeypatch, **environment)
    assert words in message and ";" in message


@pytest.mark.parametrize(
    ("rank", "local_rank", "by_all", "is_told"),
    [
        ("one", "", False, True),  # nobody may be the first process then
        ("3", "3", False, False),
        ("3", "3", True, True),
        ("8", "0", False, True),  # its machine may lack a file that the first one has
    ],
)
def test_who_tells_the_problems(monkeypatch, capsys, rank, local_rank, by_all, is_told):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    problems = Problems()
    problems.add("something")
    with pytest.raises(SystemExit):
        problems.exit_if_any(is_told_by_all=by_all)
    assert ("something" in capsys.readouterr().err) == is_told


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("variable", "found"), [("", "expandable_segments:True"), ("PYTORCH_CUDA_ALLOC_CONF", "")]
)
def test_blocks_of_gpu_memory_grow_unless_the_user_says_how(monkeypatch, variable, found):
    for name in distributed.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "max_split_size_mb:64")
    torch._C._accelerator_setAllocatorSettings("")
    distributed.start()  # without a GPU nothing is set
    assert torch._C._accelerator_getAllocatorSettings() == ""
    with pretended_gpu():
        distributed.start()
    assert torch._C._accelerator_getAllocatorSettings() == found
    torch._C._accelerator_setAllocatorSettings("")
