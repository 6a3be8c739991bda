"""What a run notes of itself at each start: when, by which code and versions, on what, with which data."""

import contextlib
import dataclasses
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from common.ranks import distributed
from common.runs.durable_files import read_object
from common.runs.run_files import RUN_FILE
from common.runs.saved_state import Progress, Stateful

OF_CHECKPOINTS = ("torch", "deepspeed", "transformers")
OF_RUNS = (*OF_CHECKPOINTS, "tokenizers", "datasets", "numpy", "peft", "accelerate", "flash-attn")
_GIT_SECONDS = 5.0


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """Return {package: version} of those that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def flag_defaults(args: Any) -> dict[str, Any]:
    """Return {flag: default} of a program's flags."""
    return {
        field.name: field.default if field.default is not dataclasses.MISSING else field.default_factory()
        for field in dataclasses.fields(args)
    }


def describe_run(
    folder: Path, args: Any, parts: Mapping[str, Stateful], *, num_steps: int, is_resumed: bool
) -> dict[str, Any]:
    """Return what run.json is to say: steps, defaults, and this start after those that the file has.

    A run that begins anew has no earlier starts.
    """
    starts = read_object(folder / RUN_FILE).get("starts") if is_resumed else []
    starts = starts if isinstance(starts, list) else []  # what cannot be read decides nothing
    progress: Progress = parts["progress"]
    start = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_step": progress.step,
        "world_size": distributed.world_size(),
        "device": device_name(),
        "dtype": distributed.dtype_name(args.dtype),
        "data_key": progress.data_key,
        "global_rows": next(iter(progress.rows.values())),  # of a step
        "data": progress.about_data,
        "parameters": {n: count_parameters(p.engine) for n, p in parts.items() if hasattr(p, "engine")},
        "code": code_version(),
        "versions": {"python": platform.python_version()} | installed_versions(OF_RUNS),
    }
    return {"num_steps": num_steps, "defaults": flag_defaults(args), "starts": [*starts, start]}


def count_parameters(engine: Any) -> dict[str, int]:
    """Return how many parameters a model has, and how many of them are trained, whatever is sharded."""
    counts = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in engine.module.parameters()]
    return {"all": sum(n for n, _ in counts), "trained": sum(n for n, is_trained in counts if is_trained)}


def device_name() -> str:
    """Return the name of this rank's GPU, or of the kind of processor."""
    if distributed.has_gpu():
        return torch.cuda.get_device_name(distributed.device())
    return f"CPU {platform.machine()}"


def code_version() -> str:
    """Return the commit of these files, with a plus where they were changed; "" where there is no git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
