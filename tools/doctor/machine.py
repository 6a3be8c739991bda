"""Memory, disk, environment variables, and locks of killed builds. No torch in here."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from common.flags.args import Problems
from common.programs.build_locks import build_folders, find_locks
from common.programs.launch_environment import check_environment
from tools.findings import Finding

_GIB = 2**30
# A 125M model's checkpoint is 2 GB, and two are kept; below the first nothing at all can be saved.
LEAST_DISK_GIB, LITTLE_DISK_GIB = 1.0, 20.0
LEAST_MEMORY_GIB, LITTLE_MEMORY_GIB = 1.0, 4.0
LITTLE_SHARED_GIB = 0.25  # nccl's buffers between the GPUs of a machine


def check_environment_variables() -> Iterator[Finding]:
    """Look at what a launcher or a shell has set."""
    problems = Problems()
    if check_environment(problems):
        threads = os.environ.get("OMP_NUM_THREADS")
        text = f"OMP_NUM_THREADS is {threads}" if threads else "OMP_NUM_THREADS is not set"
        yield Finding("environment", f"{text}; {os.cpu_count()} processors", True)
    for message in problems.messages:
        yield Finding("environment", message, False)


def check_build_locks() -> Iterator[Finding]:
    """Name locks that nobody holds: a run that compiles the same kernel would wait for ever."""
    names = {path.name for folder in build_folders() if folder.is_dir() for path in folder.iterdir()}
    locks = find_locks(frozenset(names))
    for lock in locks:
        minutes = lock.silent_seconds / 60
        if lock.is_stale:
            yield Finding(
                "build lock", f"{lock.path}, left {minutes:.0f} minutes ago", False, "delete that file"
            )
        else:
            text = f"{lock.path}: nobody on this machine holds it, but it is {minutes:.1f} minutes old"
            yield Finding("build lock", text, None, "delete it, unless another machine compiles there now")
    if not locks:
        yield Finding("build locks", "none", True)


def check_memory() -> Iterator[Finding]:
    """Say how much memory is free, and for several processes how much they can share."""
    free = free_memory_gib()
    if free is None:
        yield Finding("memory", "the system does not say")
    else:
        yield _room("memory", f"{free:.1f} GiB free", free, LEAST_MEMORY_GIB, LITTLE_MEMORY_GIB)
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total / _GIB
        is_little = size < LITTLE_SHARED_GIB
        cure = "several GPUs may need more: docker run --shm-size 8g" if is_little else ""
        yield Finding("shared memory", f"{size:.1f} GiB in /dev/shm", None if is_little else True, cure)


def free_memory_gib() -> float | None:
    """Return the memory that can be had, the container's limit too where psutil is not; None when unknown."""
    try:
        import psutil

        return psutil.virtual_memory().available / _GIB
    except ImportError:
        pass
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith("MemAvailable:")), "")
    return int(found.split()[1]) / 2**20 if found else None


def check_disk(output_dir: str) -> Iterator[Finding]:
    """Say how much room there is where runs write, and where models and token caches go."""
    places = {
        "disk: output": Path(output_dir),
        "disk: caches": Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser(),
    }
    seen: set[int] = set()
    for name, path in places.items():
        existing = next((p for p in (path, *path.resolve().parents) if p.exists()), Path("/"))
        device = existing.stat().st_dev
        can_write = os.access(existing, os.W_OK)
        if not can_write:
            yield Finding(name, f"{path} cannot be written", False, "choose another place")
        elif device not in seen:
            free = shutil.disk_usage(existing).free / _GIB
            yield _room(name, f"{free:.1f} GiB free at {path}", free, LEAST_DISK_GIB, LITTLE_DISK_GIB)
            seen.add(device)


def _room(name: str, text: str, free: float, least: float, little: float) -> Finding:
    if free >= little:
        return Finding(name, text, True)
    cure = "python -m tools.plan counts what a run needs"
    return Finding(name, text, False if free < least else None, f"less than {little:g} GiB; {cure}")
