"""Files and folders are whole or not there, and what a crash leaves beside them is put right."""

import errno
import os
from pathlib import Path

import pytest

from common.runs.durable_files import (
    DELETING,
    WRITING,
    publish_folder,
    remove_folder,
    remove_leftovers,
    sync,
    write_file,
)


def make_folder(path: Path, text: str) -> Path:
    """A folder with a file, and with one in a folder below."""
    (path / "below").mkdir(parents=True)
    (path / "file").write_text(text)
    (path / "below" / "file").write_text(text)
    return path


def text_of(folder: Path) -> str:
    """What `make_folder` wrote; a mixture of two fails."""
    texts = {(folder / "file").read_text(), (folder / "below" / "file").read_text()}
    assert len(texts) == 1, texts
    return texts.pop()


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, str]]:
    """What was brought to the disk and what was renamed, in order."""
    made: list[tuple[str, str]] = []
    fsync = os.fsync

    def noted_fsync(descriptor: int) -> None:
        made.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def noted(name: str):
        plain = getattr(Path, name)

        def rename(self, target):
            made.append(("rename", f"{self.name} to {Path(target).name}"))
            return plain(self, target)

        return rename

    monkeypatch.setattr(os, "fsync", noted_fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(Path, name, noted(name))
    return made


def fail(*_):
    """As a broken disk."""
    raise OSError(errno.EIO, "Input/output error")


# ---- Files


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, calls):
    write_file(tmp_path / "a.json", "ä1")
    write_file(tmp_path / "a.json", "ä2")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "ä2"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    renamed = ("rename", "a.json.writing to a.json")
    assert calls == [("sync", "a.json.writing"), renamed, ("sync", tmp_path.name)] * 2


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_file_that_cannot_be_written_leaves_the_old_one_and_nothing_beside_it(
    tmp_path, monkeypatch, failing
):
    write_file(tmp_path / "a.json", "old")

    monkeypatch.setattr(*((os, "fsync") if failing == "fsync" else (Path, "replace")), fail)
    with pytest.raises(OSError, match="Input/output"):
        write_file(tmp_path / "a.json", "new")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.json": "old"}


def test_a_file_system_that_cannot_sync_a_folder_is_no_failure_but_a_broken_disk_is(tmp_path, monkeypatch):
    """CIFS and some others say EINVAL to fsync of a folder."""
    (tmp_path / "file").write_text("x")

    def fail_with(number: int):
        def fsync(_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fsync)

    fail_with(errno.EINVAL)
    sync(tmp_path)
    with pytest.raises(OSError, match="Invalid"):
        sync(tmp_path / "file")
    fail_with(errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        sync(tmp_path)


# ---- Folders


def test_a_folder_is_on_the_disk_before_it_has_its_name(tmp_path, calls):
    publish_folder(make_folder(tmp_path / "f.writing", "new"), tmp_path / "f")
    assert text_of(tmp_path / "f") == "new" and [p.name for p in tmp_path.iterdir()] == ["f"]
    names = [("sync", "below"), ("sync", "f.writing"), ("sync", "file"), ("sync", "file")]
    assert sorted(calls[:4]) == names
    assert calls[4:] == [("rename", "f.writing to f"), ("sync", tmp_path.name)]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_folder_takes_the_place_of_another_or_of_a_link_to_one(tmp_path, is_link):
    old = make_folder(tmp_path / ("elsewhere" if is_link else "f"), "old")
    (old / "only in the old one").touch()
    if is_link:
        (tmp_path / "f").symlink_to(old)
    make_folder(tmp_path / f"f{DELETING}", "left by a crash")
    publish_folder(make_folder(tmp_path / "f.writing", "new"), tmp_path / "f")
    assert text_of(tmp_path / "f") == "new" and not (tmp_path / "f").is_symlink()
    assert sorted(p.name for p in (tmp_path / "f").iterdir()) == ["below", "file"]
    assert sorted(p.name for p in tmp_path.iterdir()) == (["elsewhere", "f"] if is_link else ["f"])
    assert not is_link or text_of(old) == "old", "what it leads to is left alone"


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path, monkeypatch, failing):
    make_folder(tmp_path / "f", "old")
    plain = Path.rename

    def rename(self, target):
        return fail() if self.name == "f.writing" else plain(self, target)

    monkeypatch.setattr(*((os, "fsync", fail) if failing == "fsync" else (Path, "rename", rename)))
    with pytest.raises(OSError, match="Input/output"):
        publish_folder(make_folder(tmp_path / "f.writing", "new"), tmp_path / "f")
    assert text_of(tmp_path / "f") == "old"


def test_a_removed_folder_loses_its_name_before_its_files(tmp_path, monkeypatch, calls):
    make_folder(tmp_path / "f", "x")
    make_folder(tmp_path / f"f{DELETING}", "left by a crash")
    remove_folder(tmp_path / "f")
    assert not list(tmp_path.iterdir())
    assert calls == [("rename", "f to f.deleting"), ("sync", tmp_path.name)]


# ---- What a crash leaves


def test_what_is_unfinished_goes_and_everything_else_stays(tmp_path):
    make_folder(tmp_path / "whole", "x")
    make_folder(tmp_path / f"half{WRITING}", "x")
    make_folder(tmp_path / f"going{DELETING}", "x")
    (tmp_path / f"file.json{WRITING}").write_text("{")
    (tmp_path / f"link{WRITING}").symlink_to(tmp_path / "whole")
    (tmp_path / "writing").write_text("kept")
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["whole", "writing"]
    assert text_of(tmp_path / "whole") == "x"
    remove_leftovers(tmp_path / "not there")


def test_a_folder_between_two_renames_is_brought_back(tmp_path):
    make_folder(tmp_path / f"f{DELETING}", "old")
    make_folder(tmp_path / f"f{WRITING}", "new")
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["f"] and text_of(tmp_path / "f") == "old"
