"""Locks of a killed build: who needs the same DeepSpeed kernel next would wait for ever. No torch in here.

torch.utils.cpp_extension compiles a kernel under <root>/<op>/ and holds a file called `lock` there, open,
until it is done. A process that is killed leaves the file, and nobody removes it. Our programs compile
nothing of themselves: torch's AdamW is the optimizer and gloo or nccl are the collectives. Some keys of
--ds_config change that.
"""

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOCK = "lock"
# One compiler call may be silent for minutes; after this nobody works there, from another machine neither.
SILENT_SECONDS = 300.0
OFFLOADS = ("offload_optimizer", "offload_param")
# What DeepSpeed 0.19.8 may load for an `optimizer` section. The trained engines have torch's AdamW all the
# same; a frozen model under ZeRO 3 has no optimizer of ours, so DeepSpeed makes the section's for it.
OPTIMIZER_OPS = frozenset(("fused_adam", "cpu_adam", "fused_lamb", "fused_lion", "cpu_lion", "cpu_adagrad"))


@dataclass(frozen=True)
class BuildLock:
    """A lock that no process of this machine holds."""

    path: Path
    silent_seconds: float  # since anything in its folder was written

    @property
    def op(self) -> str:
        """Return the name of the kernel, such as fused_adam."""
        return self.path.parent.name

    @property
    def is_stale(self) -> bool:
        """Return whether its builder is gone for certain: it may live on a machine that shares the folder."""
        return self.silent_seconds > SILENT_SECONDS


def build_folders() -> list[Path]:
    """Return where this Python's kernels are compiled; there may be one for the CPU and one for CUDA."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return [Path(root)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "torch_extensions"
    version = f"py{sys.version_info.major}{sys.version_info.minor}"
    return sorted(path for path in cache.glob(f"{version}*_*") if path.is_dir())


def find_locks(op_names: frozenset[str]) -> list[BuildLock]:
    """Return the locks of these kernels that no process of this machine holds; nothing is touched."""
    paths = [folder / op / LOCK for folder in build_folders() for op in sorted(op_names)]
    paths = [path for path in paths if path.is_file()]
    held = set(_open_files()) if paths else set()
    locks = []
    for path in paths:
        try:
            status = path.stat()
            newest = max(file.stat().st_mtime for file in (path, *path.parent.iterdir()))
        except FileNotFoundError:  # its builder has finished meanwhile
            continue
        if (status.st_dev, status.st_ino) not in held:
            locks.append(BuildLock(path, max(time.time() - newest, 0.0)))
    return locks


def find_stale_locks(op_names: frozenset[str]) -> list[Path]:
    """Return the locks of these kernels whose builder is gone: not held, and nothing is written there."""
    return [lock.path for lock in find_locks(op_names) if lock.is_stale]


def needed_ops(ds_config: dict[str, Any], *, frozen_is_sharded: bool = False) -> frozenset[str]:
    """Return the kernels that DeepSpeed compiles for these keys of --ds_config; none without such keys.

    `frozen_is_sharded` says whether the run has a frozen model under ZeRO 3.
    """
    zero = _section(ds_config, "zero_optimization")
    offloads = [_section(zero, name) for name in OFFLOADS]
    names: set[str] = set(OPTIMIZER_OPS) if ds_config.get("optimizer") and frozen_is_sharded else set()
    if any(offload.get("device") == "nvme" for offload in offloads):
        names |= {"async_io", "gds"}
    if zero.get("zenflow") or any(offload.get("super_offload") for offload in offloads):
        names |= {"cpu_adam"}
    if any(key.startswith("zero_quantized") and value for key, value in zero.items()):
        names |= {"quantizer"}
    if _section(ds_config, "compile").get("deepcompile"):
        names |= {"dc"}
    if os.environ.get("DS_PIN_MEMORY_BACKEND") == "native" and any(o.get("pin_memory") for o in offloads):
        names |= {"pin_memory"}
    return frozenset(names)


def lock_problems(needed: frozenset[str]) -> list[str]:
    """Return a line for each lock that a run which compiles these kernels would wait for, for ever."""
    return [
        f"{path} is the lock of a build that was killed, and the run would wait for it for ever: --ds_config "
        f"makes DeepSpeed compile {path.parent.name}; delete that file"
        for path in find_stale_locks(needed)
    ]


def lock_note(needed: frozenset[str], all_ops: frozenset[str]) -> str:
    """Return one line on locks that do not stop this run, or may be in use elsewhere; empty for none."""
    idle = [lock.path for lock in find_locks(all_ops - needed) if lock.is_stale]
    young = [lock.path for lock in find_locks(needed) if not lock.is_stale]
    parts = []
    if idle:
        parts.append(f"{_listed(idle)} was left by a build that was killed; this run needs it not, delete it")
    if young:
        parts.append(
            f"this run waits for {_listed(young)}, which nobody on this machine holds: delete it, unless "
            "another machine that shares the folder compiles there now"
        )
    return "; ".join(parts)


def _listed(paths: list[Path]) -> str:
    return ", ".join(map(str, paths))


def _section(config: dict[str, Any], name: str) -> dict[str, Any]:
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def _open_files() -> Iterator[tuple[int, int]]:
    """Give device and number of every file that a process of this machine has open, as far as we may look."""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            descriptors = list(folder.iterdir())
        except OSError:  # gone, or another user's
            continue
        for descriptor in descriptors:
            try:
                status = os.stat(descriptor)
            except OSError:
                continue
            yield status.st_dev, status.st_ino
