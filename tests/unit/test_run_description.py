"""run.json: what a run notes of itself at each start."""

import json

import pytest
import torch

from common.data.token_cache import DataReport
from common.runs.run_description import describe_run
from common.runs.saved_state import Progress, Stateful
from step1_sft.arguments import SFTArguments

ARGS = SFTArguments(model_name_or_path="m", seed=5, dtype="fp32")


class EnginePart(Stateful):
    """A part of a checkpoint that has an engine: itself."""

    def __init__(self) -> None:
        self.engine = self
        self.module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, bias=False))
        self.module[0].requires_grad_(False)


def describe(folder, step: int, *, is_resumed: bool) -> dict:
    about_data = DataReport(num_train=5, notes=["n"]).facts()
    progress = Progress("digest", {"--batch": 16, "--update": 8}, step=step, about_data=about_data)
    parts = {"progress": progress, "actor": EnginePart()}
    found = describe_run(folder, ARGS, parts, num_steps=9, is_resumed=is_resumed)
    (folder / "run.json").write_text(json.dumps(found))
    return found


def test_a_start_says_on_what_it_was_made(tmp_path):
    about = describe(tmp_path, 7, is_resumed=False)
    defaults, (start,) = about["defaults"], about["starts"]
    assert about["num_steps"] == 9 and defaults["seed"] == 1234 and defaults["trackers"] == []
    told = {"from_step": 7, "data_key": "digest", "global_rows": 16, "dtype": "fp32", "world_size": 1}
    assert start.items() >= told.items() and start["device"]
    assert start["versions"]["torch"] == torch.__version__
    assert start["data"]["num_train"] == 5 and "notes" not in start["data"]
    assert start["parameters"] == {"actor": {"all": 24, "trained": 8}}


def test_a_resumed_run_keeps_its_earlier_starts(tmp_path):
    for step in (0, 4):
        found = describe(tmp_path, step, is_resumed=step > 0)
    assert [start["from_step"] for start in found["starts"]] == [0, 4]
    assert len(describe(tmp_path, 0, is_resumed=False)["starts"]) == 1


@pytest.mark.parametrize("text", ['{"starts": 3}', '{"sta'])
def test_a_file_that_cannot_be_read_decides_nothing(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    assert [start["from_step"] for start in describe(tmp_path, 4, is_resumed=True)["starts"]] == [4]
