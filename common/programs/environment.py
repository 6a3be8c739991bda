"""What may be wrong around a program before it starts: a launcher's variables, locks of killed builds.

No torch in here.
"""

import contextlib
import os
import sys
import time
from pathlib import Path

import psutil

from common.flags.args import Problems

OF_A_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MASTER_PORT")
NEEDED_WITH_RANK = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START = "start by deepspeed or torchrun, which set all of them, or unset them for one process"
# A compiler may be silent for minutes; after this nobody works there, from another machine neither.
STALE_SECONDS = 300.0


def check_environment(problems: Problems) -> bool:
    """Return whether all is right after adding what is not: a launcher's variables, OMP_NUM_THREADS."""
    before = len(problems.messages)
    values = {name: os.environ[name] for name in OF_A_LAUNCHER if name in os.environ}
    for name, text in values.items():
        problems.check(_is_whole(text), f"{name}={text} in the environment is no whole number; {START}")
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    problems.check(
        all(_is_whole(part) and int(part) > 0 for part in threads.split(",")),
        f"OMP_NUM_THREADS={threads} in the environment is no number of threads; set it to 1, or unset it",
    )
    if len(problems.messages) == before:
        _check_ranks({name: int(text) for name, text in values.items()}, problems)
    return len(problems.messages) == before


def _check_ranks(values: dict[str, int], problems: Problems) -> None:
    world_size = values.get("WORLD_SIZE", 1)
    if "RANK" not in values:
        problems.check(
            world_size == 1, f"WORLD_SIZE={world_size} is in the environment and RANK is not; {START}"
        )
        return
    missing = [name for name in NEEDED_WITH_RANK if not os.environ.get(name)]
    if missing:
        problems.add(f"RANK is in the environment and {', '.join(missing)} not; {START}")
        return
    rank, port = values["RANK"], values["MASTER_PORT"]
    problems.check(
        rank < world_size, f"RANK={rank} is not below WORLD_SIZE={world_size}: ranks count from 0; {START}"
    )
    problems.check(0 < port < 2**16, f"MASTER_PORT={port} is no port; use one from 1024 to 65535")


def _is_whole(text: str) -> bool:
    return text.strip().isascii() and text.strip().isdigit()


def find_build_locks() -> dict[Path, float]:
    """Return the locks of DeepSpeed's kernels that no process of this machine holds, with the seconds since
    anything beside them was written.

    torch.utils.cpp_extension holds a file called `lock` open while it compiles a kernel. A build that is
    killed leaves the file, and who needs the kernel next waits for ever.
    """
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "torch_extensions"
    version = f"py{sys.version_info.major}{sys.version_info.minor}"  # one for the CPU, one for CUDA
    locks = Path(root).glob("*/lock") if root else cache.glob(f"{version}*_*/*/lock")
    found = {}
    for lock in sorted(locks):
        with contextlib.suppress(FileNotFoundError):  # its builder has finished meanwhile
            newest = max(file.stat().st_mtime for file in (lock, *lock.parent.iterdir()))
            if not _is_held(lock):
                found[lock] = max(time.time() - newest, 0.0)
    return found


def _is_held(path: Path) -> bool:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone, or another user's
            if any(Path(file.path) == path.resolve() for file in process.open_files()):
                return True
    return False
