"""Checks whether this machine can run the programs: one line per requirement.

A line is ok, a note, or a problem with its cure; the exit code is 1 if there is a problem. It works without
torch, transformers and deepspeed, and then says what to install.

    python -m tools.doctor --learns --stage 3 FLAGS

checks instead whether the run of that step with these flags can learn: see tools/learns.py.
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from common.flags.streams import run_tool

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = ("torch", "transformers", "deepspeed")  # we use their internals: another version is a problem
OK = "ok"
NOTE = "note"
PROBLEM = "problem"
LEARNS = "--learns"
Line = tuple[str, str, str]  # state, subject, result and cure


def check_packages() -> Iterator[Line]:
    """Compare Python and the requirements with the installed versions, and import those in IMPORTED."""
    from packaging.requirements import Requirement

    state = OK if sys.version_info >= (3, 11) else PROBLEM
    yield state, "Python", f"{platform.python_version()}; 3.11 or later is needed"
    for file, if_missing in (("requirements.txt", PROBLEM), ("requirements-demo.txt", NOTE)):
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        texts = [line.partition("#")[0].strip() for line in lines if not line.startswith("-")]
        for text in filter(None, texts):
            wanted = Requirement(text)
            cure = f'pip install "{text}"'
            try:
                installed = importlib.metadata.version(wanted.name)
            except importlib.metadata.PackageNotFoundError:
                yield if_missing, wanted.name, f"not installed; {cure}"
                continue
            if not wanted.specifier.contains(installed, prereleases=True):
                state = PROBLEM if wanted.name in IMPORTED else NOTE
                yield state, wanted.name, f"{installed}, but {text} was tested; {cure}"
    for name in IMPORTED:
        yield try_import(name, "pip install -r requirements.txt")


def try_import(name: str, cure: str) -> Line:
    """Version of a library, or why it cannot be imported."""
    try:
        return OK, f"import {name}", importlib.import_module(name).__version__
    except Exception as error:  # missing, partly installed, or built for another torch
        return PROBLEM, f"import {name}", f"{type(error).__name__}: {error}; {cure}"


def check_devices() -> Iterator[Line]:
    """Name the GPUs that torch sees; report a GPU that only nvidia-smi sees."""
    import torch

    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{torch.cuda.get_device_name(index)}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
        if torch.cuda.get_device_capability(index) < (8, 0):
            yield NOTE, f"GPU {index}", "emulates bf16, and has no attention kernels: --dtype fp32 or fp16"
        is_in_use = free < total / 2
        cure = "; another process uses its memory: nvidia-smi" if is_in_use else ""
        yield NOTE if is_in_use else OK, f"GPU {index}", text + cure
    if torch.cuda.device_count():
        cure = "pip install --no-build-isolation -r requirements-gpu.txt"
        if importlib.util.find_spec("flash_attn"):
            yield try_import("flash_attn", f"{cure} --force-reinstall")
        else:
            text = f"not installed, optional: torch's own kernel is used; {cure}"
            yield NOTE, "import flash_attn", text
        return
    driver = shutil.which("nvidia-smi")
    seen = subprocess.run([driver, "-L"], capture_output=True, text=True, timeout=20).stdout if driver else ""
    if seen.strip():
        cure = "install torch's CUDA build; check CUDA_VISIBLE_DEVICES and the driver's version"
        yield PROBLEM, "GPUs", f"nvidia-smi sees {seen.splitlines()[0]}, but torch does not; {cure}"
    else:
        yield NOTE, "GPUs", "none: programs run on the CPU, in fp32 by default"


def judged(name: str, text: str, cure: str, *, is_ok: bool, is_note: bool = False) -> Line:
    """A line: ok, or a note or problem with its cure."""
    return (OK, name, text) if is_ok else (NOTE if is_note else PROBLEM, name, f"{text}; {cure}")


def main(
    checks: Iterable[Callable[[], Iterable[Line]]] = (check_packages, check_devices),
    verdict: str = "this machine can run the programs",
    file: TextIO | None = None,
) -> int:
    """Print all lines and a verdict; return the exit code."""
    num_problems = 0
    for check in checks:
        try:
            for state, name, text in check():
                print(f"{state:<8} {name:<22} {text}", file=file, flush=True)
                num_problems += state == PROBLEM
        except Exception as error:  # usually a missing package; the next check still runs
            print(f"{PROBLEM:<8} {check.__name__:<22} {type(error).__name__}: {error}", file=file, flush=True)
            num_problems += 1
    print(f"\n{num_problems} problems" if num_problems else f"\nok: {verdict}", file=file)
    return int(num_problems > 0)


def check_learning() -> None:
    """Check whether a run can learn; exits."""
    from common.flags.args import begin_tool, say_loading
    from tools.step_flags import StageArguments, parse_step_args

    sys.argv.remove(LEARNS)
    begin_tool(StageArguments, "Checks whether a run with these flags can learn.", parse_step_args)
    say_loading()
    from common.programs.running import run_program
    from tools.learns import check_run

    run_program(check_run, shows_progress=False)
    raise SystemExit(0)


if __name__ == "__main__":
    if LEARNS in sys.argv:
        check_learning()
    # Not by our own parser, which needs a package.
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(LEARNS, action="store_true", help="check a run; takes --stage and the step's flags")
    parser.parse_args()
    run_tool(main)
