"""Raw rows: a sequence of dicts with the location of each; readers of local files (JSON, JSON lines, CSV,
Parquet, Arrow) and of folders with train and eval files.
"""

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
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from itertools import accumulate, islice
from pathlib import Path, PurePath
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import ConcatDataset

from common.data.example import BadRow

csv.field_size_limit(2**31 - 1)  # replies may exceed the csv module's 128 KiB

EXTENSIONS = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".csv", ".parquet", ".arrow")
BOM = codecs.BOM_UTF8
LONGEST_ID = 256  # characters
_TRAIN_NAMES = {"train", "training"}
_EVAL_NAMES = {"eval", "evaluation", "test", "valid", "validation", "dev"}


class RawRows:
    """Rows by index, from one or several files or data sets."""

    def __init__(
        self,
        rows: Sequence[Any],
        origin: str,
        fingerprint: str = "",
        locate: Callable[[int], str] | None = None,
        read: Callable[[Any], Any] | None = None,
    ) -> None:
        """`rows` has a length and integer indexing; a `fingerprint` that changes with them replaces a digest
        of their content. `locate` gives a row's file:line; by default rows are numbered. `read` turns an item
        of `rows` into a row when it is requested.
        """
        self._rows = rows
        self.origin = origin
        self.fingerprint = fingerprint
        self._locate, self._read = locate, read

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Row `index`. Raises BadRow if it is not a dict."""
        row = self._read(self._rows[index]) if self._read else self._rows[index]
        if not isinstance(row, dict):
            raise BadRow(f"the row is of type {type(row).__name__}, not an object with named columns")
        return row

    def location(self, index: int) -> str:
        """Location of a row: file:line, or the data set and the row's number from 1."""
        return self._locate(index) if self._locate else f"{self.origin}:{index + 1}"

    def row_id(self, index: int, row: dict[str, Any]) -> str:
        """Name of the row at `index`, independent of its folder: its column `id`, if that is an integer or a
        short line of text, else file:line.
        """
        own = row.get("id")
        name = str(own).strip() if isinstance(own, int | str) and not isinstance(own, bool) else ""
        if name and name.isprintable() and len(name) <= LONGEST_ID:
            return name
        return PurePath(self.location(index)).name

    def digest(self) -> str:
        """Digest of the rows."""
        if self.fingerprint:
            return self.fingerprint
        total = hashlib.sha256()
        for index in range(len(self)):
            try:
                total.update(canonical(self[index]))
            except BadRow as error:
                total.update(str(error).encode())
        return f"{len(self)} {total.hexdigest()}"


def canonical(row: Any) -> bytes:
    """Bytes that depend on a row's content and not on the order of its columns."""
    return json.dumps(row, sort_keys=True, default=repr).encode()


def parse_json_row(data: bytes) -> Any:
    """Value of a line of JSON. Raises BadRow."""
    try:
        return json.loads(data.decode())  # json.loads would guess the encoding of bytes, such as UTF-16
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deeply
        raise BadRow(f"the line is not JSON ({error})") from error


def rows_of_parquet(path: Path, max_rows: int | None = None) -> RawRows:
    """The first `max_rows` of a file, with one row group in memory at a time: read them in order."""
    file = pq.ParquetFile(path, memory_map=True)
    sizes = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
    ends = list(accumulate(sizes))

    @lru_cache(maxsize=1)
    def read_group(group: int) -> pa.Table:
        try:
            return file.read_row_group(group)
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise ValueError(f"--data_path {path}: the file cannot be read as .parquet: {error}") from error

    def read(index: int) -> dict[str, Any]:
        group = bisect_right(ends, index)
        table = read_group(group)
        return _row_of_table(table, index - ends[group] + len(table))

    return RawRows(range(file.metadata.num_rows)[:max_rows], str(path), read=read)


def rows_of_arrow(path: Path, max_rows: int | None = None) -> RawRows:
    """The first `max_rows` of a stream, as `datasets` writes it, or of an IPC file; they stay on disk."""
    source = pa.memory_map(str(path))
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    table = (pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)).read_all()
    return RawRows(range(len(table))[:max_rows], str(path), read=partial(_row_of_table, table))


def _row_of_table(table: pa.Table, index: int) -> dict[str, Any]:
    return table.slice(index, 1).to_pylist()[0]


def join_rows(parts: Sequence[RawRows]) -> RawRows:
    """The rows of several files, one file after the other."""
    joined = ConcatDataset(parts)

    def locate(index: int) -> str:
        part = bisect_right(joined.cumulative_sizes, index)
        return parts[part].location(index - joined.cumulative_sizes[part] + len(parts[part]))

    return RawRows(joined, ", ".join(part.origin for part in parts), locate=locate)


