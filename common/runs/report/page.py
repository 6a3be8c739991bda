"""The report on runs: one HTML file without scripts, and nothing that it would have to fetch.

What the page shows is put together here as plain texts and charts; report.html says how it looks, and escapes
every text: markup in a sample is shown, and never run.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from common.runs.durable_files import write_file
from common.runs.report.charts import COLORS, Line, join_on_steps, render_svg, shown
from common.runs.report.diagnostics import HACKING, MIN_STEPS, find_diagnostics, seen_diagnostics
from common.runs.report.samples import build_cards, build_singles
from common.runs.report.tables import (
    as_duration,
    build_configuration,
    build_phases,
    build_provenance,
    data_facts,
    differing_flags,
    flag_value,
    join_facts,
    last_values,
)
from common.runs.run_files import RunFiles, read_runs

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
MEANINGS = {
    "objective/score": "mean reward of a step's responses",
    "objective/kl": "to the reference, nats a response",
    "objective/reward": "score less the KL penalty, a response",
    "objective/score_length_correlation": "score with length, within a step",
    "eval/score": "held-out prompts, mean reward",
    "eval/win_rate": "held-out prompts, against the answers before training",
    "eval/pass_rate": "held-out prompts, answers that pass all checks",
    "eval/kl": "held-out prompts, nats a response",
    "rollout/response_tokens": "mean tokens a response",
    "rollout/finished_fraction": "share that ended before the limit",
    "rollout/distinct_1": "tokens that differ, by all",
    "rollout/distinct_2": "token pairs that differ, by all",
    "policy/entropy": "nats a token",
    "policy/clip_fraction": "tokens whose ratio was clipped",
    "policy/logprob_gap": "sampler to trainer, nats a token",
    "policy/grad_norm": "before clipping",
    "value/explained_variance": "1: the critic foresees returns",
    "sft/loss": "nats a learned token",
    "sft/eval_loss": "held-out rows, nats a token",
    "sft/eval_perplexity": "held-out rows",
    "reward/accuracy": "pairs ranked rightly, of a step",
    "reward/eval_accuracy": "held-out pairs ranked rightly",
    "reward/eval_margin": "chosen score less rejected score",
    "reward/eval_length_correlation": "held-out scores with lengths",
    "dpo/accuracy": "pairs ranked rightly, of a step",
    "dpo/margin": "chosen reward less rejected reward",
    "dpo/chosen_reward": "beta times the log-ratio to the reference",
    "dpo/rejected_reward": "beta times the log-ratio to the reference",
    "dpo/eval_accuracy": "held-out pairs ranked rightly",
    "perf/step_seconds": "a whole step",
    "perf/rest_seconds": "of a step, in no phase",
    "perf/mfu": "model FLOPs by what the device could do",
    "perf/peak_memory_gib": "of the first process, so far",
    "perf/save_seconds": "a checkpoint",
}
OVERVIEW = """
sft/loss sft/eval_loss sft/eval_perplexity sft/grad_norm sft/learning_rate
reward/loss reward/accuracy reward/margin reward/eval_accuracy reward/eval_margin reward/grad_norm
dpo/loss dpo/accuracy dpo/margin dpo/chosen_reward dpo/rejected_reward
dpo/eval_loss dpo/eval_accuracy dpo/grad_norm
eval/score eval/win_rate eval/pass_rate eval/kl objective/score objective/kl objective/reward
policy/loss policy/clip_fraction policy/grad_norm value/loss value/explained_variance
""".split()
# Of step 3: shown beside the diagnostics of reward hacking, and not a second time.
HACKING_PANELS = (
    "objective/score_length_correlation",
    "rollout/response_tokens",
    "rollout/distinct_2",
    "rollout/distinct_1",
    "policy/entropy",
    "rollout/finished_fraction",
)
TRAILS = (
    ("objective/kl", "nats of KL", "score against KL", "more score for little KL is good; the dot is now"),
    (
        "rollout/response_tokens",
        "tokens",
        "score against length",
        "a slope: longer answers, more score; the dot is now",
    ),
)
GROUP_ORDER = ("eval", "objective", "rollout", "policy", "value", "reward", "dpo", "sft", "hybrid")


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
    rest = [n for n in metrics if n not in OVERVIEW and n not in HACKING_PANELS]
    groups = sorted({name.split("/")[0] for name in rest} - {"perf"})
    groups.sort(key=lambda g: GROUP_ORDER.index(g) if g in GROUP_ORDER else len(GROUP_ORDER))
    ppo_runs = [run for run in runs if run.kind == "ppo"]
    panel = partial(build_panel, runs)
    singles, num_singles = build_singles(runs)
    times = [n for n in metrics if n.startswith("perf/") and n != "perf/bad_steps"]
    times.sort(key=lambda n: not n.endswith(("_seconds", "_per_second")))
    notes = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
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
        heads=[_build_head(run) for run in runs],
        remarks=[remark for i, run in enumerate(runs) for remark in _build_remarks(i, run)],
        overview=[panel(name) for name in OVERVIEW if name in metrics],
        hacking=[*_build_trails(runs), *(panel(n) for n in HACKING_PANELS if n in metrics)]
        if ppo_runs
        else [],
        diagnostics=[_count_diagnostics(run) for run in ppo_runs],
        rules=[[one.title, one.rule] for one in HACKING],
        rest={g: [panel(n) for n in rest if n.split("/")[0] == g] for g in groups},
        cards=build_cards(runs),
        singles=singles,
        num_singles=num_singles,
        phases=[(run.name, shares) for run in runs if (shares := build_phases(run))],
        times=[panel(name) for name in times],
        last_values=last_values(runs, metrics),
        differing=[[f"--{n}", *map(flag_value, of)] for n, of in differing_flags(runs).items()],
        configurations=[build_configuration(run) for run in runs],
        data=join_facts([run.name for run in runs], [data_facts(run) for run in runs]),
        provenance=build_provenance(runs),
        notes=[*problems, *notes],
    )


# ---------------------------------------------------------------------------------------------------------
# Panels
# ---------------------------------------------------------------------------------------------------------


def build_panel(runs: Sequence[RunFiles], name: str) -> dict[str, Any]:
    """Return the panel of a metric, with the curves of all runs that have it."""
    having = [(i, run.curves[name], run.name) for i, run in enumerate(runs) if name in run.curves]
    lines = [Line(c.steps, c.values, i, run_name if len(runs) > 1 else "") for i, c, run_name in having]
    return {
        "title": name,
        "meaning": MEANINGS.get(name, ""),
        "values": [(i, shown(curve.last)) for i, curve, _ in having],
        "chart": render_svg(lines, f"{name} over the steps"),
    }


def _build_trails(runs: Sequence[RunFiles]) -> Iterable[dict[str, Any]]:
    """Give score against KL and against length: a point a step, in the order of time."""
    for x_name, unit, title, meaning in TRAILS:
        lines = []
        for i, run in enumerate(runs):
            if {x_name, "objective/score"} <= run.curves.keys():
                x, y = join_on_steps(run.curves[x_name], run.curves["objective/score"])
                if len(x) > 1:
                    lines.append(Line(x, y, i, run.name if len(runs) > 1 else ""))
        if lines:
            chart = render_svg(lines, title, x_name=unit, is_trail=True)
            yield {"title": title, "meaning": meaning, "values": [], "chart": chart}


# ---------------------------------------------------------------------------------------------------------
# Heads and remarks
# ---------------------------------------------------------------------------------------------------------


def _build_head(run: RunFiles) -> dict[str, Any]:
    """Return a run's card: what it is, how far, how long, and its first and last values."""
    start = run.starts()[-1] if run.starts() else {}
    ranks, device = start.get("world_size", 1), str(start.get("device", ""))
    memory = run.curves.get("perf/peak_memory_gib")
    facts = [
        KINDS[run.kind],
        run.state,
        as_duration(run.seconds) if run.seconds else "",
        device if ranks == 1 else f"{ranks} × {device}",
        f"peak {shown(memory.last)} GiB" if memory else "",
    ]
    tiles = []
    for name in HEADLINES[run.kind]:
        if name in run.curves:
            curve = run.curves[name]
            ends = [
                shown(run.curves[f"{name}_{end}"].last)
                for end in ("low", "high")
                if f"{name}_{end}" in run.curves
            ]
            notes = [f"95 %: {' to '.join(ends)}"] if ends else []
            notes += [f"from {shown(curve.values[0])}"] if len(curve.values) > 1 else []
            tiles.append({"name": name, "value": shown(curve.last), "notes": notes})
    return {"facts": " · ".join(filter(None, facts)), "tiles": tiles}


def _build_remarks(index: int, run: RunFiles) -> Iterable[dict[str, Any]]:
    """Give what a reader should look at first."""
    if "perf/bad_steps" in run.curves:
        title = f"{run.curves['perf/bad_steps'].last:.0f} steps were skipped"
        yield {"run": index, "title": title, "seen": "they were refused, see the log", "rule": ""}
    for finding in seen_diagnostics(run):
        yield {"run": index, "title": finding.title, "seen": finding.seen, "rule": finding.rule}


def _count_diagnostics(run: RunFiles) -> str:
    found = find_diagnostics(run.curves)
    seen = [finding for finding in found if finding.seen]
    if not found:
        return f"{run.name}: fewer than {MIN_STEPS} steps: too few to look for patterns."
    told = f"{len(seen) or 'none'} of the {len(found)} patterns that were looked for can be seen"
    return f"{run.name}: {told}{': see the top of the page' if seen else ''}."
