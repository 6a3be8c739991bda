"""Tables of a report: how runs stand, what they cost, how they were configured, on what they ran. PURE."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from common.runs.report.run_files import Curve, RunFiles, count_gaps, is_number
from common.runs.report.svg_charts import draw_shares, shown

KINDS = {
    "sft": "Step 1, SFT",
    "reward": "Step 2, reward model",
    "dpo": "Step 2, DPO",
    "ppo": "Step 3, PPO",
    "": "Run",
}
HEADLINES = {
    "sft": ("sft/loss", "sft/eval_loss", "sft/eval_perplexity"),
    "reward": ("reward/loss", "reward/eval_accuracy", "reward/accuracy"),
    "dpo": ("dpo/loss", "dpo/eval_accuracy", "dpo/margin"),
    "ppo": ("eval/score", "eval/win_rate", "objective/score", "objective/kl", "rollout/response_tokens"),
    "": (),
}
# What `StepCosts` counts apart, in the order of a step.
PHASE = re.compile(r"perf/(\w+)_seconds")
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
# Where a run writes to, and how it was started: two runs always differ in these.
NOT_COMPARED = {"output_dir", "overwrite_output_dir", "local_rank", "resume", "dry_run"}
MISSING = "–"


def as_duration(seconds: float) -> str:
    """Seconds as a person says them: 42 s, 3 min 20 s, 5 h 07 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def render_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """Return an HTML table; cells are HTML already, the first of a row names it."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        "<tr><th>{}</th>{}</tr>".format(row[0], "".join(f"<td>{cell}</td>" for cell in row[1:]))
        for row in rows
    )
    style = ' class="numbers"' if numbers else ""
    return f'<div class="scroll"><table{style}><tr>{top}</tr>{body}</table></div>'


def told_state(run: RunFiles) -> str:
    """Say how far a run is."""
    if run.has_finished or 0 < run.num_steps <= run.last_step:
        return f"finished, {run.last_step} steps"
    if run.num_steps:
        return f"step {run.last_step} of {run.num_steps}"
    return f"{run.last_step} steps"


def render_heads(runs: Sequence[RunFiles]) -> str:
    """Return a card for each run: what it is, how far, how long, and its first and last numbers."""
    cards = []
    for index, run in enumerate(runs):
        facts = [told_state(run), as_duration(run.seconds) if run.seconds else ""]
        starts = run.starts()
        if starts:
            ranks = starts[-1].get("world_size", 1)
            device = str(starts[-1].get("device", ""))
            facts.append(f"{ranks} × {device}" if ranks != 1 else device)
        if "perf/peak_memory_gib" in run.curves:
            facts.append(f"peak {shown(run.curves['perf/peak_memory_gib'].last)} GiB")
        tiles = "".join(_tile(name, run.curves) for name in HEADLINES[run.kind] if name in run.curves)
        cards.append(
            f'<div class="head"><h2><span class="key t{index % 6}">{escape(run.name)}</span></h2>'
            f"<p>{escape(KINDS[run.kind])} · {escape(' · '.join(filter(None, facts)))}</p>"
            f'<div class="tiles">{tiles}</div></div>'
        )
    return f'<div class="heads">{"".join(cards)}</div>'


def _tile(name: str, curves: Mapping[str, Curve]) -> str:
    curve = curves[name]
    first = f'<span class="quiet">from {shown(curve.values[0])}</span>' if len(curve.values) > 1 else ""
    title = f'<span class="meaning">{escape(name)}</span>'
    ends = [curves[f"{name}_{end}"].last for end in ("low", "high") if f"{name}_{end}" in curves]
    interval = f'<span class="quiet">95 %: {" to ".join(map(shown, ends))}</span>' if ends else ""
    return f'<div class="tile">{title}<b>{shown(curve.last)}</b>{interval}{first}</div>'


def render_last_values(runs: Sequence[RunFiles]) -> str:
    """Return the last value of every number, a column for each run, and how often it was not finite."""
    names = sorted({name for run in runs for name in run.curves})
    gaps = [count_gaps(run.rows) for run in runs]
    rows = []
    for name in names:
        cells = []
        for run, of in zip(runs, gaps, strict=True):
            lost = f' <span class="bad">{of[name]} × not finite</span>' if name in of else ""
            cells.append((shown(run.curves[name].last) if name in run.curves else MISSING) + lost)
        rows.append([escape(name), *cells])
    return render_table(["last value of", *(escape(run.name) for run in runs)], rows, numbers=True)


# ---------------------------------------------------------------------------------------------------------
# Time
# ---------------------------------------------------------------------------------------------------------


def find_phases(run: RunFiles) -> list[tuple[str, float]]:
    """Return the seconds of each phase, all of the run's clock together; phases without any are left out.

    A phase is any perf/PHASE_seconds but those of whole steps; "outside steps" is what no step counted: the
    start, data, exports.
    """
    names = {match[1] for name in run.curves if (match := PHASE.fullmatch(name))} - {"step"}
    order = {name: place for place, name in enumerate((*PHASES, *sorted(names - {*PHASES})))}
    totals = {name: sum(run.curves[f"perf/{name}_seconds"].values) for name in sorted(names, key=order.get)}
    phases = [(PHASES.get(name, name.replace("_", " ")), seconds) for name, seconds in totals.items()]
    if "rest" not in totals and "perf/step_seconds" in run.curves:  # a run of before there were phases
        phases.append(("steps", sum(run.curves["perf/step_seconds"].values)))
    phases.append(("outside steps", run.seconds - sum(seconds for _, seconds in phases)))
    # What rounding leaves over is no phase.
    return [(name, seconds) for name, seconds in phases if seconds > 1e-3 * max(run.seconds, 1e-9)]


def render_phases(runs: Sequence[RunFiles]) -> str:
    """Return a bar of the phases for each run, with seconds and shares."""
    parts = []
    for run in runs:
        phases = find_phases(run)
        if not phases:
            continue
        total = sum(seconds for _, seconds in phases)
        keys = "".join(
            f'<span class="key t{i % 6}">{escape(name)} {as_duration(seconds)}, '
            f"{100 * seconds / total:.0f} %</span>"
            for i, (name, seconds) in enumerate(phases)
        )
        title = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        parts.append(f'{title}{draw_shares(phases, "time by phase")}<p class="legend">{keys}</p>')
    return "".join(parts)


# ---------------------------------------------------------------------------------------------------------
# Configuration
# ---------------------------------------------------------------------------------------------------------


def _value(value: Any) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else json.dumps(value, ensure_ascii=False)
    text = text.strip('"') if isinstance(value, str) else text
    return f"<code>{escape(text)}</code>" if text else '<span class="quiet">empty</span>'


def changed_flags(run: RunFiles) -> dict[str, tuple[Any, Any]]:
    """Return {flag: (value, default)} of those that differ; flags whose default is not known are left out."""
    defaults = run.defaults()
    return {
        name: (value, defaults[name])
        for name, value in run.flags.items()
        if name in defaults and value != defaults[name]
    }


def differing_flags(runs: Sequence[RunFiles]) -> dict[str, list[Any]]:
    """Return {flag: its value in each run, or None} of those that are not the same in all runs."""
    found = {}
    for name in sorted({name for run in runs for name in run.flags} - NOT_COMPARED):
        values = [run.flags.get(name) for run in runs]
        if any(value != values[0] for value in values):
            found[name] = values
    return found


def render_configuration(runs: Sequence[RunFiles]) -> str:
    """Return differences between runs, then each run's from the defaults, then all flags, folded."""
    parts = []
    if len(runs) > 1:
        differing = differing_flags(runs)
        rows = [[f"--{escape(n)}", *(_value(v) for v in values)] for n, values in differing.items()]
        table = render_table(["differs", *(escape(run.name) for run in runs)], rows)
        parts.append(table if rows else "<p>All flags are the same in all runs.</p>")
    for run in runs:
        title = f"<h3>{escape(run.name)}</h3>" if len(runs) > 1 else ""
        parts.append(title + _render_changed(run))
        rows = [[f"--{escape(name)}", _value(value)] for name, value in sorted(run.flags.items())]
        if rows:
            table = render_table(["flag", "value"], rows)
            parts.append(f"<details><summary>all {len(rows)} flags</summary>{table}</details>")
    return "".join(parts)


