"""Fingerprints of saved models, to detect changes; cheap for models of any size."""

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from transformers.utils import cached_file

from common.models.saved_adapters import base_of

SAMPLE_BYTES = 256  # at the start, middle and end of every tensor
NUM_SAMPLES = 64  # samples of a file that is neither safetensors nor zip
CONFIGURATIONS = ("config.json", "adapter_config.json")


def fingerprint(name_or_path: str) -> str:
    """Digest of a model's configuration and weights, and of its base if it is an adapter.

    "" if the model is not on this machine. Raises OSError.
    """
    total = hashlib.sha256()
    files = [path for name in dict.fromkeys((name_or_path, base_of(name_or_path))) for path in _files(name)]
    for path in files:
        total.update(path.name.encode())
        for part in _samples(path):
            total.update(part)
    return total.hexdigest() if files else ""


def changed_models(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A message for each model, by the flag that names it, whose fingerprint is known and has changed."""
    return [
        f"the model of {flag} has changed since then: restore the old one, or start over with --resume "
        "overwrite or in another --output_dir"
        for flag in before.keys() & now.keys()
        if before[flag] and now[flag] and before[flag] != now[flag]
    ]


def _files(name_or_path: str) -> list[Path]:
    folder = Path(name_or_path)
    if not folder.is_dir():
        with suppress(OSError):  # not in the hub cache either
            folder = Path(cached_file(name_or_path, "config.json", local_files_only=True)).parent
    files = sorted(folder.glob("*"))
    return [p for p in files if p.suffix in (".safetensors", ".bin") or p.name in CONFIGURATIONS]


def _samples(path: Path) -> Iterator[bytes]:
    """Parts of a file that identify it."""
    size = path.stat().st_size
    if path.suffix == ".json":
        yield path.read_bytes()
    elif path.suffix == ".safetensors":
        with open(path, "rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            yield header
            for name, tensor in json.loads(header).items():
                if name != "__metadata__":
                    begin, end = tensor["data_offsets"]
                    last = max(begin, end - SAMPLE_BYTES)
                    for start in (begin, (begin + last) // 2, last):
                        file.seek(8 + len(header) + start)
                        yield file.read(SAMPLE_BYTES)
    elif zipfile.is_zipfile(path):  # its directory has a checksum of every tensor
        yield repr([(i.filename, i.file_size, i.CRC) for i in zipfile.ZipFile(path).infolist()]).encode()
    else:
        yield str(size).encode()
        with open(path, "rb") as file:
            for number in range(NUM_SAMPLES):
                file.seek(size * number // NUM_SAMPLES)
                yield file.read(SAMPLE_BYTES)
