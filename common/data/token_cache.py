"""Token rows on disk, memory-mapped: written once per cache key, which covers everything that affects the
rows; and the report on the raw rows.

The files are Arrow streams, so rows are written as they come and no process ever holds all of them.
"""

import dataclasses
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from common.data.example import BadRow, EmptyRow
from common.data.raw_rows import RawRows
from common.ranks.distributed import make_on_first_rank
from common.ranks.passes import watched

FORMAT_VERSION = 5  # increase it when the same key would give different rows
REPORT_NAME = "report.json"
NUM_NAMED = 5  # bad rows listed in a message

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
    """Rows of an Arrow stream as dicts of plain Python lists and values, read on access."""

    def __init__(self, path: Path, *, shuffle_seed: int | None = None) -> None:
        """`shuffle_seed` sets an order other than the file's, so that the first rows are representative.

        Raises ValueError for a damaged file.
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
        return len(self._order)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`: lists of int ids, lists of bool masks, numbers, text."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        row = int(self._order[index])
        return {name: _value(column[row]) for name, column in self._columns.items()}

    def numbers(self, column: str) -> np.ndarray:
        """Every row's number in `column`, (rows,)."""
        return self._columns[column].to_numpy()[self._order]

    def lengths(self, column: str) -> np.ndarray:
        """Length of every row's list in `column`, (rows,) int64, without reading the tokens."""
        return pc.list_value_length(self._columns[column]).to_numpy().astype(np.int64)[self._order]


def _value(scalar: pa.Scalar) -> Any:
    """The Python value; a list is converted by numpy, which is faster than item by item."""
    if not isinstance(scalar, pa.ListScalar):
        return scalar.as_py()
    return scalar.values.to_numpy(zero_copy_only=False).tolist()


def build_once(folder: Path, write: Callable[[Path], "DataReport"]) -> bool:
    """Fill `folder` with `write(temporary folder)` and its report, unless it exists; True if filled now.

    The folder appears complete or not at all; of two concurrent builds one wins and the other uses its
    result. Raises ValueError if it cannot be written.
    """
    if (folder / REPORT_NAME).is_file():
        return False
    temporary = folder.parent / f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        temporary.mkdir(parents=True)
        report = dataclasses.asdict(write(temporary))
        (temporary / REPORT_NAME).write_text(json.dumps(report, indent=1))
        os.rename(temporary, folder)
        return True
    except OSError as error:
        if (folder / REPORT_NAME).is_file():  # a concurrent build finished first
            return False
        raise ValueError(
            f"--data_output_path {folder.parent}: the token cache cannot be written there ({error}); "
            "make room, or name another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def build_cached(
    cache: Path,
    kind: str,
    plan: Callable[[], tuple[dict[str, Any], Callable[[Path], "DataReport"]]],
    max_bad_rows: int,
) -> tuple[Path, "DataReport"]:
    """Folder of a token cache, and its report: rank 0 writes it, unless it exists, and the others wait.

    `plan()` returns everything that determines the tokens, and a function that writes them into a folder.
    Every rank must call this. Raises ValueError as `build_once` does, or for too many bad rows, also if a
    more tolerant run wrote the cache.
    """
    was_built: list[bool] = []

    def make() -> Path:
        parts, write = plan()
        text = json.dumps({"format": FORMAT_VERSION, "kind": kind, **parts}, sort_keys=True)
        folder = cache / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        was_built.append(build_once(folder, write))
        return folder

    folder = make_on_first_rank(make)
    try:
        report = DataReport(**json.loads((folder / REPORT_NAME).read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{folder / REPORT_NAME} is not a report of this program ({error}); delete its folder"
        ) from error
    report.cache_folder = str(folder)
    report.from_cache = not any(was_built)
    report.check_bad_rows(max_bad_rows)
    return folder, report


def _count(words: str) -> int:
    """A count of the report, with its text in the log."""
    return field(default=0, metadata={"words": words})


@dataclass
class DataReport:
    """Counts over all sources of one step."""

    kind: str = ""
    num_raw_rows: int = 0
    num_train: int = 0
    num_eval: int = 0
    num_truncated: int = _count("rows truncated to the length limit")
    num_bad: int = _count("rows skipped: bad form")
    num_empty: int = _count("rows skipped: empty")
    num_identical: int = _count("pairs skipped: both answers are the same")
    num_identical_truncated: int = _count("pairs skipped: both answers are the same after truncation")
    num_ties: int = _count("pairs skipped: neither answer was preferred")
    num_good_answers: int = _count("answers are good, by their label or their pairs")
    num_bad_answers: int = _count("answers are bad, by their label or their pairs")
    num_dropped_pairs: int = _count("pairs exceed --max_pairs_per_prompt: each epoch samples from all pairs")
    num_straddling: int = _count(
        "rows with a token that spans the end of the prompt and the response's start"
    )
    num_split: int = _count("conversations split into a row per reply: the template rewrites earlier turns")
    num_tokens: int = 0
    source_rows: list[int] = field(default_factory=list)  # training rows of each source
    bad_rows: list[str] = field(default_factory=list)  # "file:line: reason", the first few
    notes: list[str] = field(default_factory=list)  # notes of adapters on how the rows were read
    cache_folder: str = ""
    from_cache: bool = False

    def add_bad(self, location: str, reason: str) -> None:
        """Count a row of bad form; describe it if it is among the first."""
        self.num_bad += 1
        if len(self.bad_rows) < NUM_NAMED:
            self.bad_rows.append(f"{location}: {reason}")

    def check_bad_rows(self, max_bad_rows: int) -> None:
        """Raise ValueError if more rows are bad than allowed, with the first few by file, line and reason."""
        if self.num_bad > max_bad_rows:
            named = "".join(f"\n    {row}" for row in self.bad_rows)
            raise ValueError(
                f"more than --max_bad_rows {max_bad_rows} of the rows are bad; fix them or raise the "
                f"limit. The first:{named}"
            )

    def read(
        self, rows: RawRows, indexes: Sequence[int], use: Callable[[dict], Any], max_bad_rows: int
    ) -> Iterator[tuple[int, Any]]:
        """Index and `use(row)` of each usable row; the others are counted, and bad ones described.

        Raises ValueError: see `check_bad_rows`.
        """
        for index in watched(indexes, len(indexes), "rows"):
            self.num_raw_rows += 1
            try:
                result = use(rows[index])
            except EmptyRow:
                self.num_empty += 1
            except BadRow as error:
                self.add_bad(rows.location(index), str(error))
                self.check_bad_rows(max_bad_rows)
            else:
                yield index, result

    def lines(self) -> list[str]:
        """The report for the log: one line, and one for every kind of truncated or skipped rows."""
        origin = f"token cache {self.cache_folder} ({'reused' if self.from_cache else 'new'})"
        summary = (
            f"{self.kind} data: {self.num_train} train and {self.num_eval} eval rows of {self.num_raw_rows} "
            f"raw rows, {self.num_tokens} tokens, {origin}"
        )
        counts = [(getattr(self, f.name), f.metadata.get("words")) for f in dataclasses.fields(self)]
        lines = [f"{count} {words}" for count, words in counts if words and count]
        lines += [f"bad row {row}" for row in self.bad_rows]
        return [summary, *(f"{self.kind} data: {line}" for line in (*lines, *self.notes))]

    def facts(self) -> dict[str, int]:
        """The counts by name, for a run's description."""
        return {name: value for name, value in vars(self).items() if name.startswith("num_")}
