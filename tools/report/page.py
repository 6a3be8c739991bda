"""The report on runs: one self-contained HTML file without scripts.

This module builds texts and charts; report.html is the layout, and escapes every text: markup in a sample is
shown, never run.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.runs.durable_files import write_file
from tools.report import LAYOUT
from tools.report.charts import COLORS, Colored, Draw, draw_bars, draw_trail, join_on_steps, render_svg, shown
from tools.report.diagnostics import find_diagnostics
from tools.report.planned import compare_run
from tools.report.run_reader import Curve, RunFiles, read_runs
from tools.report.samples import build_samples

# Output folder and start options, in which runs always differ.
NOT_COMPARED = {"output_dir", "local_rank", "resume", "dry_run"}
# Tokens per second and seconds of the phases that train.
LEARNT = (
    ("perf/tokens_per_second", "perf/step_seconds"),
    ("perf/actor_update_tokens_per_second", "perf/actor_update_seconds"),
)
MEASURED = {"perf/step_seconds", "perf/peak_memory_gib"}  # what a plan is compared with
Facts = dict[str, str]
Panel = dict[str, Any]


def write_report(folders: Sequence[Path], output: Path) -> tuple[list[RunFiles], list[str]]:
    """Write the report on these folders to `output`; return the result of `read_runs`.

    Nothing is written if no folder has a run. Raises OSError if the file cannot be written.
    """
    runs, problems = read_runs(folders)
    if runs:
        write_file(output, build_page(runs, problems))
    return runs, problems


def build_page(runs: Sequence[RunFiles], problems: Sequence[str] = ()) -> str:
    """The report on these runs as HTML; `problems` are those of folders that are not shown."""
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
        plans=[
            (run, compare_run(run.plan, run.curves))
            for run in runs
            if run.plan and MEASURED <= run.curves.keys()
        ],
        phases=[(run.name, seconds) for run in runs if (seconds := find_phases(run))],
        differing=differing_flags(runs),
        data={run.name: data_facts(run) for run in runs},
        starts=start_facts(runs),
        problems=problems,
    )


def _build_panels(runs: Sequence[RunFiles], metrics: Sequence[str]) -> dict[str, Any]:
    """Panels of the page's sections; `rest` are those in no section, by group."""
    overview = LAYOUT["panels"]["overview"]
    hacking = LAYOUT["panels"]["hacking"]
    shares = [name for histogram in LAYOUT["histograms"] for name in histogram["metrics"]]
    rest = [n for n in metrics if n not in overview + hacking + shares and not n.startswith("perf/")]
    times = [n for n in metrics if n.startswith("perf/") and n != "perf/bad_steps"]
    times.sort(key=lambda name: not name.endswith(("_seconds", "_per_second")))

    def build(names: Iterable[str]) -> list[Panel]:
        return [build_panel(runs, name) for name in names if name in metrics]

    histograms = [panel for one in LAYOUT["histograms"] for panel in build_histogram(runs, one)]
    trails = [panel for one in LAYOUT["trails"] for panel in build_trail(runs, one)]
    return {
        "overview": build(overview) + histograms,
        "hacking": trails + build(hacking),
        "rest": {group: build(names) for group, names in groupby(rest, lambda name: name.split("/")[0])},
        "times": build(times),
    }


def build_panel(runs: Sequence[RunFiles], name: str) -> Panel:
    """Panel of a metric, with the curves of all runs that have it."""
    curves = [(i, run.name, run.curves[name]) for i, run in enumerate(runs) if name in run.curves]
    return {
        "title": name,
        "meaning": LAYOUT["meanings"].get(name, ""),
        "values": [(i, shown(curve.last)) for i, _, curve in curves],
        "chart": render_svg(curves, f"{name} over the steps"),
    }


def build_trail(runs: Sequence[RunFiles], trail: dict[str, Any]) -> list[Panel]:
    """Panel of the score against a metric, one point per step in order; [] without points."""
    curves = [(i, r.name, join_on_steps(r.curves, trail["x"], "objective/score")) for i, r in enumerate(runs)]
    return _draw(trail, [colored for colored in curves if len(colored[2].steps) > 1], draw_trail)


