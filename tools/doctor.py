"""Whether this machine can run the programs: a line for each thing that a run needs.

A line is ok, a note, or a problem with its cure; the exit code is 1 where there is a problem. torch,
transformers and deepspeed may be absent: then it says what to install.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.flags.args import Problems, flag, parse_args

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ("torch", "transformers", "deepspeed")  # their internals are used: another version is a problem
# (least, little) free GiB. A 125M model's checkpoint is 2 GB, and two are kept.
DISK_GIB, MEMORY_GIB = (1.0, 20.0), (1.0, 4.0)
OK, NOTE, PROBLEM = "ok", "note", "problem"
Line = tuple[str, str, str]  # state, what was looked at, what was found and the cure

SELF_TEST = """
import deepspeed, torch
from common.engine.ds_config import EngineOptions, build_train_config
from common.engine.optim import build_optimizer
from common.ranks import distributed
distributed.start()
distributed.seed_everything(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
options = EngineOptions(zero_stage=2, dtype=distributed.dtype_name(), micro_batch_size=4)
optimizer = build_optimizer(model, learning_rate=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=build_train_config(options))
x = torch.randn(4, 8, device=distributed.device(), dtype=next(engine.parameters()).dtype)
losses = []
for _ in range(2):
    loss = engine(x).float().square().mean()
    losses.append(float(loss))
    engine.backward(loss)
    engine.step()
assert losses[1] < losses[0], f"a step of AdamW did not lower the loss: {losses}"
print(f"loss {losses[0]:.3f}, after a step {losses[1]:.3f}, on {distributed.device()}", flush=True)
"""


@dataclass
class DoctorArguments:
    """What is looked at."""

    output_dir: str = flag(".", "where runs are going to write: the room there is looked at")
    self_test_seconds: float = flag(
        300.0, "seconds that a step of training under ZeRO 2 may take, imports included; 0: none", low=0
    )


def check_packages() -> Iterator[Line]:
    """Compare Python and every line of requirements.txt with what is installed, and load the three."""
    from packaging.requirements import Requirement

    state = OK if sys.version_info >= (3, 11) else PROBLEM
    yield state, "Python", f"{platform.python_version()}, where 3.11 or later is needed"
    right, is_optional = 0, False
    for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            is_optional = line.startswith("# Only ") if line else is_optional
            continue
        wanted, cure = Requirement(text), f'pip install "{text}"'
        try:
            installed = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            yield NOTE if is_optional else PROBLEM, wanted.name, f"not installed; {cure}"
            continue
        if wanted.specifier.contains(installed, prereleases=True):
            right += 1
        else:
            state = PROBLEM if wanted.name in IMPORTED else NOTE
            yield state, wanted.name, f"{installed}, where {text} was tested; {cure}"
    yield OK, "requirements", f"{right} packages as asked for"
    for name in IMPORTED:
        try:
            yield OK, f"import {name}", getattr(importlib.import_module(name), "__version__", "loaded")
        except Exception as error:  # a library that is missing, of another version, or half installed
            text = f"{type(error).__name__}: {error}; pip install -r requirements.txt"
            yield PROBLEM, f"import {name}", text
    for name in ("deepspeed", "torchrun"):
        if not shutil.which(name):
            yield NOTE, name, "not on PATH; activate the environment of this Python"


def check_devices() -> Iterator[Line]:
    """Name the GPUs that torch sees, and say where it does not see one that is there."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        told = ""
        if shutil.which("nvidia-smi"):
            told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20).stdout
        if told.strip():
            cure = "install torch's CUDA build; look at CUDA_VISIBLE_DEVICES and at the driver's age"
            yield PROBLEM, "GPUs", f"nvidia-smi sees {told.splitlines()[0]}, and torch does not; {cure}"
        else:
            yield NOTE, "GPUs", "none: programs run on the CPU, in fp32 by default"
        return
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if free < total / 2:
            yield NOTE, f"GPU {index}", f"{text}; another process holds its memory: nvidia-smi"
        else:
            yield OK, f"GPU {index}", text
    if importlib.util.find_spec("flash_attn") is None:
        cure = "pip install --no-build-isolation -r requirements-gpu.txt"
        yield NOTE, "flash-attn", f"not installed: --packed uses torch's own kernel; {cure}"


def check_environment() -> Iterator[Line]:
    """Look at a launcher's variables."""
    from common.programs import environment

    problems = Problems()
    environment.check_environment(problems)
    for message in problems.messages or [""]:
        yield PROBLEM if message else OK, "environment", message or "no launcher's variable is wrong"


def check_room(output_dir: str) -> Iterator[Line]:
    """Say how much memory is free, and how much room there is where runs write and where caches go."""
    import psutil

    yield _room("memory", psutil.virtual_memory().available, MEMORY_GIB)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    for path in (Path(output_dir), cache):
        existing = next(p for p in (path, *path.resolve().parents) if p.exists())
        if os.access(existing, os.W_OK):
            yield _room(f"disk: {path}", shutil.disk_usage(existing).free, DISK_GIB)
        else:
            yield PROBLEM, f"disk: {path}", "cannot be written; choose another place"


def _room(name: str, num_bytes: float, limits: tuple[float, float]) -> Line:
    free, (least, little) = num_bytes / 2**30, limits
    if free >= little:
        return OK, name, f"{free:.1f} GiB free"
    state = PROBLEM if free < least else NOTE
    cure = "python -m tools.plan counts what a run needs"
    return state, name, f"{free:.1f} GiB free, less than {little:g}; {cure}"


def check_training(seconds: float) -> Iterator[Line]:
    """Make a step under ZeRO 2 in a process of its own: a crash or a hang is a line."""
    of_a_launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")  # with them it would wait for others
    kept = {name: value for name, value in os.environ.items() if name not in of_a_launcher}
    command = [sys.executable, "-c", SELF_TEST]
    try:
        done = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        yield PROBLEM, "self-test", f"took longer than {seconds:g} s; --self_test_seconds gives it longer"
        return
    told = [line for line in (done.stderr if done.returncode else done.stdout).splitlines() if line.strip()]
    yield PROBLEM if done.returncode else OK, "self-test", told[-1] if told else "it said nothing"


def guarded(check: Callable[..., Iterator[Line]], *args: object) -> Iterator[Line]:
    """Yield what a check finds; what it raises is a problem, and the next check still runs."""
    try:
        yield from check(*args)
    except Exception as error:
        yield PROBLEM, check.__name__, f"{type(error).__name__}: {error}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is found and a verdict; return the exit code."""
    problems = Problems()
    argv = sys.argv[1:] if argv is None else list(argv)
    args = parse_args(DoctorArguments, argv, description=__doc__.splitlines()[0], problems=problems)
    problems.exit_if_any()
    checks = [(check_packages,), (check_devices,), (check_environment,), (check_room, args.output_dir)]
    checks += [(check_training, args.self_test_seconds)] if args.self_test_seconds else []
    num_bad = 0
    for check in checks:
        for state, name, text in guarded(*check):
            print(f"{state:<8} {name:<22} {text}", flush=True)
            num_bad += state == PROBLEM
    print(f"\n{num_bad} problems" if num_bad else "\nok: this machine can run the programs")
    return int(num_bad > 0)


if __name__ == "__main__":
    raise SystemExit(main())
