"""The report on runs: one HTML file without scripts, and nothing that it would have to fetch.

What the page shows is put together here as plain texts and charts; report.html says how it looks, and escapes
every text: markup in a sample is shown, and never run.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.runs.durable_files import write_file
from tools.report import LAYOUT
from tools.report.charts import COLORS, draw_bars, draw_trail, join_on_steps, render_svg, shown
from tools.report.diagnostics import find_diagnostics
from tools.report.run_reader import Curve, RunFiles, read_runs
from tools.report.samples import build_samples

# Where a run writes to, and how it was started: two runs always differ in these.
NOT_COMPARED = {"output_dir", "local_rank", "resume", "dry_run"}
# What a step learns from: its tokens a second, and the seconds that they are of.
LEARNT = (
    ("perf/tokens_per_second", "perf/step_seconds"),
    ("perf/actor_update_tokens_per_second", "perf/actor_update_seconds"),
)
Facts = dict[str, str]
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
    """The report on these runs as HTML; `problems` are of folders that are not shown."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "duration": as_duration, "rows": fact_rows}
    metrics = sorted({name for run in runs for name in run.curves})
    return environment.get_template("report.html").render(
        runs=runs,
        num_colors=len(COLORS),
        layout=LAYOUT,
        metrics=metrics,
        panels_of=_build_panels(runs, metrics),
        diagnostics=[(run, find_diagnostics(run.curves)) for run in runs],
        samples=build_samples(runs),
        phases=[(run.name, seconds) for run in runs if (seconds := find_phases(run))],
        differing=differing_flags(runs),
        data={run.name: data_facts(run) for run in runs},
        starts=start_facts(runs),
        problems=problems,
    )


def _build_panels(runs: Sequence[RunFiles], metrics: Sequence[str]) -> dict[str, Any]:
    """The panels of the page's sections; `rest` are those of no other, by group."""
    overview, hacking = LAYOUT["panels"]["overview"], LAYOUT["panels"]["hacking"]
    histograms = [panel for one in LAYOUT["histograms"] if (panel := build_histogram(runs, one))]
    drawn = overview + hacking + [name for one in LAYOUT["histograms"] for name in one["metrics"]]
    rest = [n for n in metrics if n not in drawn and not n.startswith("perf/")]
    times = [n for n in metrics if n.startswith("perf/") and n != "perf/bad_steps"]
    times.sort(key=lambda name: not name.endswith(("_seconds", "_per_second")))

    def build(names: Iterable[str]) -> list[Panel]:
        return [build_panel(runs, name) for name in names if name in metrics]

    trails = [build_trail(runs, trail) for trail in LAYOUT["trails"]]
    return {
        "overview": build(overview) + histograms,
        "hacking": [trail for trail in trails if trail] + build(hacking),
        "rest": {group: build(names) for group, names in groupby(rest, lambda name: name.split("/")[0])},
        "times": build(times),
    }


def build_panel(runs: Sequence[RunFiles], name: str) -> Panel:
    """The panel of a metric, with the curves of all runs that have it."""
    curves = [(i, run.name, run.curves[name]) for i, run in enumerate(runs) if name in run.curves]
    return {
        "title": name,
        "meaning": LAYOUT["meanings"].get(name, ""),
        "values": [(i, shown(curve.last)) for i, _, curve in curves],
        "chart": render_svg(curves, f"{name} over the steps"),
    }


def build_trail(runs: Sequence[RunFiles], trail: dict[str, str]) -> Panel | None:
    """The panel of the score against a metric, a point a step by time; None without points."""
    joined = [(i, r.name, join_on_steps(r.curves, trail["x"], "objective/score")) for i, r in enumerate(runs)]
    curves = [(i, name, curve) for i, name, curve in joined if len(curve.steps) > 1]
    if not curves:
        return None
    chart = render_svg(curves, trail["title"], x_name=trail["unit"], draw=draw_trail)
    return {"title": trail["title"], "meaning": trail["meaning"], "values": [], "chart": chart}


def build_histogram(runs: Sequence[RunFiles], histogram: dict[str, Any]) -> Panel | None:
    """The panel of metrics that are shares, a bar each, at the last step; None without them."""
    names = histogram["metrics"]
    places = list(range(1, len(names) + 1))
    curves = [
        (i, run.name, Curve(places, [run.curves[name].last for name in names]))
        for i, run in enumerate(runs)
        if all(name in run.curves for name in names)
    ]
    if not curves:
        return None
    chart = render_svg(curves, histogram["title"], x_name=histogram["unit"], draw=draw_bars)
    return {"title": histogram["title"], "meaning": histogram["meaning"], "values": [], "chart": chart}


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
    """The seconds of each phase, all of the run's clock together; phases without any are left out.

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
    """{flag: its value in each run, or None} of those that are not the same in all runs."""
    names = sorted({name for run in runs for name in run.flags} - NOT_COMPARED)
    values = {name: [run.flags.get(name) for run in runs] for name in names}
    return {name: of for name, of in values.items() if any(value != of[0] for value in of)}


def fact_rows(columns: Mapping[str, Facts]) -> list[tuple[str, list[str]]]:
    """Each fact's name and its text in every column, a dash where it has none."""
    names = dict.fromkeys(name for facts in columns.values() for name in facts)
    return [(name, [facts.get(name, "–") for facts in columns.values()]) for name in names]


def data_facts(run: RunFiles) -> Facts:
    """Return rows, tokens, what was cut, passes over the rows, and each model's parameters, where known."""
    start = run.starts[-1] if run.starts else {}
    facts = {}
    if counts := start.get("data"):
        num_train, num_eval = counts["num_train"], counts["num_eval"]
        share = counts["num_truncated"] / (num_train + num_eval)
        facts["rows to train on"] = f"{num_train:,} of {counts['num_raw_rows']:,} raw rows"
        facts["rows held out"] = f"{num_eval:,}"
        facts["tokens of these rows"] = f"{counts['num_tokens']:,}"
        facts["truncated"] = f"{counts['num_truncated']:,}, {100 * share:.1f} %"
        facts["passes over the rows"] = f"{run.last_step * start['global_rows'] / num_train:.2f}"
    learnt = [join_on_steps(run.curves, *names) for names in LEARNT]
    num_tokens = sum(a * b for curve in learnt for a, b in zip(curve.steps, curve.values, strict=True))
    if num_tokens:
        facts["tokens seen in training"] = f"{num_tokens:,.0f}"
    for name, count in start.get("parameters", {}).items():
        facts[f"parameters of the {name}"] = f"{count['all']:,}, {count['trained']:,} trained"
    return facts


def start_facts(runs: Sequence[RunFiles]) -> dict[str, Facts]:
    """Return versions, device, ranks, code and data digest of each start of each run."""
    columns = {}
    for run in runs:
        for number, start in enumerate(run.starts, start=1):
            facts = {told: start.get(name) for name, told in LAYOUT["start_facts"].items()}
            facts |= start.get("versions", {})
            head = f"{run.name} start {number}" if len(run.starts) > 1 else run.name
            columns[head] = {name: str(fact) for name, fact in facts.items() if fact not in (None, "")}
    return columns
