"""Rows before their meaning: a sequence of dicts that knows where each came from."""

import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import PurePath
from typing import Any, BinaryIO, NamedTuple

from common.data.example import BadRow

MAX_DEPTH = 100  # of a row's lists and objects; Python's own readers and writers give up at some hundreds


class RawRows:
    """Rows by index, out of one place or several."""

    def __init__(self, rows: Sequence[Any], origin: str, fingerprint: str = "") -> None:
        """`rows` has a length and integer indexing; a `fingerprint` that changes when they do spares a digest
        of their content.
        """
        self._rows, self.origin, self._fingerprint = rows, origin, fingerprint

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`. Raises BadRow: what is there is no row."""
        row = self._rows[index]
        if not isinstance(row, dict):
            raise BadRow(f"the row is of type {type(row).__name__}, not an object with named columns")
        return row

    def origin_and_line(self, index: int) -> tuple[str, int]:
        """The file or data set that a row came from, and its line there, or its number from 1."""
        return self.origin, index + 1

    def location(self, index: int) -> str:
        """Where the row is, for a message: file:line."""
        origin, line = self.origin_and_line(index)
        return f"{origin}:{line}"

    def row_id(self, index: int) -> str:
        """A name for the row that does not depend on the folder it lies in."""
        origin, line = self.origin_and_line(index)
        return f"{PurePath(origin).name}:{line}"

    def update_digest(self, total: Any) -> None:
        """Feed every row into a hashlib object."""
        if self._fingerprint:
            total.update(self._fingerprint.encode())
            return
        for index in range(len(self)):
            try:
                total.update(canonical(self[index]))
            except BadRow as error:
                total.update(str(error).encode())


def canonical(row: Any) -> bytes:
    """Bytes that depend on a row's content and not on the order of its columns."""
    return json.dumps(row, sort_keys=True, default=repr).encode()


class Span(NamedTuple):
    """Where a row's bytes are in a file, and its line, or its number from 1."""

    start: int
    num_bytes: int
    line: int


class FileRows(RawRows):
    """Rows that stay in their file and are read one at a time, when asked for."""

    def __init__(
        self, file: BinaryIO, spans: Iterable[Span], parse: Callable[[bytes], Any], origin: str
    ) -> None:
        """`parse` makes a row of its bytes; it raises BadRow."""
        self._starts, self._sizes, self._lines = (array("q") for _ in Span._fields)
        for start, num_bytes, line in spans:
            self._starts.append(start)
            self._sizes.append(num_bytes)
            self._lines.append(line)
        super().__init__(self._starts, origin)
        self._file, self._parse = file, parse

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._file.seek(self._starts[index])
        return self._parse(self._file.read(self._sizes[index]))

    def origin_and_line(self, index: int) -> tuple[str, int]:
        return self.origin, self._lines[index]


def parse_json_row(data: bytes) -> dict[str, Any]:
    """Return the object that a line of JSON holds. Raises BadRow."""
    try:
        row = json.loads(data.decode())  # bytes would be taken for UTF-16 or 32 where they look like it
    except UnicodeDecodeError as error:
        raise BadRow(f"the line is not UTF-8 ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise BadRow(f"the line is not JSON ({error})") from error
    except RecursionError as error:
        raise BadRow("the line is not JSON (it is nested too deeply)") from error
    if not isinstance(row, dict):
        raise BadRow(f"the line is a JSON {type(row).__name__}, not an object with named columns")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and _is_too_deep(row):
        raise BadRow(f"the row is nested more than {MAX_DEPTH} deep")
    return row


def _is_too_deep(row: Any) -> bool:
    """Whether lists and objects are nested more than MAX_DEPTH deep: writing them would end in the stack."""
    level = [row]
    for _ in range(MAX_DEPTH):
        parts = [value.values() if isinstance(value, dict) else value for value in level]
        level = [inner for part in parts for inner in part if isinstance(inner, dict | list)]
    return bool(level)


class ParquetRows(RawRows):
    """Rows of a Parquet file, of which one row group is in memory at a time: rows are read in their order."""

    def __init__(self, file: Any, origin: str, max_rows: int | None = None) -> None:
        """`file` is a pyarrow.parquet.ParquetFile, of which the first `max_rows` are taken."""
        groups = range(file.metadata.num_row_groups)
        self._ends = list(accumulate(file.metadata.row_group(group).num_rows for group in groups))
        num_rows = file.metadata.num_rows
        super().__init__(range(num_rows if max_rows is None else min(num_rows, max_rows)), origin)
        self._file, self._group, self._table = file, -1, None

    def __getitem__(self, index: int) -> dict[str, Any]:
        """See RawRows. Raises ValueError where the file is damaged."""
        group = bisect_right(self._ends, index)
        if group != self._group:
            try:
                self._group, self._table = group, self._file.read_row_group(group)
            except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
                raise ValueError(
                    f"--data_path {self.origin}: the file cannot be read as .parquet: {error}"
                ) from error
        first = self._ends[group - 1] if group else 0
        return self._table.slice(index - first, 1).to_pylist()[0]


class JoinedRows(RawRows):
    """The rows of several files, one file after the other."""

    def __init__(self, parts: Sequence[RawRows]) -> None:
        """Keep the parts, in order."""
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))
        super().__init__(range(self._ends[-1]), ", ".join(part.origin for part in parts))

    def _find(self, index: int) -> tuple[RawRows, int]:
        which = bisect_right(self._ends, index)
        return self._parts[which], index - (self._ends[which] - len(self._parts[which]))

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, inner = self._find(index)
        return part[inner]

    def origin_and_line(self, index: int) -> tuple[str, int]:
        part, inner = self._find(index)
        return part.origin_and_line(inner)


class GroupedRows(RawRows):
    """Row i is made of the rows `groups[i]` of `base`; it stands where the first of them does."""

    def __init__(
        self,
        base: RawRows,
        groups: Sequence[Sequence[int]],
        build: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> None:
        """`build` makes one row of those of a group."""
        super().__init__(groups, base.origin)
        self._base, self._build = base, build

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._build([self._base[i] for i in self._rows[index]])

    def origin_and_line(self, index: int) -> tuple[str, int]:
        return self._base.origin_and_line(self._rows[index][0])

    def update_digest(self, total: Any) -> None:
        self._base.update_digest(total)


def readable(rows: RawRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield index and row of all rows that are rows."""
    for index in range(len(rows)):
        try:
            yield index, rows[index]
        except BadRow:
            continue


def group_by_key(num_rows: int, keys: dict[int, Hashable]) -> list[list[int]]:
    """Row indexes with equal keys together, in the order of the first of each; a row without a key alone."""
    groups: dict[Hashable, list[int]] = {}
    for index in range(num_rows):
        key = ("key", keys[index]) if index in keys else ("row", index)
        groups.setdefault(key, []).append(index)
    return list(groups.values())
