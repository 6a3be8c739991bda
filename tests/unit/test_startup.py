"""Checks before any model is loaded. The programs' own tests show each message as a user sees it."""

import pytest

from common.flags.args import Problems
from common.programs.startup import check_run, find_template
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
