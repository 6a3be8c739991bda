"""The tables of a report as rows of plain texts: time by phase, last values, flags, data, versions."""

import json
import re
from collections.abc import Sequence
from typing import Any

from common.runs.report.charts import join_on_steps, shown
from common.runs.run_files import RunFiles, count_gaps, is_number

# What `StepCosts` counts apart, in the order of a step.
PHASES = {
    "data": "drawing prompts",
    "switch": "switch to generation and back",
    "generate": "generation",
    "gather": "exchange with other ranks",
    "actor_score": "actor's log-probabilities",
    "reference": "reference",
    "critic": "critic's values",
    "reward": "rewards",
    "advantages": "advantages",
    "actor_update": "update of the actor",
    "critic_update": "update of the critic",
    "forward_backward": "forward and backward passes",
    "optimizer": "optimizer",
    "rest": "rest of the steps",
    "evaluate": "evaluation",
    "save": "checkpoints",
}
START_FACTS = {
    "time": "started",
    "from_step": "from step",
    "world_size": "ranks",
    "device": "device",
    "dtype": "precision",
    "data_key": "data digest",
    "global_rows": "rows a step",
    "code": "code",
}
# Where a run writes to, and how it was started: two runs always differ in these.
NOT_COMPARED = {"output_dir", "overwrite_output_dir", "local_rank", "resume", "dry_run"}
# What a step learns from: its tokens a second, and the seconds that they are of.
LEARNT = (
    ("perf/tokens_per_second", "perf/step_seconds"),
    ("perf/actor_update_tokens_per_second", "perf/actor_update_seconds"),
)
MISSING = "–"
Cell = str | tuple[str, str]  # a text, or with a class of the style sheet


def as_duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 3 min 20 s, 5 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def find_phases(run: RunFiles) -> list[tuple[str, float]]:
    """Return the seconds of each phase, all of the run's clock together; phases without any are left out.

    A phase is any perf/PHASE_seconds but those of whole steps; "outside steps" is what no step counted: the
    start, data, exports.
    """
    names = {match[1] for name in run.curves if (match := re.fullmatch(r"perf/(\w+)_seconds", name))} - {
        "step"
    }
    order = [*PHASES, *sorted(names - {*PHASES})]
    totals = {name: sum(run.curves[f"perf/{name}_seconds"].values) for name in order if name in names}
    phases = [(PHASES.get(name, name.replace("_", " ")), seconds) for name, seconds in totals.items()]
    phases.append(("outside steps", run.seconds - sum(totals.values())))
    # What rounding leaves over is no phase.
    return [(name, seconds) for name, seconds in phases if seconds > 1e-3 * max(run.seconds, 1e-9)]


def build_phases(run: RunFiles) -> list[tuple[str, float, str]]:
    """Return (phase, its share in percent, what the legend says)."""
    phases = find_phases(run)
    total = sum(seconds for _, seconds in phases)
    shares = [(name, 100 * seconds / total, as_duration(seconds)) for name, seconds in phases]
    return [(name, share, f"{name} {duration}, {share:.0f} %") for name, share, duration in shares]


def last_values(runs: Sequence[RunFiles], metrics: Sequence[str]) -> list[list[Cell]]:
    """Return the last value of every metric, a column for each run, and how often it was not finite."""
    gaps = [count_gaps(run.rows) for run in runs]
    rows: list[list[Cell]] = [["last value of", *(run.name for run in runs)]]
    for name in metrics:
        cells: list[Cell] = [name]
        for run, of in zip(runs, gaps, strict=True):
            value = shown(run.curves[name].last) if name in run.curves else MISSING
            cells.append((f"{value}, {of[name]} × not finite", "bad") if of[name] else value)
        rows.append(cells)
    return rows


def flag_value(value: Any) -> Cell:
    """Return a flag's value as a cell."""
    text = " ".join(map(str, value)) if isinstance(value, list) else value
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    return (text, "code") if text else ("empty", "quiet")


def changed_flags(run: RunFiles) -> dict[str, tuple[Any, Any]]:
    """Return {flag: (value, default)} of those that differ; flags whose default is not known are left out."""
    defaults = run.defaults()
    return {n: (v, defaults[n]) for n, v in sorted(run.flags.items()) if n in defaults and v != defaults[n]}


