"""What is installed, beside what requirements.txt asks for. No torch in here but by a guarded import."""

import contextlib
import importlib
import importlib.util
import io
import logging
import os
import platform
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common.flags.args import TRACKERS
from tools.findings import Finding, told

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements.txt"
OLDEST_PYTHON = (3, 11)
IMPORTED = ("torch", "transformers", "deepspeed")  # in this order: deepspeed needs torch
# Their internals are used: another version is not merely untested.
STRICT = frozenset(IMPORTED)
_LINE = re.compile(r"([A-Za-z0-9._-]+)(==|~=)([0-9][0-9.]*)\s*(?:#\s*(.*))?$")


@dataclass(frozen=True)
class Requirement:
    """A line of requirements.txt."""

    name: str
    operator: str  # == or ~=
    release: str
    reason: str = ""
    is_optional: bool = False  # only the demo and examples use it

    def allows(self, found: str) -> bool:
        """Return whether a version is one that was asked for; a local part such as +cu128 does not count."""
        mine, theirs = _numbers(self.release), _numbers(found)
        if self.operator == "==":
            length = max(len(mine), len(theirs))
            return bool(theirs) and _padded(mine, length) == _padded(theirs, length)
        return theirs[: len(mine) - 1] == mine[:-1] and theirs >= mine

    def __str__(self) -> str:
        return f"{self.name}{self.operator}{self.release}"


def _numbers(text: str) -> tuple[int, ...]:
    release = re.match(r"[0-9]+(?:\.[0-9]+)*", text)
    return tuple(int(part) for part in release.group().split(".")) if release else ()


def _padded(release: tuple[int, ...], length: int) -> tuple[int, ...]:
    return release + (0,) * (length - len(release))


def read_requirements(path: Path = REQUIREMENTS) -> list[Requirement]:
    """Return the lines of a requirements file; those under a comment that begins with "Only" are optional."""
    found, is_optional = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            is_optional = line.lstrip("# ").startswith("Only ")
        match = _LINE.match(line)
        if match:
            name, operator, release, reason = match.groups()
            found.append(Requirement(name, operator, release, reason or "", is_optional))
    return found


def check_requirements(path: Path = REQUIREMENTS) -> Iterator[Finding]:
    """Compare Python and every requirement with what is installed."""
    python = platform.python_version()
    is_new = sys.version_info >= OLDEST_PYTHON
    cure = "" if is_new else f"Python {'.'.join(map(str, OLDEST_PYTHON))} or later is needed"
    yield Finding("Python", f"{python}, {sys.executable}", is_new, cure)
    right = []
    for requirement in read_requirements(path):
        try:
            installed = version(requirement.name)
        except PackageNotFoundError:
            yield _missing(requirement)
            continue
        if requirement.allows(installed):
            right.append(f"{requirement.name} {installed}")
            continue
        is_ok = False if requirement.name in STRICT else None
        yield Finding(
            requirement.name,
            f"{installed}, where {requirement} was tested",
            is_ok,
            f'pip install "{requirement}"',
        )
    yield Finding("requirements", f"{len(right)} packages as asked for: {', '.join(right)}", bool(right))


def _missing(requirement: Requirement) -> Finding:
    why = f": {requirement.reason}" if requirement.reason else ""
    is_ok = None if requirement.is_optional else False
    return Finding(requirement.name, f"not installed{why}", is_ok, f'pip install "{requirement}"')


def check_import(name: str) -> Iterator[Finding]:
    """Import a package as the programs do: what is installed may still not load."""
    import_name = f"import {name}"
    noise = io.StringIO()
    torch = sys.modules.get("torch")
    if name == "deepspeed" and torch and not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as common/ranks/distributed.py
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(noise):
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
    except Exception as error:  # a library that is missing, of another version, or half installed
        requirement = next((r for r in read_requirements() if r.name == name), name)
        yield Finding(import_name, told(error), False, f'pip install "{requirement}"')
        return
    yield Finding(import_name, str(getattr(module, "__version__", "loaded")), True)


def check_trackers() -> Iterator[Finding]:
    """Say which of --trackers can be given."""
    have = [kind for kind in TRACKERS if importlib.util.find_spec(kind)]
    lack = [kind for kind in TRACKERS if kind not in have]
    cure = f"pip install {lack[0]}, for one" if lack else ""
    text = f"{', '.join(have) or 'none'} installed" + (f"; {', '.join(lack)} not" if lack else "")
    yield Finding("--trackers", text, True if have else None, cure)
