"""Token rows on disk: written once, under a key that changes with all that decides them, read by memory map.

The files are Arrow streams, so rows are written as they come and no process ever holds them all.
"""

import hashlib
import json
import os
import shutil
import uuid
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset

FORMAT_VERSION = 2  # raise it when the same key would mean other tokens
REPORT_NAME = "report.json"

# What a column may hold. A mask is stored as bytes: bits cannot be read without a copy.
COLUMN_TYPES = {
    "ids": pa.list_(pa.int32()),
    "mask": pa.list_(pa.uint8()),
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
}


class TokenWriter:
    """Appends rows to an Arrow stream; use it in a `with`."""

    def __init__(self, path: Path, columns: dict[str, str]) -> None:
        """`columns` maps a name to a key of COLUMN_TYPES."""
        self._columns = columns
        self._schema = pa.schema([(name, COLUMN_TYPES[kind]) for name, kind in columns.items()])
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        self.num_rows = 0

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows as one chunk."""
        if not rows:
            return
        arrays = [self._array(name, kind, rows) for name, kind in self._columns.items()]
        self._stream.write_batch(pa.record_batch(arrays, schema=self._schema))
        self.num_rows += len(rows)

    @staticmethod
    def _array(name: str, kind: str, rows: Sequence[dict[str, Any]]) -> pa.Array:
        if kind not in ("ids", "mask"):
            return pa.array([row[name] for row in rows], COLUMN_TYPES[kind])
        item_type = np.int32 if kind == "ids" else np.uint8
        ends = np.cumsum([0] + [len(row[name]) for row in rows], dtype=np.int64)
        flat = [item for row in rows for item in row[name]]
        return pa.ListArray.from_arrays(
            pa.array(ends.astype(np.int32)), pa.array(np.asarray(flat, dtype=item_type))
        )

    def __enter__(self) -> Self:
        """Nothing to prepare."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the stream."""
        self._stream.close()
        self._file.close()


class TokenTable(Dataset):
    """Rows of an Arrow stream as dicts of plain Python lists and values, read when they are asked for."""

    def __init__(self, path: Path, *, shuffle_seed: int | None = None) -> None:
        """`shuffle_seed` fixes another order than that of the file, so that the first rows stand for all.

        Raises:
            ValueError: the file is damaged.
        """
        self._path, self._shuffle_seed = path, shuffle_seed
        try:
            table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(
                f"the token cache {path.parent} is damaged ({error}); delete that folder"
            ) from error
        self.columns: list[str] = table.column_names
        batches = [batch for batch in table.to_batches() if batch.num_rows]
        self._ends = list(accumulate(batch.num_rows for batch in batches))
        self._chunks = [[_chunk_reader(column) for column in batch.columns] for batch in batches]
        num_rows = self._ends[-1] if self._ends else 0
        self._order = (
            None
            if shuffle_seed is None
            else np.random.RandomState(shuffle_seed % 2**32).permutation(num_rows)
        )

    def __len__(self) -> int:
        """Number of rows."""
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`: lists of int ids, lists of bool masks, numbers, text."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = index if self._order is None else int(self._order[index])
        chunk = bisect_right(self._ends, row)
        inner = row - (self._ends[chunk - 1] if chunk else 0)
        return {name: read(inner) for name, read in zip(self.columns, self._chunks[chunk], strict=True)}

    def lengths(self, column: str) -> np.ndarray:
        """Length of every row's list in `column`, (rows,) int64, without reading the tokens."""
        at = self.columns.index(column)
        parts = [np.diff(chunk[at].offsets) for chunk in self._chunks]
        lengths = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
        return lengths if self._order is None else lengths[self._order]

    def __reduce__(self) -> tuple:
        """Another process opens the file itself."""
        return _open_table, (self._path, self._shuffle_seed)


def _open_table(path: Path, shuffle_seed: int | None) -> TokenTable:
    return TokenTable(path, shuffle_seed=shuffle_seed)


class _ListReader:
    """One list column of one chunk, as views of the file."""

    def __init__(self, array: pa.ListArray) -> None:
        self.offsets: np.ndarray = array.offsets.to_numpy()
        values = array.values.to_numpy(zero_copy_only=True)
        self._values = values.view(bool) if values.dtype == np.uint8 else values

    def __call__(self, row: int) -> list:
        return self._values[self.offsets[row] : self.offsets[row + 1]].tolist()


def _chunk_reader(array: pa.Array) -> Callable[[int], Any]:
    return _ListReader(array) if pa.types.is_list(array.type) else lambda row: array[row].as_py()


def cache_key(**parts: Any) -> str:
    """A folder name that changes with any of the parts."""
    text = json.dumps({"format": FORMAT_VERSION, **parts}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def build_once(folder: Path, write: Callable[[Path], None]) -> bool:
    """Fill `folder` by `write(temporary folder)` unless it is there; True when this call filled it.

    The folder appears complete or not at all; of two that build at once, one wins and the other uses its
    work.

    Raises:
        ValueError: the place cannot be written.
    """
    if (folder / REPORT_NAME).is_file():
        return False
    temporary = folder.parent / f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        try:
            temporary.mkdir(parents=True)
            write(temporary)
        except OSError as error:
            raise ValueError(
                f"--data_output_path {folder.parent}: the token cache cannot be written there ({error}); "
                "make room, or name another folder"
            ) from error
        try:
            os.rename(temporary, folder)
        except OSError:
            if not (folder / REPORT_NAME).is_file():
                raise
            return False
        return True
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
