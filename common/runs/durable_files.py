"""Files and folders that are either complete or absent, whenever the machine stops. PURE.

Unfinished files end in `.writing`, folders that are being removed in `.deleting`.
"""

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WRITING, DELETING = ".writing", ".deleting"


class SaveFailed(OSError):
    """A checkpoint or an export could not be written; the previous one is unchanged. All ranks raise it."""


def without_nan(value: Any) -> Any:
    """A value for JSON: NaN and infinity become None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(part) for name, part in value.items()}
    return [without_nan(part) for part in value] if isinstance(value, list | tuple) else value


def json_line(row: Mapping[str, Any]) -> str:
    """A line of a .jsonl file, with null for NaN and infinity."""
    return json.dumps(without_nan(row), ensure_ascii=False, allow_nan=False) + "\n"


def sync(path: Path) -> None:
    """Sync a file, or a folder's list of names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder: they keep its names durable themselves.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)):
            raise
    finally:
        os.close(descriptor)


def read_object(path: Path, **kinds: type) -> dict[str, Any]:
    """The JSON object in a file; {} if the file does not exist.

    Raises ValueError, with the file's name, if it cannot be read, holds something else, or has a value of
    another type than `kinds` gives.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object, so this program did not write it")
    for name, kind in kinds.items():
        if not isinstance(content.get(name), kind | None):
            raise ValueError(f"{path} has {content[name]!r} under {name!r}, so this program did not write it")
    return content


def read_if_whole(path: Path, **kinds: type) -> dict[str, Any]:
    """As `read_object`, but {} instead of an error: for files that a crash may tear, or that nothing depends
    on.
    """
    try:
        return read_object(path, **kinds)
    except ValueError:
        return {}


def write_file(path: Path, text: str) -> None:
    """Write a text file atomically.

    Raises OSError, with the old file unchanged and no leftovers, if it cannot be written.
    """
    temporary = path.with_name(path.name + WRITING)
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        temporary.replace(path)
    except OSError:
        _remove(temporary)
        raise
    sync(path.parent)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Rename a finished folder to `folder`, which may exist; the old one is then removed.

    Its files get the permissions of the umask: safetensors writes them for their owner only. After a crash
    between the two renames `remove_leftovers` restores the old one. Raises OSError, with `folder` unchanged,
    if the new one cannot be synced or renamed.
    """
    for path in (*temporary.rglob("*"), temporary):
        if path.is_file():
            path.chmod(temporary.stat().st_mode & 0o666)
        sync(path)
    old = folder.with_name(folder.name + DELETING)
    _remove(old)
    if folder.exists():
        folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    sync(folder.parent)
    _remove(old)  # a failure only leaves a leftover


def remove_folder(folder: Path) -> None:
    """Remove a folder; it disappears under its name before its first file is deleted.

    Raises OSError, with the folder unchanged, if it cannot be renamed.
    """
    leaving = folder.with_name(folder.name + DELETING)
    _remove(leaving)
    folder.rename(leaving)
    sync(folder.parent)
    _remove(leaving)  # a file that is open elsewhere stays as a leftover


def remove_leftovers(parent: Path) -> None:
    """Remove unfinished files and folders of a crash, and restore a folder left between two renames."""
    left = [path for path in parent.glob("*") if path.suffix in (WRITING, DELETING)]
    for path in left:
        folder, beside = path.with_suffix(""), path.with_suffix(WRITING)
        if path.suffix == DELETING and beside in left and not folder.exists():
            path.rename(folder)
    for path in left:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link (not its target); what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=True)  # folders only
    with contextlib.suppress(OSError):
        path.unlink()
