"""The page: one HTML file without scripts, and nothing that it would have to fetch. PURE."""

from collections.abc import Sequence
from html import escape

from common.runs.report import curve_panels, run_tables, signs
from common.runs.report.page_style import STYLE
from common.runs.report.run_files import RunFiles
from common.runs.report.sample_cards import render_samples

# Nothing in the page may run or be fetched, whatever a sample says.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def build_page(runs: Sequence[RunFiles], problems: Sequence[str] = ()) -> str:
    """Return the report on these runs as HTML; `problems` are of folders that are not shown."""
    title = ", ".join(run.name for run in runs)
    kinds = {run.kind for run in runs}
    sections = [
        ("Worth a look", _render_remarks(runs)),
        ("Curves", curve_panels.render_legend(runs) + curve_panels.render_overview(runs)),
        ("Signs of reward hacking", _render_hacking(runs) if "ppo" in kinds else ""),
        ("All other numbers", curve_panels.render_rest(runs)),
        ("Samples", render_samples(runs)),
        ("Time and memory", _render_time(runs)),
        ("Last values", _folded("every number", run_tables.render_last_values(runs), is_open=len(runs) > 1)),
        ("Configuration", run_tables.render_configuration(runs)),
        ("Data and models", run_tables.render_data(runs)),
        ("Versions and data", run_tables.render_provenance(runs)),
        ("Notes on the files", _render_notes(runs, problems)),
    ]
    body = "".join(
        f"<section>{f'<h2>{escape(name)}</h2>' if name else ''}{content}</section>"
        for name, content in sections
        if content
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main><header>{run_tables.render_heads(runs)}</header>{body}</main></body></html>\n"
    )


def _folded(title: str, content: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{escape(title)}</summary>{content}</details>"


def seen_signs(run: RunFiles) -> list[signs.Sign]:
    """Return the patterns that a run shows."""
    found = signs.find_signs(run.curves) if run.kind == "ppo" else []
    found += signs.find_signs(run.curves, signs.FITTING, min_steps=1)
    return [sign for sign in found if sign.seen]


def _render_remarks(runs: Sequence[RunFiles]) -> str:
    """Return what a reader should look at first."""
    items = []
    for index, run in enumerate(runs):
        name = f'<span class="key t{index % 6}">{escape(run.name)}</span> ' if len(runs) > 1 else ""
        if "perf/bad_steps" in run.curves:
            count = f"{run.curves['perf/bad_steps'].last:.0f}"
            items.append(_sign(name, f"{count} steps were refused", "their numbers were not finite", ""))
        items += [_sign(name, sign.title, sign.seen, sign.rule) for sign in seen_signs(run)]
    return f'<ul class="signs">{"".join(items)}</ul>' if items else ""


def _sign(name: str, title: str, seen: str, rule: str) -> str:
    why = f'<p class="quiet">Rule: {escape(rule)}</p>' if rule else ""
    return f"<li><p>{name}<b>{escape(title)}:</b> {escape(seen)}.</p>{why}</li>"


def _render_hacking(runs: Sequence[RunFiles]) -> str:
    panels = curve_panels.render_legend(runs, kind="ppo") + curve_panels.render_hacking_panels(runs)
    rows, lines = [], []
    for run in runs:
        if run.kind != "ppo":
            continue
        found = signs.find_signs(run.curves)
        seen = [sign for sign in found if sign.seen]
        name = f"{escape(run.name)}: " if len(runs) > 1 else ""
        if found:
            told = f"{len(seen) or 'none'} of the {len(found)} patterns that were looked for can be seen"
            lines.append(f"<p>{name or 'Signs: '}{told}{': see the top of the page' if seen else ''}.</p>")
        else:
            few = f"fewer than {signs.MIN_STEPS} steps: too few to look for patterns"
            lines.append(f"<p>{name or 'Signs: '}{few}.</p>")
    for rule in signs.HACKING:
        rows.append([escape(rule.title), escape(rule.text)])
    rules = _folded("what is looked for", run_tables.render_table(["pattern", "rule"], rows))
    means = (
        '<p class="quiet">Compared are means over the first and the last fifth of the steps, five at least. '
        "A pattern is a reason to read samples, no proof.</p>"
    )
    return panels + "".join(lines) + means + rules


def _render_time(runs: Sequence[RunFiles]) -> str:
    names = sorted({n for run in runs for n in run.curves if n.startswith("perf/") and n != "perf/bad_steps"})
    names.sort(key=lambda n: (not n.endswith(("_seconds", "_per_second")), n))
    panels = "".join(curve_panels.render_panel(name, runs) for name in names)
    bars = run_tables.render_phases(runs)
    return f'{bars}<div class="panels">{panels}</div>' if panels else bars


def _render_notes(runs: Sequence[RunFiles], problems: Sequence[str]) -> str:
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    items = "".join(f"<li>{escape(note)}</li>" for note in [*problems, *notes])
    return f"<ul>{items}</ul>" if items else ""
