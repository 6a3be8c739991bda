"""Reads the files of a run's folder, and names what is torn or missing."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.runs.run_files import ARGS_FILE, FINISHED_FILE, METRICS, RUN_FILE, SAMPLES

Row = dict[str, Any]
LARGEST = 1e150  # sums of such numbers are still finite
KINDS = {"sft": "sft", "objective": "ppo", "eval": "ppo", "reward": "reward", "dpo": "dpo"}  # by metric group


class NoRun(ValueError):
    """A folder has nothing of a run; the message says what was looked for."""


@dataclass(frozen=True)
class Curve:
    """One metric of a run over its steps; a step comes once, with its last value."""

    steps: list[int]
    values: list[float]

    @property
    def last(self) -> float:
        """Return the newest value."""
        return self.values[-1]


@dataclass
class RunFiles:
    """What a run's folder says."""

    folder: Path
    name: str
    rows: list[Row] = field(default_factory=list)
    samples: list[Row] = field(default_factory=list)
    flags: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(
        default_factory=dict
    )  # of the flags; {} where the run did not write them
    starts: list[dict[str, Any]] = field(default_factory=list)  # what was noted at each, the first one first
    num_steps: int = 0  # that it was to have; 0 where it does not say
    has_finished: bool = False
    notes: list[str] = field(default_factory=list)
    curves: dict[str, Curve] = field(default_factory=dict)

    @property
    def last_step(self) -> int:
        """Return the newest step with metrics, 0 before the first."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def seconds(self) -> float:
        """Return the newest of the run's clock, stops left out; 0 when it does not say."""
        return max((float(row["seconds"]) for row in self.rows if is_number(row.get("seconds"))), default=0.0)

    @property
    def kind(self) -> str:
        """Return `sft`, `reward`, `dpo`, `ppo` or ``, by the groups of the metrics."""
        groups = {name.split("/")[0] for name in self.curves}
        return next((kind for group, kind in KINDS.items() if group in groups), "")

    @property
    def state(self) -> str:
        """Return how far the run is."""
        if self.has_finished or 0 < self.num_steps <= self.last_step:
            return f"finished, {self.last_step} steps"
        return f"step {self.last_step} of {self.num_steps}" if self.num_steps else f"{self.last_step} steps"


def is_number(value: Any) -> bool:
    """Whether it is a number that a chart can hold: finite, and no monster; JSON's true is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def read_run(folder: Path, name: str = "") -> RunFiles:
    """Return what can be read of a run's folder. Raises NoRun when it has nothing of one."""
    if not folder.is_dir():
        raise NoRun(f"{folder} is no folder" if folder.exists() else f"{folder} does not exist")
    if not any((folder / file).is_file() for file in (METRICS, ARGS_FILE)):
        inner = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
        hint = f"; did you mean {', '.join(str(folder / n) for n in inner[:3])}?" if inner else ""
        raise NoRun(f"{folder} is no run's folder: it has neither {METRICS} nor {ARGS_FILE}{hint}")
    run = RunFiles(folder, name or folder.resolve().name)
    run.rows = read_rows(folder / METRICS, run.notes, is_expected=True)
    run.samples = read_rows(folder / SAMPLES, run.notes)
    run.flags = _read_object(folder / ARGS_FILE, run.notes)
    about = _read_object(folder / RUN_FILE, run.notes)
    if isinstance(about.get("num_steps"), int):
        run.num_steps = about["num_steps"]
    if isinstance(about.get("defaults"), dict):
        run.defaults = about["defaults"]
    if isinstance(about.get("starts"), list):
        run.starts = [start for start in about["starts"] if isinstance(start, dict)]
    run.has_finished = (folder / FINISHED_FILE).is_file()
    run.curves = build_curves(run.rows)
    if not run.rows:
        run.notes.append(f"{METRICS} has no step yet")
    return run


def read_runs(folders: Sequence[Path]) -> tuple[list[RunFiles], list[str]]:
    """Return the runs that can be read, and what is wrong with the other folders."""
    runs, problems = [], []
    for folder, name in zip(folders, name_runs(folders), strict=True):
        try:
            runs.append(read_run(folder, name))
        except NoRun as error:
            problems.append(str(error))
    return runs, problems


def build_curves(rows: Sequence[Row]) -> dict[str, Curve]:
    """Return {metric: its values over the steps}; what is not finite was written as null, and is a gap."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if "/" in name and is_number(value):
                points.setdefault(name, {})[row["step"]] = float(value)
    return {name: Curve(sorted(of), [of[step] for step in sorted(of)]) for name, of in points.items()}


def count_gaps(rows: Sequence[Row]) -> Counter[str]:
    """Return how often a metric was null: NaN or infinity."""
    return Counter(name for row in rows for name, value in row.items() if "/" in name and value is None)


def read_rows(path: Path, notes: list[str], *, is_expected: bool = False) -> list[Row]:
    """Return the objects of a run's .jsonl that have a step; add a note on lines that are torn.

    This is the only reader of these files: a killed run, a full disk, or two runs may have torn any line.
    """
    lines = _read_text(path, notes, is_expected=is_expected).split("\n")
    rows = [_parse_object(line) for line in lines]
    bad = [i + 1 for i, line in enumerate(lines) if line.strip() and rows[i] is None]
    if bad and bad[-1] == len(lines):  # no line break behind it
        bad.pop()
        notes.append(f"the last line of {path.name} is torn: the run was killed in it, or is writing it now")
    if bad:
        told = ", ".join(map(str, bad[:3])) + (", ..." if len(bad) > 3 else "")
        notes.append(f"{path.name}: {len(bad)} lines are no JSON objects and are left out (line {told})")
    return [row for row in rows if row and isinstance(row.get("step"), int)]


def _read_object(path: Path, notes: list[str]) -> dict[str, Any]:
    text = _read_text(path, notes)
    found = _parse_object(text)
    if text and found is None:
        notes.append(f"{path.name} is no JSON object, or torn")
    return found or {}


def _read_text(path: Path, notes: list[str], *, is_expected: bool = True) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if is_expected:
            notes.append(f"{path.name} is missing")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
    return ""


def _parse_object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def name_runs(folders: Sequence[Path]) -> list[str]:
    """Return a name for each folder: its last part, with as many before it as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    names = [part[-1] if part else "/" for part in parts]
    for depth in range(2, 8):
        if len(set(names)) == len(names):
            break
        names = ["/".join(part[-depth:]) for part in parts]
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, start=1)]
