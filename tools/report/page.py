"""The report on runs: one HTML file without scripts, and nothing that it would have to fetch.

What the page shows is put together here as plain texts and charts; report.html says how it looks, and escapes
every text: markup in a sample is shown, and never run.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.runs.durable_files import write_file
from tools.report import LAYOUT
from tools.report.charts import COLORS, Line, join_on_steps, render_svg, shown
from tools.report.diagnostics import HACKING, find_diagnostics, seen_diagnostics
from tools.report.run_reader import RunFiles, count_gaps, is_number, read_runs
from tools.report.samples import build_samples

# Where a run writes to, and how it was started: two runs always differ in these.
NOT_COMPARED = {"output_dir", "local_rank", "resume", "dry_run"}
# What a step learns from: its tokens a second, and the seconds that they are of.
LEARNT = (
    ("perf/tokens_per_second", "perf/step_seconds"),
    ("perf/actor_update_tokens_per_second", "perf/actor_update_seconds"),
)
MISSING = "–"
Table = list[list[Any]]  # of texts, or texts with a class of the style sheet; the first row has the heads
Panel = dict[str, Any]


def write_report(folders: Sequence[Path], output: Path) -> tuple[list[RunFiles], list[str]]:
    """Write the report on these folders to `output`; return what `read_runs` does.

    Nothing is written when no folder has a run. Raises OSError when the file cannot be written.
    """
    runs, problems = read_runs(folders)
    if runs:
        write_file(output, build_page(runs, problems))
    return runs, problems


def build_page(runs: Sequence[RunFiles], problems: Sequence[str] = ()) -> str:
    """Return the report on these runs as HTML; `problems` are of folders that are not shown."""
    metrics = sorted({name for run in runs for name in run.curves})
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "duration": as_duration}
    return environment.get_template("report.html").render(
        runs=runs,
        num_colors=len(COLORS),
        layout=LAYOUT,
        remarks=[(i, one, seen) for i, run in enumerate(runs) for one, seen in seen_diagnostics(run)],
        panels_of=_build_panels(runs, metrics),
        ppo_runs=[(run, find_diagnostics(run.curves, HACKING)) for run in runs if run.kind == "ppo"],
        samples=build_samples(runs),
        phases=[(run.name, seconds) for run in runs if (seconds := find_phases(run))],
        metrics=metrics,
        gaps=[count_gaps(run.rows) for run in runs],
        differing=differing_flags(runs),
        data=join_facts([(run.name, data_facts(run)) for run in runs]),
        provenance=build_provenance(runs),
        problems=problems,
    )


def _build_panels(runs: Sequence[RunFiles], metrics: Sequence[str]) -> dict[str, Any]:
    """Return the panels of the page's sections; `rest` are those of no other, by group."""
    layout = LAYOUT["panels"]
    first = {*layout["overview"], *layout["hacking"]}
    groups: dict[str, list[Panel]] = {group: [] for group in layout["other_groups"]}
    for name in metrics:
        if name not in first and not name.startswith("perf/"):
            groups.setdefault(name.split("/")[0], []).append(build_panel(runs, name))
    times = [n for n in metrics if n.startswith("perf/") and n != "perf/bad_steps"]
    times.sort(key=lambda n: not n.endswith(("_seconds", "_per_second")))
    trails = [build_trail(runs, trail) for trail in LAYOUT["trails"]]
    return {
        "overview": [build_panel(runs, name) for name in layout["overview"] if name in metrics],
        "hacking": [
            *filter(None, trails),
            *(build_panel(runs, n) for n in layout["hacking"] if n in metrics),
        ],
        "rest": {group: panels for group, panels in groups.items() if panels},
        "times": [build_panel(runs, name) for name in times],
    }


def build_panel(runs: Sequence[RunFiles], name: str) -> Panel:
    """Return the panel of a metric, with the curves of all runs that have it."""
    curves = [(i, run, run.curves[name]) for i, run in enumerate(runs) if name in run.curves]
    return {
        "title": name,
        "meaning": LAYOUT["meanings"].get(name, ""),
        "values": [(i, shown(curve.last)) for i, _, curve in curves],
        "chart": render_svg(
            [Line(c.steps, c.values, i, run.name) for i, run, c in curves], f"{name} over the steps"
        ),
    }


def build_trail(runs: Sequence[RunFiles], trail: dict[str, str]) -> Panel | None:
    """Return the panel of the score against a metric, a point a step by time; None without points."""
    lines = []
    for i, run in enumerate(runs):
        if {trail["x"], "objective/score"} <= run.curves.keys():
            x, y = join_on_steps(run.curves[trail["x"]], run.curves["objective/score"])
            lines.append(Line(x, y, i, run.name))
    lines = [line for line in lines if len(line.x) > 1]
    if not lines:
        return None
    chart = render_svg(lines, trail["title"], x_name=trail["unit"], is_trail=True)
    return {"title": trail["title"], "meaning": trail["meaning"], "values": [], "chart": chart}


# ---- tables ---------------------------------------------------------------------------------------------


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


def differing_flags(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Return {flag: its value in each run, or None} of those that are not the same in all runs."""
    names = sorted({name for run in runs for name in run.flags} - NOT_COMPARED)
    values = {name: [run.flags.get(name) for run in runs] for name in names}
    return {name: of for name, of in values.items() if any(value != of[0] for value in of)}


def data_facts(run: RunFiles) -> dict[str, str]:
    """Return rows, tokens, what was cut, passes over the rows, and each model's parameters, where known."""
    start = run.starts[-1] if run.starts else {}
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
        for number, start in enumerate(run.starts, start=1):
            names = [run.name] if len(runs) > 1 else []
            names += [f"start {number}"] if len(run.starts) > 1 else []
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