def _render_changed(run: RunFiles) -> str:
    if not run.flags:
        return "<p>The folder does not say with which flags it was made.</p>"
    if not run.defaults():
        return "<p>The folder does not say what the defaults were; all flags are below.</p>"
    rows = [
        [f"--{escape(name)}", _value(value), _value(default)]
        for name, (value, default) in sorted(changed_flags(run).items())
    ]
    if not rows:
        return "<p>All flags are at their defaults.</p>"
    return render_table(["not at its default", "value", "default"], rows)


# ---------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------

# What a step learns from: its tokens a second, and the seconds that they are of.
_LEARNT = (
    ("perf/tokens_per_second", "perf/step_seconds"),
    ("perf/actor_update_tokens_per_second", "perf/actor_update_seconds"),
)


def render_data(runs: Sequence[RunFiles]) -> str:
    """Return rows, tokens, what was cut, passes over the rows, each model's parameters; "" where unknown."""
    facts = [_data_facts(run) for run in runs]
    names = list(dict.fromkeys(name for of in facts for name in of))
    rows = [[escape(name), *(escape(of.get(name, MISSING)) for of in facts)] for name in names]
    return render_table(["", *(escape(run.name) for run in runs)], rows, numbers=True) if rows else ""


def _data_facts(run: RunFiles) -> dict[str, str]:
    start = run.starts()[-1] if run.starts() else {}
    data, models = (start[n] if isinstance(start.get(n), dict) else {} for n in ("data", "parameters"))
    data = {name: count for name, count in data.items() if is_number(count)}
    found = {}
    num_train, num_rows = data.get("num_train"), start.get("global_rows")
    if num_train:
        num_kept = num_train + data.get("num_eval", 0)
        cut = data.get("num_truncated", 0)
        found["rows to train on"] = f"{num_train:,} of {data.get('num_raw_rows', 0):,} raw rows"
        found["rows held out"] = f"{data.get('num_eval', 0):,}"
        found["tokens of these rows"] = f"{data.get('num_tokens', 0):,}"
        found["truncated"] = f"{cut:,}, {100 * cut / num_kept:.1f} %"
        if is_number(num_rows):
            found["passes over the rows"] = f"{run.last_step * num_rows / num_train:.2f}"
    seen = [_sum_of_products(run, *names) for names in _LEARNT if set(names) <= run.curves.keys()]
    if seen:
        found["tokens seen in training"] = f"{sum(seen):,.0f}"
    for name, count in models.items():
        if isinstance(count, dict) and is_number(count.get("all")) and is_number(count.get("trained")):
            found[f"parameters of the {name}"] = f"{count['all']:,}, {count['trained']:,} trained"
    return found


