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
    """Rows by index; `lines[i]` is the line (or else the number, from 1) of row i in `origin`."""

    def __init__(self, rows: Sequence[Any], origin: str, lines: Sequence[int] | None = None) -> None:
        """`rows` may be anything with a length and integer indexing."""
        self._rows, self.origin, self._lines = rows, origin, lines

    @classmethod
    def of(cls, rows: "RawRows | Sequence[Any]", origin: str = "rows") -> "RawRows":
        """`rows` itself, or wrapped when it is a plain sequence."""
        return rows if isinstance(rows, RawRows) else cls(rows, origin)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`.

        Raises:
            BadRow: what is there is no row.
        """
        row = self._rows[index]
        if isinstance(row, BadRow):  # the reader of the file already saw what is wrong
            raise row
        if not isinstance(row, dict):
            raise BadRow(f"the row is of type {type(row).__name__}, not an object with named columns")
        return row

    def line(self, index: int) -> int:
        """Line of a row in its file, or its number from 1."""
        return self._lines[index] if self._lines is not None else index + 1

    def location(self, index: int) -> str:
        """Where the row is, for a message: file:line."""
        return f"{self.origin}:{self.line(index)}"

    def row_id(self, index: int) -> str:
        """A name for the row that does not depend on the folder it lies in."""
        return f"{PurePath(self.origin).name}:{self.line(index)}"

    def update_digest(self, total: Any) -> None:
        """Feed every row into a hashlib object."""
        for index in range(len(self)):
            try:
                total.update(canonical(self[index]))
            except BadRow as error:
                total.update(str(error).encode())


def parse_json(data: bytes) -> Any:
    """Return a JSON value; ValueError where it is none in UTF-8, or nested more deeply than can be read."""
    try:
        return json.loads(data.decode())  # bytes would be taken for UTF-16 or 32 where they look like it
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than MAX_DEPTH deep: writing them would end in the stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True


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
        self._starts, self._sizes, self._numbers = (array("q") for _ in Span._fields)
        for start, num_bytes, line in spans:
            self._starts.append(start)
            self._sizes.append(num_bytes)
            self._numbers.append(line)
        super().__init__(self._starts, origin, self._numbers)
        self._file, self._parse = file, parse

    def __getitem__(self, index: int) -> dict[str, Any]:
        """See RawRows."""
        self._file.seek(self._starts[index])
        return self._parse(self._file.read(self._sizes[index]))


def parse_json_row(data: bytes) -> dict[str, Any]:
    """Return the object that a line of JSON holds. Raises BadRow."""
    try:
        row = parse_json(data)
    except UnicodeDecodeError as error:
        raise BadRow(f"the line is not UTF-8 ({error.reason} at byte {error.start})") from error
    except ValueError as error:
        raise BadRow(f"the line is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise BadRow(f"the line is a JSON {type(row).__name__}, not an object")
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH and is_too_deep(row):
        raise BadRow(f"the row is nested more than {MAX_DEPTH} deep")
    return row


def parse_json_item(data: bytes) -> Any:
    """Return an item of a JSON list. Raises BadRow."""
    item = parse_json(data)
    if is_too_deep(item):
        raise BadRow(f"the row is nested more than {MAX_DEPTH} deep")
    if not isinstance(item, dict):
        raise BadRow(f"the row is of type {type(item).__name__}, not an object with named columns")
    return item


class ParquetRows(RawRows):
    """Rows of a Parquet file, of which one row group is in memory at a time: rows are read in their order."""

    def __init__(self, file: Any, origin: str) -> None:
        """`file` is a pyarrow.parquet.ParquetFile."""
        groups = range(file.metadata.num_row_groups)
        self._ends = list(accumulate(file.metadata.row_group(group).num_rows for group in groups))
        super().__init__(range(self._ends[-1] if groups else 0), origin)
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
        super().__init__((), ", ".join(part.origin for part in parts))
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        """Number of rows of all parts."""
        return self._ends[-1]

    def _find(self, index: int) -> tuple[RawRows, int]:
        which = bisect_right(self._ends, index)
        return self._parts[which], index - (self._ends[which] - len(self._parts[which]))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """See RawRows."""
        part, inner = self._find(index)
        return part[inner]

    def location(self, index: int) -> str:
        """See RawRows."""
        part, inner = self._find(index)
        return part.location(inner)

    def row_id(self, index: int) -> str:
        """See RawRows."""
        part, inner = self._find(index)
        return part.row_id(inner)


class FrozenRows(RawRows):
    """Rows whose digest is known without reading them: a hub data set has a fingerprint."""

    def __init__(self, rows: Sequence[Any], origin: str, fingerprint: str) -> None:
        """`fingerprint` changes when the rows change."""
        super().__init__(rows, origin)
        self._fingerprint = fingerprint

    def update_digest(self, total: Any) -> None:
        """See RawRows."""
        total.update(self._fingerprint.encode())


def canonical(row: Any) -> bytes:
    """Bytes that depend on a row's content and not on the order of its columns."""
    return json.dumps(row, sort_keys=True, default=repr).encode()


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
        """See RawRows."""
        return self._build([self._base[i] for i in self._rows[index]])

    def line(self, index: int) -> int:
        """See RawRows."""
        return self._base.line(self._rows[index][0])

    def location(self, index: int) -> str:
        """See RawRows."""
        return self._base.location(self._rows[index][0])

    def row_id(self, index: int) -> str:
        """See RawRows."""
        return self._base.row_id(self._rows[index][0])

    def update_digest(self, total: Any) -> None:
        """See RawRows."""
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
