"""Reads the files of a run's folder, and reports torn or missing ones."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.runs.durable_files import read_if_whole
from common.runs.run_files import ARGS_FILE, FINISHED_FILE, METRICS, PLAN_FILE, RUN_FILE, SAMPLES

Row = dict[str, Any]
PLAN = {"seconds": dict, "memory_gib": dict, "source": str, "lengths": str}  # what the report reads of it
# Kind of run by metric group.
KINDS = {"sft": "sft", "objective": "ppo", "eval": "ppo", "reward": "reward", "dpo": "dpo", "kto": "kto"}


@dataclass(frozen=True)
class Curve:
    """One metric of a run over its steps, or over another metric; each step occurs once, with its last
    value.
    """

    steps: list[float]
    values: list[float]

    @property
    def last(self) -> float:
        """The newest value."""
        return self.values[-1]


@dataclass
class RunFiles:
    """The contents of a run's folder."""

    folder: Path
    name: str
    rows: list[Row]  # rows of metrics.jsonl
    samples: list[Row]
    flags: dict[str, Any]
    defaults: dict[str, Any]  # default flags; {} if the run did not write them
    starts: list[dict[str, Any]]  # facts recorded at each start, in order
    num_steps: int  # planned steps; 0 if unknown
    has_finished: bool
    curves: dict[str, Curve]
    plan: Row  # content of plan.json; {} if there is none
    notes: list[str]  # notes on torn or missing files

    @property
    def last_step(self) -> int:
        """The newest step with metrics, 0 before the first."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def seconds(self) -> float:
        """The newest value of the run's clock, without the time between starts; 0 if unknown."""
        return max((row.get("seconds", 0.0) for row in self.rows), default=0.0)

    @cached_property
    def gaps(self) -> Counter[str]:
        """How often each metric was null: NaN or infinity."""
        return Counter(name for row in self.rows for name, value in row.items() if value is None)

    @property
    def kind(self) -> str:
        """`sft`, `reward`, `dpo`, `kto`, `ppo` or "", by the groups of the metrics."""
        groups = {name.split("/")[0] for name in self.curves}
        return next((kind for group, kind in KINDS.items() if group in groups), "")

    @property
    def state(self) -> str:
        """Progress of the run, as text."""
        if self.has_finished or 0 < self.num_steps <= self.last_step:
            return f"finished, {self.last_step} steps"
        return f"step {self.last_step} of {self.num_steps}" if self.num_steps else f"{self.last_step} steps"


def read_run(folder: Path, name: str = "") -> RunFiles:
    """Everything readable in a run's folder. Raises ValueError if it is not a run's."""
    if not (folder / METRICS).is_file() and not (folder / ARGS_FILE).is_file():
        if not folder.exists():
            raise ValueError(f"{folder} does not exist")
        inner = sorted(str(path.parent) for path in folder.glob(f"*/{METRICS}"))
        hint = f"; did you mean {', '.join(inner[:3])}?" if inner else ""
        raise ValueError(f"{folder} is not a run's folder: it has neither {METRICS} nor {ARGS_FILE}{hint}")
    notes: list[str] = []
    rows = read_rows(folder / METRICS, notes)
    flags = read_if_whole(folder / ARGS_FILE)
    about = read_if_whole(folder / RUN_FILE, defaults=dict, starts=list, num_steps=int)
    plan = read_if_whole(folder / PLAN_FILE, **PLAN)
    if not plan.keys() >= PLAN.keys():
        plan = {}
        notes += [f"{PLAN_FILE} is torn"] * (folder / PLAN_FILE).exists()
    notes += [f"{METRICS} has no step yet"] if not rows else []
    notes += [f"{file} is missing or torn" for file, of in ((ARGS_FILE, flags), (RUN_FILE, about)) if not of]
    return RunFiles(
        folder=folder,
        name=name or folder.resolve().name,
        rows=rows,
        samples=read_rows(folder / SAMPLES, notes),
        flags=flags,
        defaults=about.get("defaults", {}),
        starts=about.get("starts", []),
        num_steps=about.get("num_steps", 0),
        has_finished=(folder / FINISHED_FILE).is_file(),
        curves=build_curves(rows),
        plan=plan,
        notes=notes,
    )


def read_runs(folders: Sequence[Path]) -> tuple[list[RunFiles], list[str]]:
    """The readable runs, and the problems of the other folders.

    A run is named by its folder's path relative to the folder that holds all of them.
    """
    runs, problems = [], []
    paths = [folder.resolve() for folder in folders]
    for folder, path in zip(folders, paths, strict=True):
        name = os.path.relpath(path, os.path.commonpath([path.parent for path in paths]))
        try:
            runs.append(read_run(folder, name))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return runs, problems


def build_curves(rows: Sequence[Row]) -> dict[str, Curve]:
    """{metric: its values over the steps}; non-finite values were written as null, and are gaps."""
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        for name, value in row.items():
            if "/" in name and value is not None:
                points.setdefault(name, {})[row["step"]] = float(value)
    return {name: Curve(list(of), list(of.values())) for name, of in points.items()}


def read_rows(path: Path, notes: list[str]) -> list[Row]:
    """Rows of a run's .jsonl file, none if it is missing; adds a note on torn lines."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []
    rows, torn = [], []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line) if line else None
        except (ValueError, RecursionError):  # a killed run, or one that is still writing
            row = ()
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
        elif row is not None:
            torn.append(number)
    if torn:
        numbers = ", ".join(map(str, torn[:3])) + (", ..." if len(torn) > 3 else "")
        notes.append(f"{path.name}: torn lines are skipped (line {numbers})")
    return rows