def build_histogram(runs: Sequence[RunFiles], histogram: dict[str, Any]) -> list[Panel]:
    """Panel of metrics that are shares, one bar each, at the last step; [] without them."""
    names = histogram["metrics"]
    positions = list(range(1, len(names) + 1))
    curves = [
        (i, run.name, Curve(positions, [run.curves[name].last for name in names]))
        for i, run in enumerate(runs)
        if all(name in run.curves for name in names)
    ]
    return _draw(histogram, curves, draw_bars)


def _draw(layout: dict[str, Any], curves: Sequence[Colored], draw: Draw) -> list[Panel]:
    if not curves:
        return []
    chart = render_svg(curves, layout["title"], x_name=layout["unit"], draw=draw)
    return [{"title": layout["title"], "meaning": layout["meaning"], "values": [], "chart": chart}]


# ---- tables ---------------------------------------------------------------------------------------------


def as_duration(seconds: float) -> str:
    """Hours, minutes and seconds, as 5:07:00."""
    return str(timedelta(seconds=round(seconds)))


def find_phases(run: RunFiles) -> dict[str, float]:
    """Seconds of each phase, summed over the run; phases without any are left out.

    A phase is any perf/PHASE_seconds but those of whole steps; "outside steps" is the rest: start, data,
    exports.
    """
    names = LAYOUT["phases"]
    matches = [re.fullmatch(r"perf/(\w+)_seconds", metric) for metric in run.curves]
    keys = {match[1] for match in matches if match} - {"step"}
    order = [key for key in names if key in keys] + sorted(keys - names.keys())
    phases = {
        names.get(key, key.replace("_", " ")): sum(run.curves[f"perf/{key}_seconds"].values) for key in order
    }
    phases["outside steps"] = run.seconds - sum(phases.values())
    # A residue of rounding is not a phase.
    return {name: seconds for name, seconds in phases.items() if seconds > 1e-3 * max(run.seconds, 1e-9)}


def differing_flags(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Value in each run, or None, of every flag that differs between runs."""
    names = sorted({name for run in runs for name in run.flags} - NOT_COMPARED)
    values = {name: [run.flags.get(name) for run in runs] for name in names}
    return {name: of for name, of in values.items() if any(value != of[0] for value in of)}


def fact_rows(columns: Mapping[str, Facts]) -> list[tuple[str, list[str]]]:
    """Rows of a table: a fact's name, and its text in every column, a dash if it has none."""
    names = dict.fromkeys(name for facts in columns.values() for name in facts)
    return [(name, [facts.get(name, "–") for facts in columns.values()]) for name in names]


def data_facts(run: RunFiles) -> Facts:
    """Rows, tokens, truncation, passes over the rows, and each model's parameters, if known."""
    start = run.starts[-1] if run.starts else {}
    facts = {}
    if counts := start.get("data"):
        num_train = counts["num_train"]
        num_eval = counts["num_eval"]
        share = counts["num_truncated"] / (num_train + num_eval)
        facts["rows to train on"] = f"{num_train:,} of {counts['num_raw_rows']:,} raw rows"
        facts["rows held out"] = f"{num_eval:,}"
        facts["tokens of these rows"] = f"{counts['num_tokens']:,}"
        facts["truncated"] = f"{counts['num_truncated']:,}, {100 * share:.1f} %"
        facts["passes over the rows"] = f"{run.last_step * start['global_rows'] / num_train:.2f}"
    learnt = [join_on_steps(run.curves, *names) for names in LEARNT]
    if num_tokens := sum(a * b for curve in learnt for a, b in zip(curve.steps, curve.values, strict=True)):
        facts["tokens seen in training"] = f"{num_tokens:,.0f}"
    for name, count in start.get("parameters", {}).items():
        facts[f"parameters of the {name}"] = f"{count['all']:,}, {count['trained']:,} trained"
    return facts


def start_facts(runs: Sequence[RunFiles]) -> dict[str, Facts]:
    """Versions, device, ranks, code and data digest of each start of each run."""
    columns = {}
    for run in runs:
        for number, start in enumerate(run.starts, start=1):
            facts = {label: start.get(name) for name, label in LAYOUT["start_facts"].items()}
            facts |= start.get("versions", {})
            head = f"{run.name} start {number}" if len(run.starts) > 1 else run.name
            columns[head] = {name: str(fact) for name, fact in facts.items() if fact not in (None, "")}
    return columns
