"""Local files to rows: JSON, JSON lines, CSV, Parquet; a folder of train and eval files."""

import codecs
import csv
import gzip
import hashlib
import io
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from common.data.example import BadRow
from common.data.raw_rows import (
    FileRows,
    JoinedRows,
    ParquetRows,
    RawRows,
    Span,
    parse_json_item,
    parse_json_row,
)

csv.field_size_limit(2**31 - 1)  # a reply may be longer than the csv module's 128 KiB

EXTENSIONS = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".csv", ".parquet")
PIECE = 2**20  # bytes of a JSON list that are parsed at a time, more where an item is longer
BOM = codecs.BOM_UTF8
_BLANK = re.compile(r"[ \t\n\r]*")
_TRAIN_NAMES = ("train", "training")
_EVAL_NAMES = ("eval", "evaluation", "test", "valid", "validation", "dev")


def extension_of(path: Path) -> str | None:
    """The extension if it is one that can be read, else None."""
    name = path.name.lower()
    return next((ext for ext in sorted(EXTENSIONS, key=len, reverse=True) if name.endswith(ext)), None)


def find_parts(path: Path) -> tuple[list[Path], list[Path]]:
    """Training files and evaluation files of a file (no evaluation files then) or a folder.

    Raises:
        ValueError: there is no such file, its extension is unknown, or the folder has no training file.
    """
    if not path.exists():
        raise ValueError(f"--data_path {path}: there is no such file or folder")
    if path.is_file():
        if extension_of(path) is None:
            raise ValueError(
                f"--data_path {path}: the kind of file is unknown; its extension must be one of "
                f"{', '.join(EXTENSIONS)}"
            )
        return [path], []
    files = sorted(p for p in path.iterdir() if p.is_file() and extension_of(p))
    train, held_out = _named(files, _TRAIN_NAMES), _named(files, _EVAL_NAMES)
    if not train:
        found = ", ".join(p.name for p in sorted(path.iterdir())[:5]) or "nothing"
        raise ValueError(
            f"--data_path {path}: the folder has no train* file ({', '.join(EXTENSIONS)}) and was not saved "
            f"by datasets.save_to_disk; found {found}"
        )
    return train, held_out


def _named(files: Sequence[Path], names: Sequence[str]) -> list[Path]:
    """Files called train-00.jsonl, train.json, my-data-train.csv, ..."""
    return [p for p in files if set(re.split(r"[-_. ]|\d+", p.name.lower())) & set(names)]


def read_files(paths: Sequence[Path], max_rows: int | None = None) -> RawRows:
    """Rows of files of any kind, one file after the other: all of them, or the first of each file.

    They stay in their files and are read one at a time, Parquet's by row groups.

    Raises:
        ValueError: a file that cannot be read, or is empty, by name.
    """
    parts = [_read_file(path, max_rows) for path in paths]
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


