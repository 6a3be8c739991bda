"""run.json: what a run notes of itself at each start."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from common.data.data_report import DataReport
from common.runs import run_description
from common.runs.run_description import (
    count_parameters,
    describe_run,
    describe_start,
    flag_defaults,
    installed_versions,
)
from common.runs.saved_state import Progress
from step1_sft.arguments import SFTArguments

ARGS = SFTArguments(model_name_or_path="m", seed=5)


def test_defaults_are_the_flags_own():
    defaults = flag_defaults(ARGS)
    assert defaults["seed"] == 1234 and defaults["trackers"] == [] and defaults["model_name_or_path"] is None
    json.dumps(defaults)


def test_a_start_says_on_what_it_was_made():
    start = describe_start(Progress("digest", {"--batch": 16, "--update": 8}, step=7), "fp32")
    assert (start["from_step"], start["data_key"], start["global_rows"], start["dtype"]) == (
        7, "digest", 16, "fp32",
    )  # fmt: skip
    assert start["versions"]["torch"] == torch.__version__ and start["world_size"] == 1 and start["device"]
    json.dumps(start)


def test_parameters_and_rows_are_counted():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))
    model[0].requires_grad_(False)
    counts = count_parameters(SimpleNamespace(module=model))
    assert counts == {"all": 24, "trained": 8}
    progress = Progress("digest", {"--batch": 16}, about_data=DataReport(num_train=5, notes=["n"]).facts())
    start = describe_start(progress, "fp32", {"actor": counts})
    assert start["data"]["num_train"] == 5 and "notes" not in start["data"]
    assert start["parameters"] == {"actor": counts}


def test_a_resumed_run_keeps_its_earlier_starts(tmp_path):
    first = describe_run(tmp_path, ARGS, num_steps=9, start={"from_step": 0}, is_resumed=False)
    (tmp_path / "run.json").write_text(json.dumps(first))
    second = describe_run(tmp_path, ARGS, num_steps=12, start={"from_step": 4}, is_resumed=True)
    assert [start["from_step"] for start in second["starts"]] == [0, 4] and second["num_steps"] == 12
    anew = describe_run(tmp_path, ARGS, num_steps=9, start={"from_step": 0}, is_resumed=False)
    assert len(anew["starts"]) == 1


@pytest.mark.parametrize("text", [None, '{"starts": 3}', '{"sta'])
def test_a_file_that_cannot_be_read_decides_nothing(tmp_path, text):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    about = describe_run(tmp_path, ARGS, num_steps=9, start={"from_step": 4}, is_resumed=True)
    assert about["starts"] == [{"from_step": 4}]


def test_packages_that_are_absent_are_left_out():
    assert list(installed_versions(["torch", "no-such-thing"])) == ["torch"]


def test_no_git_is_no_error(monkeypatch):
    def fail(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(subprocess, "run", fail)
    assert run_description.code_version() == ""
