"""Data sources: the adapter of an entry of `--data_path`, and its rows."""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import common.data.adapters  # noqa: F401  (fills ADAPTERS)
from common.data.adapters.base import (
    ADAPTERS,
    DEFAULT_SCORE_COLUMN,
    Adapter,
    AnyForm,
    MapStyle,
    make_own,
    parameters_of,
    register_dataset,
)
from common.data.adapters.ported_class import PortedClass
from common.data.hub_data import digest_local, has_configs, load_local
from common.data.raw_rows import RawRows, canonical, extension_of
from common.flags.plugins import did_you_mean, get_from, import_own_module

__all__ = ["ADAPTERS", "Adapter", "RawSource", "load_source", "register_dataset"]

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_CLASS_PATH = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)(?::(.+))?")
_ARGUMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


class NoTokenizer(ValueError):
    """A data set class needs a tokenizer, which the caller does not have."""


class RawSource:
    """One entry of `--data_path`; its rows are read at the first access."""

    is_whole = False  # a step uses all rows, not its share: True for --sft_only_data_path

    def __init__(self, name: str, adapter: Adapter) -> None:
        self.name = name
        self.adapter = adapter

    @cached_property
    def _parts(self) -> tuple[RawRows, RawRows | None]:
        adapter = self.adapter
        parts = (
            adapter.load()
            if adapter.local is None
            else load_local(adapter.local, adapter.max_rows, adapter.hub_config)
        )
        train, held_out = (
            rows if isinstance(rows, RawRows) else RawRows(rows or [], self.name) for rows in parts
        )
        if not len(train):
            raise ValueError(f"--data_path {self.name}: it has no rows; it must hold at least one")
        return adapter.arrange(train), adapter.arrange(held_out) if len(held_out) else None

    @property
    def needs_hub(self) -> bool:
        """Whether the rows come from the hub, which may be slow or fail."""
        return type(self.adapter).load is Adapter.load and self.adapter.local is None

    @property
    def train(self) -> RawRows:
        """Training rows."""
        return self._parts[0]

    @property
    def eval(self) -> RawRows | None:
        """The data set's own evaluation rows."""
        return self._parts[1]

    def notes(self, stage: int) -> list[str]:
        """Lines for the data report, after the rows have been read."""
        return [f"{self.name}: {note}" for note in self.adapter.notes_of(stage)]

    def digest(self) -> str:
        """Digest of the rows and of the code that reads them."""
        if self.adapter.local is not None:
            data_digest = digest_local(self.adapter.local)
        else:
            data_digest = " ".join(rows.digest() if rows else "no part" for rows in self._parts)
        arguments = canonical(self.adapter.arguments).decode()
        return f"{Path(self.name).name} {data_digest} {self.adapter.code_digest()} {arguments}"


def load_source(
    source: str,
    score_column: str = DEFAULT_SCORE_COLUMN,
    max_rows: int | None = None,
    own_names: Mapping[str, str] = {},
    **offered: Any,
) -> RawSource:
    """The source that a `--data_path` entry names.

    It is, in this order: a class of your own (`module:Class`; `module:Class:NAME`, where NAME is the file,
    folder or hub data set that it reads; `module:Class:ARGUMENT=VALUE,...`), a file or folder, a registered
    name, a hub name; the last three may be followed by `:CONFIGURATION`. A local folder or file under a
    registered name (`/data/openai/webgpt_comparisons`) is read by that adapter. The class is an Adapter, one
    with the methods of DeepSpeed-Chat's, or one with a length and an index. `score_column` orders the
    responses to a prompt if each has scores. `max_rows`: only the first rows of each file are read.
    `own_names` are those of --columns. `offered` are `seed` and `tokenizer`, for a constructor that has them.
    Raises ValueError for any other entry, with the nearest registered name.
    """
    adapter = _find_adapter(source, offered)
    if own_names and (adapter.own_names or not isinstance(adapter, AnyForm)):
        raise ValueError(
            f"--columns: the columns of --data_path {source} are named by its adapter; leave --columns out"
        )
    adapter.score_column, adapter.max_rows = score_column, max_rows
    adapter.own_names = adapter.own_names or own_names
    return RawSource(source, adapter)