def digest_files(paths: Sequence[Path], root: Path) -> str:
    """Digest of the names below `root` and the contents of files."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(root) if path != root else path.name} {digest}\n".encode())
    return total.hexdigest()


def _read_file(path: Path, max_rows: int | None) -> RawRows:
    extension = extension_of(path)
    try:
        if extension == ".parquet":
            rows: RawRows = _read_parquet(path, max_rows)
        else:
            file = _open(path, is_whole=max_rows is None)
            spans, parse = _csv_records(file, path) if extension == ".csv" else _json_values(file, path)
            rows = FileRows(file, islice(spans, max_rows), parse, str(path))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"--data_path {path}: the file cannot be read as {extension}: {error}") from error
    if len(rows) == 0:
        raise ValueError(f"--data_path {path}: the file is empty; it must hold at least one row")
    return rows


def _open(path: Path, *, is_whole: bool) -> BinaryIO:
    """The file, to be read at any place; a gzipped one that is read whole is unpacked to a temporary file."""
    if not path.name.lower().endswith(".gz"):
        return path.open("rb")
    packed: Any = gzip.open(path)  # noqa: SIM115  (it lives as long as its rows)
    if not is_whole:
        return packed
    file: Any = tempfile.TemporaryFile()  # noqa: SIM115
    with packed:
        shutil.copyfileobj(packed, file)
    return file


def _json_values(file: BinaryIO, path: Path) -> tuple[Iterator[Span], Callable[[bytes], Any]]:
    """Where the rows of JSON lines or of a JSON list are, and what reads one."""
    file.seek(0)
    start = len(BOM) if file.read(len(BOM)) == BOM else 0
    file.seek(start)
    while (character := file.read(1)).isspace():
        pass
    if character == b"[" and path.name.lower().endswith((".jsonl", ".jsonl.gz")):
        try:  # a list under another name, or lines, the first of which holds a list
            sum(1 for _ in _list_items(file, start, path))
        except ValueError:
            character = b""
    if character == b"[":
        return _list_items(file, start, path), parse_json_item
    return _lines(file, start), parse_json_row


def _lines(file: BinaryIO, start: int) -> Iterator[Span]:
    file.seek(start)
    for number, line in enumerate(file, 1):
        if line.strip():
            yield Span(start, len(line), number)
        start += len(line)


def _list_items(file: BinaryIO, start: int, path: Path) -> Iterator[Span]:
    """Where the items of a JSON list are; it is parsed a piece at a time."""
    file.seek(start)
    text = _JsonText(file, start)
    number = 0
    try:
        text.take("[")
        is_over = text.next_mark() == "]"
        while not is_over:
            number += 1
            yield Span(*text.take_value(), number)
            is_over = text.take(",]") == "]"
        text.take("" if number else "]")
    except ValueError as error:
        reason = getattr(error, "msg", error)
        raise ValueError(
            f"--data_path {path}: the file is not a JSON list (item {number}: {reason})"
        ) from error


class _JsonText:
    """What of a JSON file has been read and not been passed yet; `start` is its place, in bytes."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        self.file, self.start = file, start
        self._decode = codecs.getincrementaldecoder("utf-8")().decode
        self._parse = json.JSONDecoder().raw_decode
        self._text, self._at, self._is_end = "", 0, False

    def _fill(self, num_bytes: int) -> None:
        data = self.file.read(num_bytes)
        self._text, self._at = self._text[self._at :] + self._decode(data, not data), 0
        self._is_end = not data

    def next_mark(self) -> str:
        """The next character that is not blank; empty at the end."""
        while True:
            num_blank = _BLANK.match(self._text, self._at).end() - self._at  # type: ignore[union-attr]
            self._at, self.start = self._at + num_blank, self.start + num_blank
            if self._at < len(self._text) or self._is_end:
                return self._text[self._at : self._at + 1]
            self._fill(PIECE)

    def take(self, marks: str) -> str:
        """Pass the next character, one of `marks`, or the end where there are none. Raises ValueError."""
        mark = self.next_mark()
        if not mark and marks or mark not in marks:
            raise ValueError(f"{mark or 'the end'!r} in place of {' or '.join(marks) or 'the end'}")
        self._at, self.start = self._at + len(mark), self.start + len(mark)
        return mark

    def take_value(self) -> tuple[int, int]:
        """Pass a value; return its place and its bytes. Raises ValueError."""
        self.next_mark()
        size = PIECE
        while True:
            try:
                end = self._parse(self._text, self._at)[1]
            except RecursionError as error:
                raise ValueError("it is nested too deeply") from error
            except ValueError:
                if self._is_end:
                    raise
            else:
                if end < len(self._text) or self._is_end:  # a number could go on in the next piece
                    break
            self._fill(size)
            size *= 2
        start, num_bytes = self.start, len(self._text[self._at : end].encode())
        self._at, self.start = end, start + num_bytes
        return start, num_bytes


def _csv_records(file: BinaryIO, path: Path) -> tuple[Iterator[Span], Callable[[bytes], Any]]:
    """Where the rows of CSV are, each of a line or of several, and what reads one."""
    passed = len(BOM) if file.read(len(BOM)) == BOM else 0
    file.seek(passed)

    def lines() -> Iterator[str]:
        nonlocal passed
        for line in file:
            passed += len(line)
            yield line.decode()

    reader = csv.reader(lines(), strict=True)

    def next_fields() -> list[str] | None:
        try:
            return next(reader, None)
        except csv.Error as error:
            raise ValueError(f"--data_path {path}:{reader.line_num}: the file is not CSV: {error}") from error

    header = next_fields() or []

    def records() -> Iterator[Span]:
        while True:
            start, line = passed, reader.line_num + 1
            fields = next_fields()
            if fields is None:
                return
            if fields:
                yield Span(start, passed - start, line)

    def parse(data: bytes) -> dict[str, str]:
        fields = next(csv.reader(io.StringIO(data.decode(), newline=""), strict=True))
        if len(fields) != len(header):
            raise BadRow(f"the line has {len(fields)} fields, the header {len(header)}")
        return dict(zip(header, fields, strict=True))

    return records(), parse


def _read_parquet(path: Path, max_rows: int | None) -> RawRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path, memory_map=True)
        if max_rows is None:
            return ParquetRows(file, str(path))
        first = next(file.iter_batches(batch_size=max_rows), None)
        return RawRows(first.to_pylist() if first else [], str(path))
    except pa.ArrowInvalid as error:
        raise OSError(str(error)) from error
