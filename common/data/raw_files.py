"""Local files to rows: JSON, JSON lines, CSV, Parquet; a folder of train and eval files."""

import csv
import gzip
import hashlib
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from common.data.example import BadRow
from common.data.raw_rows import (
    MAX_DEPTH,
    ArrowRows,
    JoinedRows,
    JsonLines,
    RawRows,
    is_too_deep,
    parse_json,
)

EXTENSIONS = (".json", ".jsonl", ".json.gz", ".jsonl.gz", ".csv", ".parquet")
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


def read_files(paths: Sequence[Path]) -> RawRows:
    """Rows of files of any kind, one file after the other.

    Raises:
        ValueError: a file that cannot be read, or is empty, by name.
    """
    parts = [_read_file(path) for path in paths]
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


def digest_files(paths: Sequence[Path], root: Path) -> str:
    """Digest of the names below `root` and the contents of files."""
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(f"{path.relative_to(root) if path != root else path.name} {digest}\n".encode())
    return total.hexdigest()


def _read_file(path: Path) -> RawRows:
    extension = extension_of(path)
    try:
        if extension == ".parquet":
            rows = _read_parquet(path)
        elif extension == ".csv":
            rows = _read_csv(path)
        else:
            data = path.read_bytes()
            rows = _read_json(path, gzip.decompress(data) if extension.endswith(".gz") else data)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"--data_path {path}: the file cannot be read as {extension}: {error}") from error
    if len(rows) == 0:
        raise ValueError(f"--data_path {path}: the file is empty; it must hold at least one row")
    return rows


def _read_json(path: Path, data: bytes) -> RawRows:
    data = data.removeprefix(b"\xef\xbb\xbf")
    if not data.lstrip().startswith(b"["):
        return JsonLines(data, str(path))
    try:
        rows = parse_json(data)
    except ValueError as error:
        if path.name.lower().endswith((".jsonl", ".jsonl.gz")):
            return JsonLines(data, str(path))
        raise ValueError(f"--data_path {path}: the file is not a JSON list ({error})") from error
    deep = BadRow(f"the row is nested more than {MAX_DEPTH} deep")
    return RawRows([deep if is_too_deep(row) else row for row in rows], str(path))


def _read_csv(path: Path) -> RawRows:
    old_limit = csv.field_size_limit(2**31 - 1)  # a reply may be longer than the csv module's 128 KiB
    rows: list[dict | BadRow] = []
    lines: list[int] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            while True:
                start = reader.line_num + 1
                fields = next(reader, None)
                if fields is None:
                    break
                if fields:
                    rows.append(_csv_row(header, fields))
                    lines.append(start)
    except csv.Error as error:
        raise ValueError(f"--data_path {path}:{reader.line_num}: the file is not CSV: {error}") from error
    finally:
        csv.field_size_limit(old_limit)
    return RawRows(rows, str(path), lines)


def _csv_row(header: list[str], fields: list[str]) -> dict | BadRow:
    if len(fields) != len(header):
        return BadRow(f"the line has {len(fields)} fields, the header {len(header)}")
    return dict(zip(header, fields, strict=True))


def _read_parquet(path: Path) -> RawRows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return ArrowRows(pq.read_table(path, memory_map=True), str(path))
    except pa.ArrowInvalid as error:
        raise OSError(str(error)) from error
