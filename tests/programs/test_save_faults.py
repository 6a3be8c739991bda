"""Disks that take no more, folders that go away.

A save that fails leaves the checkpoints before it, on all ranks alike, and the run goes on;
an export that fails leaves the one before it.
"""

import json
import re
from pathlib import Path

import pytest
from program_runs import read_metrics
from short_sft import SAVE, STEPS, TRAIN_STEP, ShortSFT, hook
from test_resume import assert_same_run, without_times

from common.runs.checkpoints import find_checkpoints

pytestmark = pytest.mark.slow

REFUSED = 3
EXPORT = "common.runs.export:_replace"
LIMIT = "exec:import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({}, r.getrlimit(r.RLIMIT_FSIZE)[1]))"
# No file grows beyond so many bytes: enough for metrics, too little for a model.
FULL, FREE = LIMIT.format(30_000), LIMIT.format("r.RLIM_INFINITY")


@pytest.fixture(scope="module")
def sft(forks, tiny, tmp_path_factory) -> ShortSFT:
    return ShortSFT(forks, tiny, tmp_path_factory.mktemp("sft"))


def names(folder: Path) -> list[str]:
    """Return the checkpoints of a run, and whatever lies beside them."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_only_good(folder: Path, name: str) -> None:
    """Fail unless a run's one checkpoint is whole, byte for byte."""
    assert names(folder) == [name]
    (found,), doubts = find_checkpoints(folder)
    assert not doubts and found.damaged_file() is None


def assert_same_metrics(folder: Path, whole: Path) -> None:
    """Fail unless every step's numbers are there, once."""
    assert without_times(read_metrics(folder)) == without_times(read_metrics(whole))


def assert_told(text: str, folder: Path, step: int, rank: int = 0) -> None:
    """Fail unless it was said which save failed, where, and what is left."""
    pattern = (
        rf"checkpoint {folder}/checkpoints/step-00000{step} could not be written \(rank {rank}: .+\); the "
        r"last good one is step-000001"
    )
    assert re.search(pattern, text), text


# ---------------------------------------------------------------------------------------------------------
# Full disks
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 1)])
def test_a_full_disk_that_the_run_goes_on_with(sft, tmp_path, ranks, rank):
    """Every save but the first fails, on one rank: all is learned and told, and the first is as it was."""
    folder = tmp_path / "output"
    hooks = [hook(SAVE, 2, FULL, rank=rank), hook(EXPORT, 1, FREE, rank=rank)]
    done = sft.run(folder, ranks, hooks)
    assert done.codes == [0] * ranks, done.text()
    for step in range(2, STEPS + 1):
        assert_told(done.text(), folder, step, rank)
    assert done.text().count("; the run continues\n") == STEPS - 1 and "File too large" in done.text()
    assert_only_good(folder, "step-000001")
    assert_same_metrics(folder, sft.undisturbed(ranks))
    assert contents(folder / "export") == contents(sft.undisturbed(ranks) / "export")


def test_a_stop_that_cannot_save_says_so(sft, tmp_path):
    """Asked to stop on a full disk, it must not claim that the state is saved."""
    folder = tmp_path / "output"
    done = sft.run(folder, hooks=[hook(SAVE, 1, FULL), hook(TRAIN_STEP, 1, "term")])
    assert done.code == REFUSED and "saved in" not in done.text()
    assert "there is none before it" in done.text() and names(folder) == []
    again = sft.run(folder)
    assert again.code == 0, again.text()
    assert_same_run(folder, sft.undisturbed())


# ---------------------------------------------------------------------------------------------------------
# Folders that go away
# ---------------------------------------------------------------------------------------------------------

LOST = ["the folder", "a file in the place of its checkpoints"]


def lose(folder: Path, what: str) -> tuple[str, str]:
    """Return what hooks do to let a run's folder (of checkpoints) go away, and come back."""
    place = folder if what == "the folder" else folder / "checkpoints"
    away = place.with_name("away")
    lost = f"exec:import os; os.rename({str(place)!r}, {str(away)!r})"
    found = f"exec:import os; os.rename({str(away)!r}, {str(place)!r})"
    if place != folder:
        lost += f"; open({str(place)!r}, 'w').close()"
        found = found.replace("os;", f"os; os.unlink({str(place)!r});")
    return lost, found


@pytest.mark.parametrize(("what", "ranks"), [(LOST[0], 2), (LOST[1], 1)])
def test_a_folder_that_goes_away_and_comes_back(sft, tmp_path, what, ranks):
    """As a network folder does: two saves fail, the third is made, no line of the metrics is lost."""
    folder = tmp_path / "output"
    lost, found = lose(folder, what)
    done = sft.run(folder, ranks, [hook(SAVE, 2, lost, rank=0), hook(TRAIN_STEP, 4, found, rank=0)])
    assert done.codes == [0] * ranks, done.text()
    for step in (2, 3):
        assert_told(done.text(), folder, step)
    assert names(folder) == ["step-000001", "step-000004"]
    assert_same_run(folder, sft.undisturbed(ranks))


# ---------------------------------------------------------------------------------------------------------
# Exports
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_export_that_fails_leaves_the_earlier_one_and_is_made_later(sft, tmp_path, ranks):
    """A run that is made longer exports again; after code 3 the same command only exports."""
    folder = tmp_path / "output"
    assert sft.run(folder, ranks, max_train_steps=2).codes == [0] * ranks
    earlier = contents(folder / "export")
    done = sft.run(folder, ranks, [hook(EXPORT, 1, FULL, rank=0)])
    assert done.codes == [REFUSED] * ranks, done.text()
    assert f"error: {folder}/export could not be written" in done.text() and "Traceback" not in done.text()
    assert "what was there before is as it was" in done.text()
    assert contents(folder / "export") == earlier and not (folder / "finished.json").exists()
    metrics = read_metrics(folder)
    again = sft.run(folder, ranks, [hook(TRAIN_STEP, 1, "raise:nothing is left to learn")])
    assert again.codes == [0] * ranks, again.text()
    assert read_metrics(folder) == metrics
    now = contents(folder / "export")
    assert now.keys() == earlier.keys() and now["model.safetensors"] != earlier["model.safetensors"]
    assert json.loads((folder / "finished.json").read_text())["steps"] == STEPS
    assert not [path for path in folder.iterdir() if path.suffix in (".writing", ".deleting")]
