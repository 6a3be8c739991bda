"""What a run writes and prints, and the picture of it."""

import gzip
import json
import os
import sys

import pytest
from disk_limit import files_up_to
from made_runs import start_logger

from common.runs import run_logger
from common.runs.durable_files import sync
from tools.report.run_reader import Curve, read_run


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(folder) -> list[int]:
    return [row["step"] for row in lines_of(folder / "metrics.jsonl")]


def test_run_logger_writes_files_and_lines(tmp_path, capsys):
    columns = ("sft/loss", "perf/step_seconds")
    logger = start_logger(tmp_path, None, columns, 3, log_interval=2, trackers=["tensorboard"])
    logger.log_event(0, {"sft/eval_loss": 3.0})
    for step in (1, 2, 3):
        logger.log(step, {"sft/loss": 1.0 / step, "sft/hidden": 9.0, "perf/step_seconds": 0.5})
    logger.sample(3, prompt="p", answer="ä")
    logger.close()
    logger.write_report()
    rows = lines_of(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    assert rows[2]["sft/loss"] == 0.5 and rows[2]["sft/hidden"] == 9.0 and rows[2]["perf/peak_memory_gib"] > 0
    assert lines_of(tmp_path / "samples.jsonl") == [{"step": 3, "prompt": "p", "answer": "ä"}]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["after", "step", "0/3", "value", "change"]
    assert printed[1].split() == ["sft/eval_loss", "3"]
    assert printed[2].split() == ["step", "loss", "step_seconds", "left"]
    assert printed[-1].startswith("result: sft/eval_loss 3 before, 3 after")
    steps = [line.split() for line in printed[3:-1]]
    assert [step[0] for step in steps] == ["2/3", "3/3"], "step 1 is not due"
    assert steps[0][1:3] == ["0.5", "0.5"] and steps[1][3] == "0:00:00"
    assert "sft/hidden" in (tmp_path / "report.html").read_text()
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_number_that_json_cannot_hold_is_null_and_leaves_a_gap_in_the_curve(tmp_path, capsys):
    logger = start_logger(tmp_path, None, ("a/norm",), 2)
    for step, norm in enumerate((float("inf"), 2.0), start=1):
        logger.log(step, {"a/norm": norm})
    logger.close()
    first = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    assert '"a/norm": null' in first and "1/2        inf " in capsys.readouterr().out
    assert read_run(tmp_path).curves["a/norm"] == Curve([2], [2.0])


def test_run_logger_of_a_new_run_replaces_old_metrics(tmp_path):
    for value in (1.0, 2.0):
        logger = start_logger(tmp_path)
        logger.log(1, {"a/b": value})
        if value == 1.0:
            logger.sample(1, prompt="p")
        logger.close()
    assert [r["a/b"] for r in lines_of(tmp_path / "metrics.jsonl")] == [2.0]
    assert not (tmp_path / "samples.jsonl").exists()


@pytest.mark.parametrize(("folder", "is_main"), [("", True), ("run", False)], ids=["no folder", "other rank"])
def test_nothing_is_written_without_a_folder_or_by_other_ranks(
    tmp_path, monkeypatch, capsys, folder, is_main
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.ranks.distributed.is_main", lambda: is_main)
    numbers = {"sizes": {"metrics.jsonl": 5, "samples.jsonl": 0}, "seconds": 1.0}
    for before in (None, numbers):
        logger = start_logger(folder, before, num_steps=2)
        logger.log(2, {"a/b": 1.0})
        logger.sample(2, prompt="p")
        logger.rollout(2, [{"prompt": "p"}])
        logger.json_state()
        logger.close()
    assert list(tmp_path.iterdir()) == [] and ("2/2" in capsys.readouterr().out) is is_main


# ---- resuming


def test_run_logger_of_a_resumed_run_has_every_line_once(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(run_logger, "sync", lambda path: synced.append(path.name) or sync(path))
    first = start_logger(tmp_path)
    first.started -= 1000.0
    for step in (1, 2):
        first.log(step, {"a/b": 1.0})
        first.sample(step, answer="ä")
        first.rollout(step, [{"answer": "ä"}, {"answer": str(step)}])
        first.digests(step, ranks=[step])
    assert not synced
    numbers = first.json_state()
    assert synced == list(numbers["sizes"]), "lines are on the disk before a checkpoint counts them"
    before = json.dumps(numbers)
    for step in (3, 4):  # done again below: this run ends without a further checkpoint
        first.log(step, {"a/b": 1.0})
        first.sample(step, answer="lost")
        first.digests(step, ranks=["lost"])
        first.rollout(step, [{"answer": "lost"}])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "torn')
    assert json.dumps(numbers) == before, "a checkpoint writes them a moment later"
    second = start_logger(tmp_path, numbers)
    assert steps_of(tmp_path) == [1, 2], "cut at once: nobody knows when the next line comes"
    sizes = {name: (tmp_path / name).stat().st_size for name in numbers["sizes"]}
    assert sizes == numbers["sizes"]
    second.log(3, {"a/b": 2.0})
    second.sample(3, answer="again")
    second.digests(3, ranks=["again"])
    second.rollout(3, [{"answer": "again", "kl": float("nan")}])
    second.close()
    assert [(r["step"], r["a/b"]) for r in lines_of(tmp_path / "metrics.jsonl")] == [(1, 1), (2, 1), (3, 2)]
    assert [r["answer"] for r in lines_of(tmp_path / "samples.jsonl")] == ["ä", "ä", "again"]
    with gzip.open(tmp_path / "digests.jsonl.gz", "rt") as file:
        assert [json.loads(line)["ranks"] for line in file] == [[1], [2], ["again"]]
    with gzip.open(tmp_path / "rollouts.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    assert [(r["step"], r["answer"]) for r in rows] == [(1, "ä"), (1, "1"), (2, "ä"), (2, "2"), (3, "again")]
    assert rows[-1]["kl"] is None
    assert 1000.0 <= lines_of(tmp_path / "metrics.jsonl")[-1]["seconds"] < 1100.0, "the clock is resumed too"


# ---- disks that fail


def test_lines_wait_while_the_disk_is_full_and_none_is_torn_or_lost(tmp_path, capsys):
    logger = start_logger(tmp_path)
    logger.log(1, {"a/b": 1.0})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with files_up_to(size + 20):
        for step in (2, 3):
            logger.log(step, {"a/b": 1.0})
            assert steps_of(tmp_path) == [1], "what was written of a line is cut off at once"
        with pytest.raises(OSError, match="metrics.jsonl cannot be written"):
            logger.json_state()
    printed = capsys.readouterr().out
    assert printed.count("its lines are kept in memory") == 1 and "    3/9 " in printed
    logger.log(4, {"a/b": 1.0})
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert logger.json_state()["sizes"]["metrics.jsonl"] == (tmp_path / "metrics.jsonl").stat().st_size


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_file_that_is_not_as_it_was_written_gets_no_hole_and_no_torn_line(tmp_path, capsys, kept):
    """Someone has cut it, or a disk has failed the cut of a torn line as well as the line."""
    logger = start_logger(tmp_path)
    for step in (1, 2):
        logger.log(step, {"a/b": 1.0})
    file = tmp_path / "metrics.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes({0: b"", 1: first, 3: first + second + second[:9]}[kept])
    logger.log(3, {"a/b": 1.0})
    assert steps_of(tmp_path) == [1, 2][:kept] + [3]
    assert ("has lost lines" in capsys.readouterr().out) is (kept < 2)
    logger.close()
    assert logger.json_state()["sizes"]["metrics.jsonl"] == file.stat().st_size


def test_a_full_disk_under_the_output_or_a_reader_that_has_gone_ends_no_run(tmp_path, monkeypatch):
    logger = start_logger(tmp_path)
    reading, writing = os.pipe()
    os.close(reading)
    for file in (open("/dev/full", "w"), os.fdopen(writing, "w")):  # noqa: SIM115
        monkeypatch.setattr(sys, "stdout", file)
        logger.log(1, {"a/b": 1.0})
        monkeypatch.undo()
        with pytest.raises(OSError):
            file.close()  # the line is still in it
    assert steps_of(tmp_path) == [1, 1]


def test_run_logger_warns_when_the_report_cannot_be_drawn(tmp_path, capsys, monkeypatch):
    logger = start_logger(tmp_path)
    logger.log(1, {"a/b": 1.0})
    with files_up_to(200):
        logger.write_report()
    printed = capsys.readouterr().out
    assert "report.html was not written (OSError: --output" in printed
    assert "python -m tools.report" in printed and not list(tmp_path.glob("report*"))