def group_rows(
    base: RawRows, keys: dict[int, Hashable], build: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> RawRows:
    """Rows with equal keys as one row, made by `build`, with the location and `id` of the first; rows without
    a key stay separate.
    """
    by_key: dict[Hashable, list[int]] = defaultdict(list)
    for index in range(len(base)):
        by_key[keys.get(index, ("row", index))].append(index)
    groups = list(by_key.values())

    def read(group: list[int]) -> dict[str, Any]:
        rows = [base[index] for index in group]
        return build(rows) | ({"id": rows[0]["id"]} if "id" in rows[0] else {})

    return RawRows(
        groups,
        base.origin,
        base.fingerprint,
        locate=lambda i: base.location(groups[i][0]),
        read=read,
    )


def readable(rows: RawRows) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield index and row of all readable rows."""
    for index in range(len(rows)):
        with suppress(BadRow):
            yield index, rows[index]


def extension_of(path: Path) -> str | None:
    """Extension of a file, if it is a supported one, else None."""
    name = path.name.lower()
    return next((ext for ext in EXTENSIONS if name.endswith(ext)), None)


def find_parts(path: Path) -> tuple[list[Path], list[Path]]:
    """Training files and evaluation files of a file (no evaluation files then) or a folder.

    Raises ValueError if the file does not exist, its extension is unknown, or the folder has no training
    file.
    """
    if not path.exists():
        raise ValueError(f"--data_path {path}: there is no such file or folder")
    if path.is_file():
        if extension_of(path) is None:
            raise ValueError(
                f"--data_path {path}: the file type is unknown; the extension must be one of "
                f"{', '.join(EXTENSIONS)}; write texts as lines of JSON, such as "
                '{"text": "..."}, in a .jsonl file'
            )
        return [path], []
    content = sorted(path.iterdir())
    # Matches train-00.jsonl, train.json, my-data-train.csv, ...
    words = {
        p: set(re.split(r"[-_. ]|\d+", p.name.lower())) for p in content if p.is_file() and extension_of(p)
    }
    train, held_out = ([p for p in words if words[p] & names] for names in (_TRAIN_NAMES, _EVAL_NAMES))
    if not train:
        raise ValueError(
            f"--data_path {path}: the folder has no train* file ({', '.join(EXTENSIONS)}) and was not saved "
            f"by datasets.save_to_disk; found {', '.join(p.name for p in content[:5]) or 'nothing'}; name a "
            "file itself, or rename it to train"
        )
    return train, held_out


def read_files(paths: Sequence[Path], max_rows: int | None = None) -> RawRows:
    """Rows of files of any kind, one file after the other: all of them, or the first of each file.

    They stay in their files and are read one at a time, Parquet's by row groups. Raises ValueError for an
    unreadable or empty file.
    """
    parts = [_read_file(path, max_rows) for path in paths]
    return parts[0] if len(parts) == 1 else join_rows(parts)


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
        rows = _READERS.get(extension, rows_of_text)(path, max_rows)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, RecursionError, pa.ArrowInvalid) as error:
        raise ValueError(f"--data_path {path}: the file cannot be read as {extension}: {error}") from error
    if len(rows) == 0:
        raise ValueError(f"--data_path {path}: the file is empty; it must hold at least one row")
    return rows


def rows_of_text(path: Path, max_rows: int | None = None) -> RawRows:
    """The first `max_rows` of JSON lines, a JSON list or CSV, which stay on disk: in the file itself, or for
    a list or CSV in a temporary file with one row per line.
    """
    file = _open(path)
    parse = parse_json_row
    values: Iterator[tuple[int, Any]] | None
    if extension_of(path) == ".csv":
        values = _csv_records(file, path)
        parse = partial(_parse_csv_row, next(values, (1, []))[1])
    else:
        values = _json_list(file, path)
    spans = _lines(file)
    if values is not None:
        file = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as its rows)
        spans = _write_lines(values, file)
    # (rows, 3): start of a row in `file`, its number of bytes, its line in the user's file
    table = np.fromiter(islice(spans, max_rows), np.dtype((np.int64, 3)))

    def read(span: np.ndarray) -> Any:
        start, num_bytes, _ = span.tolist()
        file.seek(start)
        return parse(file.read(num_bytes))

    return RawRows(table, str(path), locate=lambda index: f"{path}:{table[index, 2]}", read=read)


_READERS = {".parquet": rows_of_parquet, ".arrow": rows_of_arrow}


def _open(path: Path) -> BinaryIO:
    """The file, positioned after its byte order mark; a gzipped one decompressed to a temporary file."""
    file: BinaryIO = path.open("rb")
    if path.name.lower().endswith(".gz"):
        with gzip.open(file) as packed:
            file = tempfile.TemporaryFile()
            shutil.copyfileobj(packed, file)
            file.seek(0)
    if file.read(len(BOM)) != BOM:
        file.seek(0)
    return file


def _lines(file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Start, bytes and number of each line that is not blank."""
    start = file.tell()
    for number, line in enumerate(file, 1):
        if line.strip():
            yield start, len(line), number
        start += len(line)


def _write_lines(values: Iterable[tuple[int, Any]], file: BinaryIO) -> Iterator[tuple[int, int, int]]:
    """Write numbered values to a file as JSON lines; start, bytes and number of each."""
    start = 0
    for number, value in values:
        num_bytes = file.write(json.dumps(value).encode() + b"\n")
        yield start, num_bytes, number
        start += num_bytes


def _json_list(file: BinaryIO, path: Path) -> Iterator[tuple[int, Any]] | None:
    """The numbered items of a JSON list, which is parsed at once; None if the file has JSON lines."""
    start = file.tell()
    is_list = file.read(4096).lstrip().startswith(b"[")
    file.seek(start)
    if not is_list:
        return None
    try:
        return enumerate(json.loads(file.read().decode()), 1)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--data_path {path}: the file is not a JSON list ({error})") from error


def _csv_records(file: BinaryIO, path: Path) -> Iterator[tuple[int, list[str]]]:
    """The fields of each record, which may span several lines, with the number of its first line."""
    reader = csv.reader(io.TextIOWrapper(file, "utf-8", newline=""), strict=True)
    line = 1
    try:
        for fields in reader:
            if fields:
                yield line, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(f"--data_path {path}:{reader.line_num}: the file is not CSV: {error}") from error


def _parse_csv_row(header: list[str], data: bytes) -> dict[str, str]:
    fields = json.loads(data)
    if len(fields) != len(header):
        raise BadRow(f"the line has {len(fields)} fields, the header {len(header)}")
    return dict(zip(header, fields, strict=True))
