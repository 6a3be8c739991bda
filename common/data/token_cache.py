"""Token rows on disk: written once, under a key that changes with all that decides them, read by memory map.

The files are Arrow streams, so rows are written as they come and no process ever holds them all.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

FORMAT_VERSION = 3  # raise it when the same key would mean other tokens
REPORT_NAME = "report.json"

COLUMN_TYPES = {
    "ids": pa.list_(pa.int32()),
    "mask": pa.list_(pa.bool_()),
    "int": pa.int64(),
    "float": pa.float64(),
    "text": pa.string(),
}


class TokenWriter:
    """Appends rows to an Arrow stream until it is closed."""

    def __init__(self, path: Path, columns: dict[str, str]) -> None:
        """`columns` maps a name to a key of COLUMN_TYPES."""
        self._schema = pa.schema([(name, COLUMN_TYPES[kind]) for name, kind in columns.items()])
        self._file = pa.OSFile(str(path), "wb")
        self._stream = pa.ipc.new_stream(self._file, self._schema)
        self.num_rows = 0

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write rows as one chunk."""
        if rows:
            self._stream.write_batch(pa.RecordBatch.from_pylist(list(rows), schema=self._schema))
            self.num_rows += len(rows)

    def close(self) -> None:
        """End the stream."""
        self._stream.close()
        self._file.close()


class TokenTable:
    """Rows of an Arrow stream as dicts of plain Python lists and values, read when they are asked for."""

    def __init__(self, path: Path, *, shuffle_seed: int | None = None) -> None:
        """`shuffle_seed` fixes another order than that of the file, so that the first rows stand for all.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        except (OSError, pa.ArrowInvalid) as error:
            raise ValueError(
                f"the token cache {path.parent} is damaged ({error}); delete that folder"
            ) from error
        self._columns = dict(zip(table.column_names, table.columns, strict=True))
        self._order = np.arange(table.num_rows)
        if shuffle_seed is not None:
            self._order = np.random.RandomState(shuffle_seed % 2**32).permutation(table.num_rows)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`: lists of int ids, lists of bool masks, numbers, text."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = int(self._order[index])
        return {name: _value(column[row]) for name, column in self._columns.items()}

    def lengths(self, column: str) -> np.ndarray:
        """Length of every row's list in `column`, (rows,) int64, without reading the tokens."""
        return pc.list_value_length(self._columns[column]).to_numpy().astype(np.int64)[self._order]


def _value(scalar: pa.Scalar) -> Any:
    """The Python value; a list by way of numpy, which is faster than item by item."""
    if not isinstance(scalar, pa.ListScalar):
        return scalar.as_py()
    return scalar.values.to_numpy(zero_copy_only=False).tolist()


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
