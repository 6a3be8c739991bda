"""Checkpoints: folders with the whole state of a run, each either complete or absent.

OUTPUT_DIR/checkpoints/step-000200/ holds PART-rank-00000.safetensors, ... for every part and rank, and
meta.json: the JSON state of all parts, the flags, and the SHA-256 of every file. It is written under a
temporary name and renamed when everything is on the disk; only then are older ones removed. A damaged
checkpoint is reported, and the newest intact one is used instead.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.ranks import distributed
from common.ranks.failures import has_lost_ranks
from common.runs.durable_files import WRITING, SaveFailed, publish_folder, remove_folder, sync
from common.runs.saved_state import Stateful, TensorReader, write_slices

FOLDER, META = "checkpoints", "meta.json"
FORMAT = 3  # increment if an older reader would misread the files
_NAME = re.compile(r"step-(\d+)(-rollout|-update-(\d+))?")


def checkpoint_name(step: int, position: str = "") -> str:
    """Name of the state after a step, or at `rollout` or `update-0003` within it."""
    return f"step-{step - 1:06d}-{position}" if position else f"step-{step:06d}"


def checkpoint_order(name: str) -> tuple[int, int] | None:
    """Sort key of a checkpoint: (steps, then 0 for a whole step, 1 for a rollout, 2 and more for updates).

    None for a name of another form, such as that of an unfinished folder.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), 1 + int(match[3] or 0) if match[2] else 0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose meta.json is intact; its other files have not been read."""

    folder: Path
    meta: dict[str, Any]

    def files(self, part: str) -> list[Path]:
        """Files of one part, by rank."""
        return [self.folder / name for name in sorted(self.meta["files"]) if name.startswith(f"{part}-rank-")]

    def damaged_file(self, share: slice = slice(None)) -> str | None:
        """Description of the first damaged file among a share of the files; None if all are intact."""
        for name in sorted(self.meta["files"])[share]:
            try:
                if _digest(self.folder / name) != self.meta["files"][name]["sha256"]:
                    return f"{name} has changed since it was written (its SHA-256 differs)"
            except OSError as error:
                return f"{name} cannot be read: {error.strerror}"
        return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's meta.json. Raises ValueError if it is damaged."""
    try:
        outer = json.loads((folder / META).read_text())
        text = outer["content"]
        expected = outer["sha256"]
        meta = json.loads(outer["content"])
    except OSError as error:
        raise ValueError(f"{META} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{META} is not a checkpoint of this program, or is incomplete") from error
    if hashlib.sha256(text.encode()).hexdigest() != expected:
        raise ValueError(f"{META} has changed since it was written (its SHA-256 differs)")
    if not isinstance(meta, dict) or not {"args", "numbers", "files"} <= meta.keys():
        raise ValueError(f"{META} is not a checkpoint of this program: it has no args, numbers or files")
    if meta.get("format") != FORMAT:
        raise ValueError(
            f"its format is {meta.get('format')}, but this program reads {FORMAT}; resume it with the "
            "version that wrote it"
        )
    return Checkpoint(folder, meta)


def find_checkpoints(path: Path) -> tuple[list[Checkpoint], list[str]]:
    """The checkpoint at a path, or those of a run's folder, newest first; and messages about damaged ones."""
    parent = path if path.name == FOLDER else path / FOLDER
    folders = [path] if (path / META).exists() else [p for p in parent.glob("*") if checkpoint_order(p.name)]
    checkpoints, damages = [], []
    for folder in sorted(folders, key=lambda p: checkpoint_order(p.name) or (), reverse=True):
        try:
            checkpoints.append(read_checkpoint(folder))
        except ValueError as error:
            damages.append(f"checkpoint {folder}: {error}")
    return checkpoints, damages


