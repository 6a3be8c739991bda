"""Checks before any model is loaded. The programs' own tests show each message as a user sees it."""

import pytest

from common.flags.args import Problems
from common.programs.startup import check_run
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
    check_run(SFTArguments(offload="optimizer", dtype=given), {"--zero_stage": stage}, problems)
    assert (problems.messages == []) == is_good
