"""Work that one process does for all, with its failure told to all."""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

WAIT = timedelta(hours=24)  # tokenising millions of rows outlasts the default time limit of a collective


def make_on_first_rank(make: Callable[[], Path]) -> Path:
    """`make()` on rank 0 gives the folder it filled; the others wait for it. Every rank must call this.

    A machine that does not share rank 0's disk fills its own, on its first process.

    Raises:
        ValueError: on every rank, when `make` raised one anywhere.
        RuntimeError: on the other ranks, when `make` raised anything else.
    """
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return make()
    group = dist.new_group(backend="gloo", timeout=WAIT)
    try:
        folder = _share(make if dist.get_rank() == 0 else None, group)
        is_absent = folder is None or not folder.exists()
        is_first_here = int(os.environ.get("LOCAL_RANK", "0")) == 0
        own = _share(make if is_absent and is_first_here else None, group, everyone=True)
        return own or folder
    finally:
        dist.destroy_process_group(group)


def _share(make: Callable[[], Path] | None, group: dist.ProcessGroup, everyone: bool = False) -> Path | None:
    """Run `make` where there is one, then let all ranks know what came out of it."""
    path, failure, raised = None, None, None
    if make is not None:
        try:
            path = make()
        except Exception as error:
            raised, failure = error, (isinstance(error, ValueError), str(error))
    outcomes: list = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (path, failure), group=group)
    if raised is not None:
        raise raised
    for rank, (_, told) in enumerate(outcomes):
        if told is not None:
            is_value_error, text = told
            raise ValueError(text) if is_value_error else RuntimeError(f"rank {rank} failed: {text}")
    return path if everyone else outcomes[0][0]
