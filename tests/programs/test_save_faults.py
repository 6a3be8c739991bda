"""Disks that take no more, folders that go away.

A save that fails leaves the checkpoints before it, on all ranks alike, and the run goes on;
an export that fails leaves the one before it.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_runs import ForkedRun
from program_runs import read_metrics
from test_resume import assert_same_run, without_times
from tiny_inputs import from_words, step_flags

from common.runs.checkpoints import find_checkpoints

pytestmark = pytest.mark.slow

STEPS = 4
REFUSED = 3
SAVE = "common.runs.run:save_checkpoint"
TRAIN_STEP = "step1_sft.sft_trainer:SFTTrainer.train_step"
EXPORT = "common.runs.export:_replace"
LIMIT = "exec:import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({}, r.getrlimit(r.RLIMIT_FSIZE)[1]))"
# No file grows beyond so many bytes: enough for metrics, too little for a model.
FULL, FREE = LIMIT.format(30_000), LIMIT.format("r.RLIM_INFINITY")
SHORT = from_words(
    "--data_split 4,4,2 --max_seq_len 64 --gradient_accumulation_steps 2 --eval_fraction 0.2 "
    f"--dropout 0.1 --num_train_epochs 9 --max_train_steps {STEPS} --save_interval 1"
)


def hook(at: str, call: int, do: str, **more: Any) -> dict[str, Any]:
    """Return a hook that strikes before a call."""
    return {"at": at, "call": call, "do": do} | more


@pytest.fixture(scope="module")
def run_sft(forks, tiny) -> Callable[..., ForkedRun]:
    """Run step 1 on one rank or two, saving after every step."""

    def run(output_dir: Path, ranks: int = 1, hooks: tuple | list = (), **flags: Any) -> ForkedRun:
        of_ranks = {"per_device_train_batch_size": 2 // ranks, "zero_stage": 2 if ranks > 1 else 0}
        more = SHORT | of_ranks | flags | {"output_dir": output_dir}
        flags = step_flags(tiny, 1, model_name_or_path=tiny.gpt2, **more)
        return forks.run(1, flags, ranks=ranks, hooks=list(hooks))

    return run


@pytest.fixture(scope="module")
def undisturbed(run_sft, tmp_path_factory) -> Callable[[int], Path]:
    """Return the folder of a run on so many ranks in which nothing went wrong."""
    made: dict[int, Path] = {}

    def make(ranks: int) -> Path:
        if ranks not in made:
            made[ranks] = tmp_path_factory.mktemp("undisturbed") / "output"
            done = run_sft(made[ranks], ranks)
            assert done.codes == [0] * ranks, done.text()
        return made[ranks]

    return make


def names(folder: Path) -> list[str]:
    """Return the checkpoints of a run, and whatever lies beside them."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_told(text: str, folder: Path, step: int, rank: int = 0) -> None:
    """Fail unless it was said which save failed, where, and what is left."""
    pattern = (
        rf"checkpoint {folder}/checkpoints/step-00000{step} could not be written \(rank {rank}: .+\); the "
        r"last good one is step-000001"
    )
    assert re.search(pattern, text), text


def test_a_full_disk_that_the_run_goes_on_with(run_sft, undisturbed, tmp_path):
    """Every save but the first fails, on one rank: all is learned and told, and the first is as it was."""
    ranks, rank = 2, 1
    folder = tmp_path / "output"
    hooks = [hook(SAVE, 2, FULL, rank=rank), hook(EXPORT, 1, FREE, rank=rank)]
    done = run_sft(folder, ranks, hooks)
    assert done.codes == [0] * ranks, done.text()
    for step in range(2, STEPS + 1):
        assert_told(done.text(), folder, step, rank)
    assert done.text().count("; the run continues\n") == STEPS - 1 and "File too large" in done.text()
    assert names(folder) == ["step-000001"]
    (found,), doubts = find_checkpoints(folder)
    assert not doubts and found.damaged_file() is None
    assert without_times(read_metrics(folder)) == without_times(read_metrics(undisturbed(ranks)))
    assert contents(folder / "export") == contents(undisturbed(ranks) / "export")


def test_a_stop_that_cannot_save_says_so(run_sft, undisturbed, tmp_path):
    """Asked to stop on a full disk, it must not claim that the state is saved."""
    folder = tmp_path / "output"
    done = run_sft(folder, hooks=[hook(SAVE, 1, FULL), hook(TRAIN_STEP, 1, "term")])
    assert done.code == REFUSED and "saved in" not in done.text()
    assert "there is none before it" in done.text() and names(folder) == []
    again = run_sft(folder)
    assert again.code == 0, again.text()
    assert_same_run(folder, undisturbed(1))


# ---------------------------------------------------------------------------------------------------------
# Folders that go away
# ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_goes_away_and_comes_back(run_sft, undisturbed, tmp_path):
    """As a network folder does: two saves fail, the third is made, no line of the metrics is lost."""
    folder, away, ranks = tmp_path / "output", tmp_path / "away", 2
    lost, found = (
        f"exec:import os; os.rename({str(a)!r}, {str(b)!r})" for a, b in ((folder, away), (away, folder))
    )
    done = run_sft(folder, ranks, [hook(SAVE, 2, lost, rank=0), hook(TRAIN_STEP, 4, found, rank=0)])
    assert done.codes == [0] * ranks, done.text()
    for step in (2, 3):
        assert_told(done.text(), folder, step)
    assert names(folder) == ["step-000001", "step-000004"]
    assert_same_run(folder, undisturbed(ranks))


def test_an_export_that_fails_leaves_the_earlier_one_and_is_made_later(run_sft, tmp_path):
    """A run that is made longer exports again; after code 3 the same command only exports."""
    folder, ranks = tmp_path / "output", 2
    assert run_sft(folder, ranks, max_train_steps=2).codes == [0] * ranks
    earlier = contents(folder / "export")
    done = run_sft(folder, ranks, [hook(EXPORT, 1, FULL, rank=0)])
    assert done.codes == [REFUSED] * ranks, done.text()
    assert f"error: {folder}/export could not be written" in done.text() and "Traceback" not in done.text()
    assert "what was there before is as it was" in done.text()
    assert contents(folder / "export") == earlier and not (folder / "finished.json").exists()
    metrics = read_metrics(folder)
    again = run_sft(folder, ranks, [hook(TRAIN_STEP, 1, "raise:nothing is left to learn")])
    assert again.codes == [0] * ranks, again.text()
    assert read_metrics(folder) == metrics
    now = contents(folder / "export")
    assert now.keys() == earlier.keys() and now["model.safetensors"] != earlier["model.safetensors"]
    assert json.loads((folder / "finished.json").read_text())["steps"] == STEPS
    assert not [path for path in folder.iterdir() if path.suffix in (".writing", ".deleting")]
