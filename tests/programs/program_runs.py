"""Start the programs, in this process or in processes of their own, and read what they leave behind."""

import gzip
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from common.models import model_flops
from common.runs import run_files

ROOT = Path(__file__).resolve().parents[2]
STEPS = {1: "step1_sft", 2: "step2_reward", 3: "step3_ppo"}
TIME_LIMIT = 240  # seconds; a run takes about 10 on an idle machine


def as_flags(values: dict[str, Any]) -> list[str]:
    """Return {"zero_stage": 2, "dry_run": True} as words of a command line."""
    words = []
    for name, value in values.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def selected_params(request: Any) -> list[dict[str, Any]]:
    """Return the parameters of the tests of this file that the session runs."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


def environment(**more: str) -> dict[str, str]:
    """Return a child's environment: one thread, no hub, and no place in a process group of ours."""
    of_a_group = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT LOCAL_WORLD_SIZE LOCAL_SIZE".split()
    kept = {name: value for name, value in os.environ.items() if name not in of_a_group}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"} | more


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(*words: str | Path, processes: int = 2) -> list[str]:
    """Return the command that runs `words` in several processes of this machine."""
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    launcher += ["--master_port", str(free_port())]
    return [sys.executable, *launcher, *map(str, words)]


def deepspeed(*words: str | Path) -> list[str]:
    """Return the command of DeepSpeed's own launcher for two processes."""
    launcher = str(Path(sys.executable).with_name("deepspeed"))
    return [launcher, "--num_gpus", "2", "--master_port", str(free_port()), *map(str, words)]


def run(
    command: Sequence[str], *, cwd: Path = ROOT, may_fail: bool = False, seconds: int = TIME_LIMIT
) -> subprocess.CompletedProcess[str]:
    """Return the finished process; its output tells why when it did not end well."""
    done = subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=seconds
    )
    if not may_fail:
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done


def start(command: Sequence[str], log: Path) -> subprocess.Popen:
    """Start a command in a process group of its own, as a shell does."""
    with open(log, "w") as file:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=file, stderr=file, start_new_session=True
        )


def wait_for_steps(output: Path, metric: str, count: int, process: subprocess.Popen, log: Path) -> None:
    """Return when so many steps have been made."""
    deadline = time.monotonic() + TIME_LIMIT
    while not (output / "metrics.jsonl").exists() or len(read_curve(output, metric)) < count:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def run_here(step: int, values: dict[str, Any] | Sequence[str], *, module: str = "main") -> Any:
    """Return what a program's main function returns in this process, which must be or become a group."""
    words = as_flags(values) if isinstance(values, dict) else list(values)
    program = importlib.import_module(f"{STEPS[step]}.{module}")
    try:
        with mock.patch.object(model_flops, "MEASURED_SECONDS", 0.01):  # of the processor's speed
            return program.main(words)
    except SystemExit as left:  # as running.run_program does for a process of its own
        run_files.release_lock(left.code)
        raise


def files_in(folder: Path) -> set[str]:
    """Return the paths of all files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def read_strictly(text: str) -> Any:
    """Return the content of JSON that every reader takes: no NaN, no Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def assert_json(folder: Path) -> None:
    """Fail where a .json, or a line of a .jsonl, below a folder is not JSON."""
    files = [path for path in folder.rglob("*.json*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".jsonl", ".gz"}
    for path in files:
        whole = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
        for text in whole.splitlines() if ".jsonl" in path.name else [whole]:
            found = read_strictly(text)
            if path.name == "meta.json":  # of a checkpoint
                read_strictly(found["content"])


def read_metrics(output_dir: Path, having: str = "") -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, those with the metric `having` if one is named."""
    rows = [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if not having or having in row]


def read_curve(output_dir: Path, name: str) -> list[float]:
    """Return a metric's values, step by step."""
    return [row[name] for row in read_metrics(output_dir, name)]


def read_weights(export: Path) -> dict[str, torch.Tensor]:
    """Return the weights of an export (or of an adapter) by name."""
    (file,) = export.glob("*.safetensors")
    return load_file(file)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Return how far two sets of weights are apart where they are furthest apart."""
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)