def _sum_of_products(run: RunFiles, one: str, other: str) -> float:
    by_step = dict(zip(run.curves[other].steps, run.curves[other].values, strict=True))
    rates = zip(run.curves[one].steps, run.curves[one].values, strict=True)
    return sum(value * by_step.get(step, 0.0) for step, value in rates)


# ---------------------------------------------------------------------------------------------------------
# Versions and data
# ---------------------------------------------------------------------------------------------------------


def render_provenance(runs: Sequence[RunFiles]) -> str:
    """Return versions, device and data digest of each start; a change between them is marked."""
    columns, facts = [], []
    for run in runs:
        starts = run.starts()
        for number, start in enumerate(starts, start=1):
            name = escape(run.name) if len(runs) > 1 else ""
            which = f"start {number}" if len(starts) > 1 else ""
            columns.append(" ".join(filter(None, (name, which))) or "value")
            facts.append(_facts_of(start))
    if not facts:
        return "<p>The folder does not say on what it was made (run.json).</p>"
    rows = []
    for name in dict.fromkeys(name for of in facts for name in of):
        values = [of.get(name, "") for of in facts]
        is_same = len(set(values)) == 1 or name in ("started", "from step")
        style = "" if is_same else ' class="bad"'
        rows.append([escape(name), *(f"<code{style}>{escape(v)}</code>" if v else MISSING for v in values)])
    return render_table(["", *columns], rows)


def _facts_of(start: dict[str, Any]) -> dict[str, str]:
    names = {
        "time": "started",
        "from_step": "from step",
        "world_size": "ranks",
        "device": "device",
        "dtype": "precision",
        "data_key": "data digest",
        "global_rows": "rows a step",
        "code": "code",
    }
    facts = {
        shown_name: str(start[name])
        for name, shown_name in names.items()
        if start.get(name) not in (None, "")
    }
    versions = start.get("versions")
    return facts | {str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else facts