def _find_adapter(source: str, offered: dict[str, Any]) -> Adapter:
    path = Path(source)
    place, _, config = source.rpartition(":")
    if place and not path.exists() and (has_configs(Path(place)) or _HUB_NAME.fullmatch(place)):
        adapter = _find_adapter(place, offered)
        adapter.hub_config = config
        return adapter
    class_path = _CLASS_PATH.fullmatch(source)
    if class_path and not path.exists():
        return _own_adapter(source, *class_path.groups(default=""), offered)
    # A folder OWNER/NAME is a copy of that data set; a registered name without a slash is never a folder.
    is_local = path.exists() and ("/" in source or source not in ADAPTERS)
    name = source if source in ADAPTERS or not is_local else "/".join(path.resolve().parts[-2:])
    is_file_name = extension_of(path) is not None or source.startswith(".")
    if name in ADAPTERS or is_local or (_HUB_NAME.fullmatch(source) and not is_file_name):
        kind = ADAPTERS.get(name, AnyForm)
        return _build_adapter(kind, source, name, path if is_local else None, {}, offered)
    raise ValueError(
        f"--data_path {source}: there is no such file or folder, nor a data set of this name"
        f"{did_you_mean(source, ADAPTERS)}; hub data sets are OWNER/NAME"
    )


def _own_adapter(
    source: str, module_name: str, class_name: str, rest: str, offered: dict[str, Any]
) -> Adapter:
    """`module:Class[:NAME or arguments]`."""
    try:
        kind = get_from(import_own_module(module_name), class_name)
        if not isinstance(kind, type):
            raise ImportError(f"{class_name} is of type {type(kind).__name__}, not a class")
    except ImportError as error:
        raise ValueError(
            f"--data_path {source}: {error}; MODULE:CLASS must name a subclass of "
            "common.data.registry.Adapter, or a class with DeepSpeed-Chat's methods, or with a length and an "
            "index"
        ) from error
    dataset_name, arguments = _read_arguments(source, rest)
    if issubclass(kind, Adapter):
        dataset_name = str(arguments.pop("source", dataset_name))
    reads_itself = not issubclass(kind, Adapter) or kind.load is not Adapter.load
    if not dataset_name and not reads_itself:
        raise ValueError(
            f"--data_path {source}: {class_name} has no load(), so the rows that it reads must be named: "
            f"--data_path {source}:NAME, a file, a folder or a hub data set"
        )
    path = Path(dataset_name)
    local = None if reads_itself or not path.exists() else path
    return _build_adapter(kind, source, dataset_name, local, arguments, offered)


def _read_arguments(source: str, text: str) -> tuple[str, dict[str, Any]]:
    """NAME, or named arguments, from the text after `module:Class:`; the other one is empty.

    Arguments are ARGUMENT=VALUE,ARGUMENT=VALUE (values are JSON, or else text) or a JSON object. Raises
    ValueError for anything else.
    """
    if Path(text).exists() or not (text.startswith("{") or _ARGUMENT.match(text)):
        return text, {}
    try:
        if text.startswith("{"):
            return "", json.loads(text)
        given: dict[str, Any] = {}
        for part in text.split(","):
            argument = _ARGUMENT.fullmatch(part)
            if argument is None or argument[1] in given:
                raise ValueError(f"{part!r} is {'given twice' if argument else 'not ARGUMENT=VALUE'}")
            given[argument[1]] = _value_of(argument[2])
        return "", given
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"--data_path {source}: {error}; write MODULE:CLASS:ARGUMENT=VALUE,ARGUMENT=VALUE, or a JSON "
            "object in their place where a value has a comma"
        ) from error


def _value_of(text: str) -> Any:
    """The value of a JSON text; any other text unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return text


def _build_adapter(
    kind: type,
    source: str,
    name: str,
    local: Path | None,
    arguments: dict[str, Any],
    offered: dict[str, Any],
) -> Adapter:
    """The adapter of the data set `name`, whose rows are in `local` if there is such a file or folder."""
    is_adapter = issubclass(kind, Adapter)
    is_ported = hasattr(kind, "get_prompt") and not is_adapter
    wanted = {"tokenizer"} if is_ported else {"seed", "tokenizer"}  # PortedClass sets SEED itself
    taken = {key: offered.get(key) for key in sorted(wanted & parameters_of(kind))} | arguments
    if taken.get("tokenizer", "") is None:
        raise NoTokenizer(f"--data_path {source}: {kind.__name__} takes a tokenizer, but there is none")
    if is_ported:
        adapter: Adapter = PortedClass(kind, source, str(local or name), taken)
    elif is_adapter:
        adapter = make_own(kind, source, [name or source], taken)
        adapter.local = local or adapter.local
    else:
        adapter = MapStyle(kind, source, [name] if name else [], taken)
    adapter.arguments = arguments
    return adapter
