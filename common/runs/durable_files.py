"""Files and folders that are whole or not there, at whatever moment the machine stops. PURE.

What is not finished yet ends in `.writing`, what is on its way out in `.deleting`.
"""

import contextlib
import ctypes
import errno
import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WRITING, DELETING = ".writing", ".deleting"
_AT_CWD, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of <linux/fs.h>
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def without_nan(value: Any) -> Any:
    """Return a value for JSON, which has no word for NaN and infinity: they become None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: without_nan(part) for name, part in value.items()}
    return [without_nan(part) for part in value] if isinstance(value, list | tuple) else value


def json_line(row: Mapping[str, Any]) -> str:
    """Return a line of a .jsonl, with null for NaN and infinity."""
    return json.dumps(without_nan(row), ensure_ascii=False, allow_nan=False) + "\n"


def sync(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems take no order for a folder: they keep its names on their own.
        if not (path.is_dir() and error.errno in _NOT_SUPPORTED):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Bring everything under a folder to the disk."""
    for path in (*folder.rglob("*"), folder):
        sync(path)


def write_file(path: Path, text: str) -> None:
    """Write a text file; a reader finds the old one or the new one, never a part.

    Raises OSError, with the old one as it was and nothing beside it, when it cannot be written.
    """
    temporary = path.with_name(path.name + WRITING)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def digest(path: Path) -> str:
    """Return the file's SHA-256 in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_folder(temporary: Path, folder: Path) -> None:
    """Put a finished folder in the place of `folder`, which may exist; the old one is then removed.

    Its files get the rights that umask left the folder: safetensors writes them for their owner alone.
    On Linux the two change places in one system call; where a file system cannot do that, two renames leave a
    moment in which only `folder.deleting` and `temporary` exist, and `remove_leftovers` mends it. Raises
    OSError, with `folder` as it was, when the new one cannot be brought to the disk or to its place.
    """
    for path in temporary.rglob("*"):
        if path.is_file():
            path.chmod(temporary.stat().st_mode & 0o666)
    sync_tree(temporary)
    old = folder.with_name(folder.name + DELETING)
    if not folder.exists():
        temporary.rename(folder)
    elif _exchange(temporary, folder):
        old = temporary
    else:
        _replace_in_two_steps(temporary, folder, old)
    sync(folder.parent)
    # From here on it is published: what cannot be removed now is a leftover, and no failure.
    _remove(old, ignore_errors=True)


def _replace_in_two_steps(temporary: Path, folder: Path, old: Path) -> None:
    _remove(old, ignore_errors=True)
    folder.rename(old)
    try:
        temporary.rename(folder)
    except OSError:
        old.rename(folder)
        raise


def remove_folder(folder: Path) -> None:
    """Remove a folder: it is gone under its name before the first file of it is.

    Raises OSError, with the folder as it was, when it cannot be renamed.
    """
    leaving = folder.with_name(folder.name + DELETING)
    _remove(leaving, ignore_errors=True)
    folder.rename(leaving)
    sync(folder.parent)
    _remove(leaving, ignore_errors=True)  # a file that is still open elsewhere stays a leftover


def remove_leftovers(parent: Path) -> None:
    """Remove what a crash left unfinished directly under a folder; bring back what it left between two
    renames.
    """
    if not parent.is_dir():
        return
    for path in sorted(parent.glob(f"*{WRITING}")):
        _restore_folder(path.with_name(path.name.removesuffix(WRITING)))
    for path in list(parent.iterdir()):
        if path.suffix in (WRITING, DELETING):
            _remove(path)


def _remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder, a file or a link (not what it leads to); nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors)
        return
    with contextlib.suppress(OSError if ignore_errors else FileNotFoundError):
        path.unlink()


def _restore_folder(folder: Path) -> None:
    old = folder.with_name(folder.name + DELETING)
    if not folder.exists() and old.is_dir() and folder.with_name(folder.name + WRITING).is_dir():
        old.rename(folder)


def _exchange(first: Path, second: Path) -> bool:
    """Let two paths change places in one step; False where system or file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_CWD, os.fsencode(first), _AT_CWD, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(first))
