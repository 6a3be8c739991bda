"""Rows of a data set by location: a file, a folder, a folder saved by `datasets`, or a name on the hub."""

import logging
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from common.data.raw_rows import RawRows, digest_files, extension_of, find_parts, read_files
from common.ranks.failures import first_line

# The first split present is used: UltraFeedback has other splits besides its pairs, and a data set with a
# validation split keeps its test split for other uses.
_TRAIN_SPLITS = ("train_prefs", "train")
_EVAL_SPLITS = ("test_prefs", "validation", "valid", "dev", "eval", "test")
_PARQUET_COPY = "refs/convert/parquet"  # the hub's copy of every data set with a loading script


class HubPlace(NamedTuple):
    """Location of a data set on the hub, if its name is not enough."""

    name: str
    config: str | None = None
    copied_config: str = ""  # folder in the Parquet copy of a loading script; "": config or default


HUB_PLACES = {
    "mkqa-Chinese": HubPlace("apple/mkqa", copied_config="mkqa"),
    "mkqa-Japanese": HubPlace("apple/mkqa", copied_config="mkqa"),
    "lmqg/qg_jaquad": HubPlace("lmqg/qg_jaquad", copied_config="qg_jaquad"),
    "lmqg/qag_jaquad": HubPlace("lmqg/qag_jaquad", copied_config="qag_jaquad"),
    "Hello-SimpleAI/HC3-Chinese": HubPlace("Hello-SimpleAI/HC3-Chinese", "all"),
    "nvidia/HelpSteer3": HubPlace("nvidia/HelpSteer3", "preference"),
}


def is_saved_folder(path: Path) -> bool:
    """Whether `datasets.save_to_disk` wrote this folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def has_hub_layout(path: Path) -> bool:
    """Whether a folder is a copy of a hub data set that needs `datasets` to read: its README.md has
    configurations, or its files are in subfolders.
    """
    tables = [file for file in path.rglob("*") if extension_of(file)]
    has_train = any("train" in file.name.lower() for file in tables if file.parent == path)
    return has_configs(path) or (not has_train and any(file.parent != path for file in tables))


def has_configs(path: Path) -> bool:
    """Whether the README.md in a data set's folder names configurations."""
    readme = snapshot_of(path) / "README.md"
    text = readme.read_text(errors="replace") if readme.is_file() else ""
    return re.match(r"---\n(?:.*\n)*?configs:", text) is not None


def snapshot_of(path: Path) -> Path:
    """The newest snapshot in a data set's folder of the hub cache; any other path unchanged."""
    head = path / "refs/main"
    return path / "snapshots" / head.read_text().strip() if head.is_file() else path


def is_offline() -> bool:
    """Whether the environment forbids requests to the hub."""
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "TRUE", "YES", "ON") for name in names)


def load_hub(name: str, config: str | None = None) -> tuple[RawRows, RawRows | None]:
    """Training and evaluation rows of a hub data set, by its own name or from its place in HUB_PLACES.

    A data set with a loading script, which `datasets` no longer runs, is read from the hub's Parquet copy.
    Raises ValueError, with the reason and the cure, if it cannot be loaded.
    """
    datasets = _quiet_datasets()
    place = HUB_PLACES.get(name, HubPlace(name))
    config = config or place.config
    try:
        try:
            loaded = datasets.load_dataset(place.name, config)
        except ConnectionError:
            cached = Path(datasets.config.constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}")
            if snapshot_of(cached) == cached:  # not downloaded by `hf download` either
                raise
            loaded = datasets.load_dataset(str(snapshot_of(cached)), config)
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error):
                raise
            folder = place.copied_config or config or "default"
            loaded = datasets.load_dataset(place.name, data_dir=folder, revision=_PARQUET_COPY)
    except Exception as error:  # error of `datasets`, OSError, ValueError, error of requests, ...
        cure = "check the name and the network, or give a local file or folder"
        raise _load_error(name, error, cure) from error
    return _parts(dict(loaded), name)


def _load_error(source: str, error: Exception, cure: str) -> ValueError:
    """An error of `datasets` as a ValueError that names the source, or the configurations to choose from."""
    asked = re.search(r"among the available configs: (.+)", str(error))
    if asked:
        named = ", ".join(f"{source}:{config}" for config in re.findall(r"'([^']+)'", asked[1]))
        return ValueError(f"--data_path {source}: it has several configurations; give {named}")
    reason = f"it could not be loaded ({type(error).__name__}: {first_line(error)})"
    return ValueError(f"--data_path {source}: {reason}; {cure}")


def load_local(
    path: Path, max_rows: int | None = None, config: str | None = None
) -> tuple[RawRows, RawRows | None]:
    """Training and evaluation rows of a file, a folder of files, one saved by `datasets`, or a copy of a hub
    data set, whose configuration may be given as `config`.

    `max_rows`: only the first rows of each file. Raises ValueError, with the cure, if there is nothing
    usable.
    """
    folder = snapshot_of(path)
    is_saved = is_saved_folder(folder)
    if not (is_saved or config or has_hub_layout(folder)):
        train, held_out = find_parts(folder)
        return read_files(train, max_rows), read_files(held_out, max_rows) if held_out else None
    datasets = _quiet_datasets()
    try:
        loaded = datasets.load_from_disk(folder) if is_saved else datasets.load_dataset(str(folder), config)
    except Exception as error:  # error of `datasets`, pyarrow or json
        raise _load_error(str(path), error, "name a file in it") from error
    return _parts(dict(loaded) if hasattr(loaded, "keys") else {"train": loaded}, str(path))


def digest_local(path: Path) -> str:
    """Digest of the files that `load_local` reads. Raises ValueError as it does."""
    path = snapshot_of(path)
    if is_saved_folder(path) or has_hub_layout(path):
        return digest_files(sorted(file for file in path.rglob("*") if file.is_file()), path)
    return digest_files([file for part in find_parts(path) for file in part], path)


def _quiet_datasets() -> ModuleType:
    """The library without its progress bars and notices; its errors are raised."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it logs every retry
    return datasets


def _parts(splits: dict[str, Any], name: str) -> tuple[RawRows, RawRows | None]:
    train, held_out = (
        next((split for split in names if split in splits), None) for names in (_TRAIN_SPLITS, _EVAL_SPLITS)
    )
    if train is None:
        raise ValueError(
            f"--data_path {name}: there is no split called train, only {', '.join(splits)}; "
            "save the part to train on as a local file"
        )
    return _rows(splits[train], name), _rows(splits[held_out], f"{name}/{held_out}") if held_out else None


def _rows(split: Any, origin: str) -> RawRows:
    return RawRows(split.with_format(None), origin, str(split._fingerprint))
