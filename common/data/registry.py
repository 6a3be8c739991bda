"""From what `--data_path` says to rows and the adapter that understands them."""

import difflib
import hashlib
import importlib
import re
from functools import cached_property
from pathlib import Path

import common.data.adapters  # noqa: F401  (fills ADAPTERS)
from common.data.adapters.base import ADAPTERS, Adapter, Parts, register_dataset
from common.data.adapters.local_files import AnyForm, LocalFiles
from common.data.raw_files import extension_of
from common.data.raw_rows import RawRows

__all__ = ["Adapter", "Parts", "RawSource", "load_source", "register_dataset", "registered_names"]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_CLASS_PATH = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


class RawSource:
    """One entry of `--data_path`: its rows are read when they are first asked for."""

    def __init__(self, name: str, adapter: Adapter, reader: Adapter | None = None) -> None:
        """`reader` reads the rows where that is not the adapter itself: a local copy of a known data set."""
        self.name, self.adapter, self._reader = name, adapter, reader or adapter

    @cached_property
    def _parts(self) -> Parts:
        train, held_out = self._reader.load()
        return Parts(
            RawRows.of(train, self.name), None if held_out is None else RawRows.of(held_out, self.name)
        )

    @property
    def needs_hub(self) -> bool:
        """Whether the rows come from the hub, which may take long and may fail."""
        return type(self._reader).load is Adapter.load

    @property
    def train(self) -> RawRows:
        """Rows to train on."""
        return self._parts.train

    @property
    def eval(self) -> RawRows | None:
        """Rows that the data set itself keeps for evaluation."""
        return self._parts.eval

    def digest(self) -> str:
        """Changes with the rows and with the code that reads them."""
        label = Path(self.name).name
        data_digest = self._reader.data_digest() or self._content_digest()
        return f"{label} {data_digest} {self.adapter.code_digest()}"

    def _content_digest(self) -> str:
        total = hashlib.sha256()
        for rows in self._parts:
            total.update(f"part of {-1 if rows is None else len(rows)}".encode())
            if rows is not None:
                rows.update_digest(total)
        return total.hexdigest()


def registered_names() -> list[str]:
    """Names that have an adapter."""
    return sorted(ADAPTERS)


def load_source(source: str) -> RawSource:
    """The source that a `--data_path` entry names.

    It is, in this order: `module:Class` (an adapter of your own), a file or folder, a registered name, a hub
    name. A local folder or file under a registered name (`/data/openai/webgpt_comparisons`) is read by that
    adapter.

    Raises:
        ValueError: it is none of them; the message names the nearest registered name.
    """
    class_path = _CLASS_PATH.fullmatch(source)
    if class_path and not Path(source).exists():
        return RawSource(source, _import_adapter(source, *class_path.groups()))
    path = Path(source)
    if path.exists() and source not in ADAPTERS:
        reader = LocalFiles(source)
        return RawSource(source, _adapter_for_local(path, reader), reader)
    if source in ADAPTERS:
        known = ADAPTERS[source]
        if (
            "/" in source and path.exists()
        ):  # a local copy; a folder that happens to be called chitchat is none
            return RawSource(source, known(source), LocalFiles(source))
        return RawSource(source, known(source))
    if _HUB_NAME.fullmatch(source) and extension_of(path) is None and not source.startswith("."):
        return RawSource(source, AnyForm(source))
    raise ValueError(_unknown(source))


def _adapter_for_local(path: Path, reader: LocalFiles) -> Adapter:
    full_name = "/".join(path.resolve().parts[-2:])
    known = ADAPTERS.get(full_name)
    return reader if known is None else known(full_name)


def _import_adapter(source: str, module_name: str, class_name: str) -> Adapter:
    try:
        adapter = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"--data_path {source}: {error}; MODULE:CLASS must name a subclass of "
            "common.data.registry.Adapter that can be imported (PYTHONPATH)"
        ) from error
    if not (isinstance(adapter, type) and issubclass(adapter, Adapter)):
        raise ValueError(f"--data_path {source}: {class_name} is no subclass of common.data.registry.Adapter")
    return adapter(source)


def _unknown(source: str) -> str:
    near = difflib.get_close_matches(source, ADAPTERS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    if extension_of(Path(source)) or source.startswith((".", "/", "~")) or source.count("/") > 1:
        return f"--data_path {source}: there is no such file or folder{hint}"
    return (
        f"--data_path {source}: neither a file, a folder nor a known data set{hint} "
        f"(known: {', '.join(sorted(ADAPTERS))}; hub names are OWNER/NAME)"
    )