def differing_flags(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Return {flag: its value in each run, or None} of those that are not the same in all runs."""
    names = sorted({name for run in runs for name in run.flags} - NOT_COMPARED)
    values = {name: [run.flags.get(name) for run in runs] for name in names}
    return {name: of for name, of in values.items() if any(value != of[0] for value in of)}


def build_configuration(run: RunFiles) -> dict[str, Any]:
    """Return a run's flags that are not at their default, and all of them, or why they are not known."""
    changed = [[f"--{n}", *map(flag_value, values)] for n, values in changed_flags(run).items()]
    note = "" if changed else "All flags are at their defaults."
    if not run.defaults():
        note = "The folder does not say what the defaults were; all flags are below."
    if not run.flags:
        note = "The folder does not say with which flags it was made."
    return {
        "note": note,
        "changed": [["not at its default", "value", "default"], *changed],
        "all": [
            ["flag", "value"],
            *([f"--{name}", flag_value(value)] for name, value in sorted(run.flags.items())),
        ],
    }


def data_facts(run: RunFiles) -> dict[str, str]:
    """Return rows, tokens, what was cut, passes over the rows, and each model's parameters, where known."""
    start = run.starts()[-1] if run.starts() else {}
    data, models = (start[n] if isinstance(start.get(n), dict) else {} for n in ("data", "parameters"))
    data = {name: count for name, count in data.items() if is_number(count)}
    found = {}
    num_train, num_rows = data.get("num_train"), start.get("global_rows")
    if num_train:
        num_kept = num_train + data.get("num_eval", 0)
        num_truncated = data.get("num_truncated", 0)
        found["rows to train on"] = f"{num_train:,} of {data.get('num_raw_rows', 0):,} raw rows"
        found["rows held out"] = f"{data.get('num_eval', 0):,}"
        found["tokens of these rows"] = f"{data.get('num_tokens', 0):,}"
        found["truncated"] = f"{num_truncated:,}, {100 * num_truncated / num_kept:.1f} %"
        if is_number(num_rows):
            found["passes over the rows"] = f"{run.last_step * num_rows / num_train:.2f}"
    seen = 0.0
    for rate, seconds in LEARNT:
        if {rate, seconds} <= run.curves.keys():
            rates, durations = join_on_steps(run.curves[rate], run.curves[seconds])
            seen += sum(one * other for one, other in zip(rates, durations, strict=True))
    if seen:
        found["tokens seen in training"] = f"{seen:,.0f}"
    for name, count in models.items():
        if isinstance(count, dict) and is_number(count.get("all")) and is_number(count.get("trained")):
            found[f"parameters of the {name}"] = f"{count['all']:,}, {count['trained']:,} trained"
    return found


def _start_facts(start: dict[str, Any]) -> dict[str, str]:
    facts = {
        told: str(start[name]) for name, told in START_FACTS.items() if start.get(name) not in (None, "")
    }
    versions = start.get("versions")
    return facts | ({str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {})


def build_provenance(runs: Sequence[RunFiles]) -> list[list[Cell]]:
    """Return versions, device and data digest of each start; a change between them is marked."""
    heads, facts = [], []
    for run in runs:
        for number, start in enumerate(run.starts(), start=1):
            which = f"start {number}" if len(run.starts()) > 1 else ""
            heads.append(" ".join(filter(None, (run.name if len(runs) > 1 else "", which))) or "value")
            facts.append(_start_facts(start))
    table = join_facts(heads, facts)
    for row in table[1:]:
        is_same = len({*row[1:]}) == 1 or row[0] in ("started", "from step")
        row[1:] = [(cell, "code" if is_same else "code bad") for cell in row[1:]]
    return table


def join_facts(heads: Sequence[str], facts: Sequence[dict[str, str]]) -> list[list[Cell]]:
    """Return a table of facts by name, a column each; [] where there are none."""
    names = list(dict.fromkeys(name for of in facts for name in of))
    rows: list[list[Cell]] = [[name, *(of.get(name, MISSING) for of in facts)] for name in names]
    return [["", *heads], *rows] if rows else []