def save_checkpoint(
    run_folder: Path, name: str, parts: Mapping[str, Stateful], flags: dict[str, Any], save_total_limit: int
) -> None:
    """Write a checkpoint, then remove the oldest beyond the limit (0: no limit). Every rank must call this.

    Raises SaveFailed, on every rank, if any of them could not write its files.
    """
    folder = run_folder / FOLDER / name
    temporary = folder.with_name(name + WRITING)
    is_main = distributed.is_main()

    def prepare() -> None:
        if is_main:
            shutil.rmtree(temporary, ignore_errors=True)
            # No parents: a run's folder that has disappeared (an unmounted disk) is not created again.
            temporary.parent.mkdir(exist_ok=True)
            temporary.mkdir()

    def write() -> tuple[dict[str, Any], dict[str, Any]]:
        # json_state first: it may reduce over ranks, and would wait for a rank that cannot write.
        states = {part: stateful.json_state() for part, stateful in parts.items()}
        return states, _write_parts(temporary, parts)

    def commit() -> None:
        if is_main:
            files = {name: facts for _, rank_files in written for name, facts in rank_files.items()}
            meta = {"args": flags, "format": FORMAT, "numbers": written[0][0], "files": files}
            text = json.dumps(meta)
            outer = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "content": text}
            (temporary / META).write_text(json.dumps(outer))
            publish_folder(temporary, folder)

    try:
        distributed.run_together(prepare, SaveFailed)
        written = distributed.run_together(write, SaveFailed)
        distributed.run_together(commit, SaveFailed)
    except Exception as error:  # safetensors and Python raise different errors on a full disk
        if is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, SaveFailed) or has_lost_ranks(error):  # raised by another rank
            raise
        raise SaveFailed(f"rank {distributed.rank()} failed: {error}") from error
    if is_main and save_total_limit:
        for old in find_checkpoints(run_folder)[0][save_total_limit:]:
            try:
                remove_folder(old.folder)
            except OSError as error:  # the new one is complete: nothing is lost
                print(f"warning: {old.folder} could not be removed: {error.strerror}", flush=True)
    distributed.barrier()


def _write_parts(folder: Path, parts: Mapping[str, Stateful]) -> dict[str, dict[str, Any]]:
    """Write this rank's files; return the SHA-256 of each."""
    if not folder.is_dir():
        raise OSError(
            f"{folder} does not exist on this machine: --output_dir must be on a disk that all machines share"
        )
    facts = {}
    for part, stateful in parts.items():
        slices = list(stateful.tensor_slices())
        if slices:
            path = folder / f"{part}-rank-{distributed.rank():05d}.safetensors"
            write_slices(path, slices)
            sync(path)
            facts[path.name] = {"sha256": _digest(path)}
    return facts


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest_intact(candidates: Sequence[Checkpoint], damages: list[str]) -> Checkpoint | None:
    """The newest checkpoint whose files are all intact; None if there is none.

    Appends messages about newer, damaged ones to `damages`. Every rank must call this.
    """
    for candidate in candidates:
        # Each rank verifies its share, so that each file is read once.
        share = slice(distributed.rank(), None, distributed.world_size())
        gathered = [d for d in distributed.gather_objects(candidate.damaged_file(share)) if d]
        if not gathered:
            return candidate
        damages.append(f"checkpoint {candidate.folder}: {gathered[0]}")
        if distributed.is_main():
            print(f"{damages[-1]}; it is skipped", flush=True)
    return None


def load_newest(candidates: Sequence[Checkpoint], parts: Mapping[str, Stateful]) -> Checkpoint:
    """Load the newest intact checkpoint into the parts; return it. Every rank must call this.

    Raises ValueError if none is intact, or it belongs to another run.
    """
    damages: list[str] = []
    checkpoint = newest_intact(candidates, damages)
    if checkpoint is None:
        raise ValueError(
            f"{'; '.join(damages)}. No checkpoint can be used; start over with --resume overwrite"
        )
    for part, stateful in parts.items():
        try:
            stateful.load(TensorReader(checkpoint.files(part)), checkpoint.meta["numbers"][part])
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"checkpoint {checkpoint.folder} does not belong to this run: {part}: {error}"
            ) from error
    return checkpoint
