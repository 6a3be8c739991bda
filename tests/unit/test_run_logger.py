"""What a run writes and prints, and the picture of it."""

import json

from common.plots import plot_curves, read_curves
from common.run_logger import RunLogger


def lines_of(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_and_lines_of_a_run(tmp_path, capsys):
    logger = RunLogger(
        str(tmp_path), columns=("sft/loss", "perf/step_seconds"), num_steps=3, log_interval=2,
        tensorboard_dir=str(tmp_path / "tensorboard"),
    )  # fmt: skip
    logger.write_json("args.json", "{}")
    logger.log_event(0, {"sft/eval_loss": 3.0})
    for step in (1, 2, 3):
        logger.log(step, {"sft/loss": 1.0 / step, "sft/hidden": 9.0, "perf/step_seconds": 0.5})
    logger.sample(3, prompt="p", answer="ä")
    logger.close()
    rows = lines_of(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    assert rows[2]["sft/loss"] == 0.5 and rows[2]["sft/hidden"] == 9.0 and rows[2]["perf/peak_memory_gib"] > 0
    assert lines_of(tmp_path / "samples.jsonl") == [{"step": 3, "prompt": "p", "answer": "ä"}]
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in printed] == ["0/3", "2/3", "3/3"], "step 1 is not due"
    assert "loss   0.5000" in printed[1] and "hidden" not in printed[1]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_number_that_json_cannot_hold_is_null_and_leaves_a_gap_in_the_curve(tmp_path, capsys):
    logger = RunLogger(str(tmp_path), columns=("a/norm",), num_steps=2)
    for step, norm in enumerate((float("inf"), 2.0), start=1):
        logger.log(step, {"a/norm": norm})
    logger.close()
    first = (tmp_path / "metrics.jsonl").read_text().splitlines()[0]
    assert '"a/norm": null' in first and "norm      inf" in capsys.readouterr().out
    assert read_curves(tmp_path / "metrics.jsonl")["a/norm"] == ([2], [2.0])


def test_a_new_run_replaces_the_old_numbers(tmp_path):
    for value in (1.0, 2.0):
        logger = RunLogger(str(tmp_path), columns=("a/b",), num_steps=1)
        logger.log(1, {"a/b": value})
        logger.close()
    assert [r["a/b"] for r in lines_of(tmp_path / "metrics.jsonl")] == [2.0]


def test_nothing_is_written_without_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    logger = RunLogger("", columns=("a/b",), num_steps=1)
    logger.log(1, {"a/b": 1.0})
    logger.sample(1, prompt="p")
    logger.close()
    assert list(tmp_path.iterdir()) == [] and "1/1" in capsys.readouterr().out


def test_curves_are_read_by_name_and_no_points_make_no_picture(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "seconds": 3, "a/x": 1.0}\n{"step": 2, "a/x": 2.0, "a/y": 5}\n')
    assert read_curves(file) == {"a/x": ([1, 2], [1.0, 2.0]), "a/y": ([2], [5])}
    file.write_text("")
    plot_curves(file, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
