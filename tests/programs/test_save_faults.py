"""Disks that take no more.

A save that fails leaves the checkpoints before it, on all ranks alike, and the run goes on;
an export that fails leaves the one before it.
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_runs import ForkedRun
from program_runs import read_metrics
from test_resume import assert_same_run
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

    @functools.cache
    def make(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed") / "output"
        done = run_sft(folder, ranks)
        assert done.codes == [0] * ranks, done.text()
        return folder

    return make


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_that_the_run_goes_on_with(run_sft, undisturbed, tmp_path):
    """Two saves fail, on one rank: all learn of it, the first is as it was, and the next is made."""
    folder, ranks, rank = tmp_path / "output", 2, 1
    done = run_sft(folder, ranks, [hook(SAVE, 2, FULL, rank=rank), hook(TRAIN_STEP, 4, FREE, rank=rank)])
    assert done.codes == [0] * ranks, done.text()
    for step in (2, 3):
        told = rf"/step-00000{step} could not be written \(rank {rank} failed: .*File too large"
        assert re.search(f"warning: checkpoint {folder}/checkpoints{told}", done.text())
    assert done.text().count("; the last good one is step-000001; the run continues\n") == 2
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-000001", "step-000004"]
    assert find_checkpoints(folder)[0][1].damaged_file() is None
    assert_same_run(folder, undisturbed(ranks))


def test_a_stop_that_cannot_save_says_so(run_sft, undisturbed, tmp_path):
    """Asked to stop on a full disk, it must not claim that the state is saved."""
    folder = tmp_path / "output"
    done = run_sft(folder, hooks=[hook(SAVE, 1, FULL), hook(TRAIN_STEP, 1, "term")])
    assert done.code == REFUSED and "saved in" not in done.text()
    assert "there is none before it" in done.text() and not list((folder / "checkpoints").iterdir())
    again = run_sft(folder)
    assert again.code == 0, again.text()
    assert_same_run(folder, undisturbed(1))


def test_an_export_that_fails_leaves_the_earlier_one_and_is_made_later(run_sft, tmp_path):
    """A run that is made longer exports again; after code 3 the same command only exports."""
    folder, ranks = tmp_path / "output", 2
    assert run_sft(folder, ranks, max_train_steps=2).codes == [0] * ranks
    earlier = contents(folder / "export")
    done = run_sft(folder, ranks, [hook(EXPORT, 1, FULL, rank=0)])
    assert done.codes == [REFUSED] * ranks, done.text()
    assert f"error: {folder}/export could not be written" in done.text() and "Traceback" not in done.text()
    assert "its earlier content is unchanged" in done.text()
    assert contents(folder / "export") == earlier and not (folder / "finished.json").exists()
    metrics = read_metrics(folder)
    again = run_sft(folder, ranks, [hook(TRAIN_STEP, 1, "raise:nothing is left to learn")])
    assert again.codes == [0] * ranks, again.text()
    assert read_metrics(folder) == metrics
    now = contents(folder / "export")
    assert now.keys() == earlier.keys() and now["model.safetensors"] != earlier["model.safetensors"]
    assert json.loads((folder / "finished.json").read_text())["steps"] == STEPS
    assert not [path for path in folder.iterdir() if path.suffix in (".writing", ".deleting")]
