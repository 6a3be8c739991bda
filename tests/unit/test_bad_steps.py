"""Refused steps are counted over a whole run, and their batches can be looked at."""

import json
import math

import pytest
import torch
from disk_limit import files_up_to

from common.data.packed_batch import ROW_IDS, PackedBatch, collate_pairs, collate_sft
from common.ranks.failures import StepRefused, TooManyBadSteps
from common.runs.bad_steps import BadSteps
from common.runs.run_logger import RunLogger
from common.runs.saved_state import TensorReader


def build(folder, most: int = 3) -> BadSteps:
    logger = RunLogger(str(folder), columns=("a/b",), num_steps=9)
    logger.begin_anew()
    return BadSteps(str(folder), most, logger)


def rows_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def metrics(folder) -> list[tuple[int, int]]:
    return [(row["step"], row["perf/bad_steps"]) for row in rows_of(folder / "metrics.jsonl")]


def test_refused_steps_are_counted_and_the_one_too_many_ends_the_run(tmp_path, capsys):
    bad_steps, errors = build(tmp_path, most=2), [StepRefused(f"loss {i} is NaN") for i in range(3)]
    bad_steps.refuse(4, errors[0])
    bad_steps.refuse(7, errors[1])
    with pytest.raises(TooManyBadSteps, match="loss 2 is NaN\nskipped 3 steps, --max_bad_steps allows 2"):
        bad_steps.refuse(7, errors[2])
    assert metrics(tmp_path) == [(4, 1), (7, 2), (7, 3)]
    files = sorted(path.name for path in (tmp_path / "bad_batches").iterdir())
    assert files == [f"step-00000{step}-00{n}-rank-00000.jsonl" for n, step in enumerate((4, 7, 7), 1)]
    printed = capsys.readouterr().out
    assert "step 4 refused: loss 0 is NaN; its batch is in" in printed and "step 7 refused" in printed


def test_the_count_goes_on_where_a_checkpoint_left_it(tmp_path):
    first, second = build(tmp_path, most=1), build(tmp_path, most=1)
    first.refuse(1, StepRefused("no"))
    assert list(first.tensor_slices()) == []
    second.load(TensorReader([]), json.loads(json.dumps(first.json_state())))
    with pytest.raises(TooManyBadSteps, match="skipped 2 steps"):
        second.refuse(2, StepRefused("no"))


def test_the_batch_of_a_refused_step_is_written_sequence_by_sequence(tmp_path, monkeypatch):
    monkeypatch.setattr("common.ranks.distributed.rank", lambda: 3)
    columns = {
        "ids": [torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)],
        "logprobs": [torch.tensor([-0.5, math.nan]), torch.tensor([math.inf])],
    }
    first = PackedBatch.build(("a", "b"), columns).with_texts(ROW_IDS, ["f:1", "ä:2"])
    second = PackedBatch.build(("c",), {"ids": [torch.tensor([5, 6])]})
    build(tmp_path).refuse(12, StepRefused("why", [first, second]))
    (file,) = (tmp_path / "bad_batches").iterdir()
    assert file.name == "step-000012-001-rank-00003.jsonl"
    head, a, b, c = rows_of(file)
    assert head == {"step": 12, "reason": "why"}
    assert a["id"] == "a" and a["ids"] == [1, 2] and a["logprobs"] == [-0.5, None]
    assert b["ids"] == [] and b["logprobs"] == [None]
    assert a["row_ids"] == "f:1" and b["row_ids"] == "ä:2"
    assert c == {"id": "c", "ids": [5, 6]}


def test_every_kind_of_batch_can_be_written_and_names_its_rows(tmp_path):
    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "row_id": "r"}
    pair = {"chosen_response_start": 1, "rejected_response_start": 1, "margin": 1.5, "row_id": "p"}
    pair |= {"chosen_ids": [1, 2, 3], "rejected_ids": [1, 4]}
    build(tmp_path).refuse(1, StepRefused("no", [collate_sft([row]), collate_pairs([pair])]))
    (file,) = (tmp_path / "bad_batches").iterdir()
    assert [written["id"] for written in rows_of(file)[1:]] == ["(0, 'r')", "(0, 'p')"]


def test_a_batch_that_cannot_be_written_is_said_and_ends_nothing(tmp_path, capsys):
    bad_steps = build(tmp_path)
    batch = PackedBatch.build(range(50), {"ids": list(torch.arange(5000).view(50, 100))})
    with files_up_to(6000):
        bad_steps.refuse(1, StepRefused("no", [batch]))
    assert "its batch could not be written to" in capsys.readouterr().out
