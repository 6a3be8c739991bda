"""The tables of a report as rows of plain texts: time by phase, last values, flags, data, versions."""

import json
import re
from collections.abc import Sequence
from typing import Any

from tools.report import LAYOUT
from tools.report.charts import join_on_steps, shown
from tools.report.run_reader import RunFiles, count_gaps, is_number

# Where a run writes to, and how it was started: two runs always differ in these.
NOT_COMPARED = {"output_dir", "local_rank", "resume", "dry_run"}
# What a step learns from: its tokens a second, and the seconds that they are of.
LEARNT = (
    ("perf/tokens_per_second", "perf/step_seconds"),
    ("perf/actor_update_tokens_per_second", "perf/actor_update_seconds"),
)
MISSING = "–"
Cell = str | tuple[str, str]  # a text, or with a class of the style sheet
Table = list[list[Cell]]  # the first row has the heads


def as_duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 3 min 20 s, 5 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def find_phases(run: RunFiles) -> dict[str, float]:
    """Return the seconds of each phase, all of the run's clock together; phases without any are left out.

    A phase is any perf/PHASE_seconds but those of whole steps; "outside steps" is what no step counted: the
    start, data, exports.
    """
    found = (re.fullmatch(r"perf/(\w+)_seconds", name) for name in run.curves)
    names = {match[1] for match in found if match} - {"step"}
    told = LAYOUT["phases"]
    order = [name for name in told if name in names] + sorted(names - told.keys())
    phases = {
        told.get(name, name.replace("_", " ")): sum(run.curves[f"perf/{name}_seconds"].values)
        for name in order
    }
    phases["outside steps"] = run.seconds - sum(phases.values())
    # What rounding leaves over is no phase.
    return {name: seconds for name, seconds in phases.items() if seconds > 1e-3 * max(run.seconds, 1e-9)}


def build_phases(run: RunFiles) -> list[tuple[float, str]]:
    """Return of each phase its share in percent, and what the legend says."""
    phases = find_phases(run)
    shares = {name: 100 * seconds / sum(phases.values()) for name, seconds in phases.items()}
    return [(shares[n], f"{n} {as_duration(phases[n])}, {shares[n]:.0f} %") for n in phases]


def last_values(runs: Sequence[RunFiles], metrics: Sequence[str]) -> Table:
    """Return the last value of every metric, a column for each run, and how often it was not finite."""
    rows: Table = [["last value of", *(run.name for run in runs)], *([name] for name in metrics)]
    for run in runs:
        gaps = count_gaps(run.rows)
        for name, row in zip(metrics, rows[1:], strict=True):
            value = shown(run.curves[name].last) if name in run.curves else MISSING
            row.append((f"{value}, {gaps[name]} × not finite", "bad") if gaps[name] else value)
    return rows


def flag_value(value: Any) -> Cell:
    """Return a flag's value as a cell."""
    text = " ".join(map(str, value)) if isinstance(value, list) else value
    text = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    return (text, "code") if text else ("empty", "quiet")


def differing_flags(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Return {flag: its value in each run, or None} of those that are not the same in all runs."""
    names = sorted({name for run in runs for name in run.flags} - NOT_COMPARED)
    values = {name: [run.flags.get(name) for run in runs] for name in names}
    return {name: of for name, of in values.items() if any(value != of[0] for value in of)}


def build_configuration(run: RunFiles) -> dict[str, Table]:
    """Return `changed`: a run's flags that are not at their default where it is known, and `all` of them."""
    defaults = run.defaults()
    changed: Table = [["not at its default", "value", "default"]]
    everything: Table = [["flag", "value"]]
    for name, value in sorted(run.flags.items()):
        everything.append([f"--{name}", flag_value(value)])
        if name in defaults and value != defaults[name]:
            changed.append([f"--{name}", flag_value(value), flag_value(defaults[name])])
    return {"changed": changed, "all": everything}


def data_facts(run: RunFiles) -> dict[str, str]:
    """Return rows, tokens, what was cut, passes over the rows, and each model's parameters, where known."""
    start = run.starts()[-1] if run.starts() else {}
    data, models = (start[n] if isinstance(start.get(n), dict) else {} for n in ("data", "parameters"))
    counts = {name: count for name, count in data.items() if is_number(count)}
    facts = {}
    if num_train := counts.get("num_train"):
        num_eval, num_truncated = counts.get("num_eval", 0), counts.get("num_truncated", 0)
        share = 100 * num_truncated / (num_train + num_eval)
        facts["rows to train on"] = f"{num_train:,} of {counts.get('num_raw_rows', 0):,} raw rows"
        facts["rows held out"] = f"{num_eval:,}"
        facts["tokens of these rows"] = f"{counts.get('num_tokens', 0):,}"
        facts["truncated"] = f"{num_truncated:,}, {share:.1f} %"
        if is_number(start.get("global_rows")):
            facts["passes over the rows"] = f"{run.last_step * start['global_rows'] / num_train:.2f}"
    learnt = [
        join_on_steps(*(run.curves[n] for n in names)) for names in LEARNT if {*names} <= run.curves.keys()
    ]
    if learnt:
        num_tokens = sum(rate * seconds for pair in learnt for rate, seconds in zip(*pair, strict=True))
        facts["tokens seen in training"] = f"{num_tokens:,.0f}"
    for name, count in models.items():
        if isinstance(count, dict) and is_number(count.get("all")) and is_number(count.get("trained")):
            facts[f"parameters of the {name}"] = f"{count['all']:,}, {count['trained']:,} trained"
    return facts


def build_provenance(runs: Sequence[RunFiles]) -> Table:
    """Return versions, device and data digest of each start; a change between them is marked."""
    columns = []
    for run in runs:
        for number, start in enumerate(run.starts(), start=1):
            names = [run.name] if len(runs) > 1 else []
            names += [f"start {number}"] if len(run.starts()) > 1 else []
            versions = start.get("versions")
            facts = {told: start.get(name) for name, told in LAYOUT["start_facts"].items()}
            facts |= versions if isinstance(versions, dict) else {}
            texts = {name: str(fact) for name, fact in facts.items() if fact not in (None, "")}
            columns.append((" ".join(names) or "value", texts))
    table = join_facts(columns)
    for row in table[1:]:
        is_same = len({*row[1:]}) == 1 or row[0] in ("started", "from step")
        row[1:] = [(cell, "code" if is_same else "code bad") for cell in row[1:]]
    return table


def join_facts(columns: Sequence[tuple[str, dict[str, str]]]) -> Table:
    """Return a table of (head, facts by name), a column each; [] where there are no facts."""
    names = dict.fromkeys(name for _, facts in columns for name in facts)
    rows: Table = [[name, *(facts.get(name, MISSING) for _, facts in columns)] for name in names]
    return [["", *(head for head, _ in columns)], *rows] if rows else []
