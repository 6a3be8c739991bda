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

import pyarrow as pa
import pyarrow.parquet as pq

from common.data.example import BadRow
from common.data.raw_rows import FileRows, JoinedRows, ParquetRows, RawRows, Span, parse_json_row

csv.field_size_limit(2**31 - 1)  # a reply may be longer than the csv module's 128 KiB

EXTENSIONS = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".csv", ".parquet")
BOM = codecs.BOM_UTF8
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
            rows: RawRows = ParquetRows(pq.ParquetFile(path, memory_map=True), str(path), max_rows)
        else:
            file = _open(path)
            if extension == ".csv":
                spans, parse = _csv_records(file, path)
            else:
                spans, parse = _lines(file), parse_json_row
            rows = FileRows(file, islice(spans, max_rows), parse, str(path))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowInvalid) as error:
        raise ValueError(f"--data_path {path}: the file cannot be read as {extension}: {error}") from error
    if len(rows) == 0:
        raise ValueError(f"--data_path {path}: the file is empty; it must hold at least one row")
    return rows


def _open(path: Path) -> BinaryIO:
    """The file behind its byte order mark, to be read at any place; gzipped: unpacked to a temporary file.

    A JSON list is written to a temporary file too, an item a line.
    """
    file: BinaryIO = path.open("rb")
    if path.name.lower().endswith(".gz"):
        with gzip.open(file) as packed:
            file = tempfile.TemporaryFile()
            shutil.copyfileobj(packed, file)
            file.seek(0)
    if file.read(len(BOM)) != BOM:
        file.seek(0)
    if ".json" not in extension_of(path):
        return file
    start = file.tell()
    while (character := file.read(1)).isspace():
        pass
    file.seek(start)
    return _list_as_lines(file, path) if character == b"[" else file


def _list_as_lines(file: BinaryIO, path: Path) -> BinaryIO:
    """What begins as a JSON list, which is read whole; the file itself where it is JSON lines after all."""
    start = file.tell()
    try:
        items = json.loads(file.read().decode())
        lines = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as its rows)
        lines.writelines(json.dumps(item).encode() + b"\n" for item in items)
        lines.seek(0)
        return lines
    except (ValueError, RecursionError) as error:
        if extension_of(path).startswith(".jsonl"):  # lines, the first of which holds a list
            file.seek(start)
            return file
        reason = error if isinstance(error, ValueError) else "it is nested too deeply"
        raise ValueError(f"--data_path {path}: the file is not a JSON list ({reason})") from error


def _lines(file: BinaryIO) -> Iterator[Span]:
    start = file.tell()
    for number, line in enumerate(file, 1):
        if line.strip():
            yield Span(start, len(line), number)
        start += len(line)


def _csv_records(file: BinaryIO, path: Path) -> tuple[Iterator[Span], Callable[[bytes], Any]]:
    """Where the rows of CSV are, each of a line or of several, and what reads one."""
    passed = file.tell()

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
