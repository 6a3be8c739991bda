"""The report on runs: one HTML file without scripts, and nothing that it would have to fetch.

What the page shows is put together here as plain texts and charts; report.html says how it looks, and escapes
every text: markup in a sample is shown, and never run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.runs.durable_files import write_file
from tools.report import LAYOUT, tables
from tools.report.charts import COLORS, Line, join_on_steps, render_svg, shown
from tools.report.diagnostics import HACKING, find_diagnostics, seen_diagnostics
from tools.report.run_reader import RunFiles, read_runs
from tools.report.samples import build_samples

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
    return environment.get_template("report.html").render(
        runs=runs,
        num_colors=len(COLORS),
        shown=shown,
        heads=[(run, _head_facts(run), LAYOUT["headlines"][run.kind]) for run in runs],
        remarks=[(i, one, seen) for i, run in enumerate(runs) for one, seen in seen_diagnostics(run)],
        panels_of=_build_panels(runs, metrics),
        ppo_runs=[(run, find_diagnostics(run.curves, HACKING)) for run in runs if run.kind == "ppo"],
        rules=[[one["title"], one["rule"]] for one in HACKING],
        samples=build_samples(runs),
        phases=[(run.name, shares) for run in runs if (shares := tables.build_phases(run))],
        last_values=tables.last_values(runs, metrics),
        differing=[[f"--{n}", *map(tables.flag_value, of)] for n, of in tables.differing_flags(runs).items()],
        configurations=[(run, tables.build_configuration(run)) for run in runs],
        data=tables.join_facts([(run.name, tables.data_facts(run)) for run in runs]),
        provenance=tables.build_provenance(runs),
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


def _head_facts(run: RunFiles) -> str:
    """Return what a run is, how far, how long, on what."""
    start = run.starts()[-1] if run.starts() else {}
    ranks, device = start.get("world_size", 1), str(start.get("device", ""))
    memory = run.curves.get("perf/peak_memory_gib")
    facts = [
        LAYOUT["kinds"][run.kind],
        run.state,
        tables.as_duration(run.seconds) if run.seconds else "",
        device if ranks == 1 else f"{ranks} × {device}",
        f"peak {shown(memory.last)} GiB" if memory else "",
    ]
    return " · ".join(filter(None, facts))
