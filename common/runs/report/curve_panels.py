"""The panels of curves, one for each number, and those that show reward hacking. PURE."""

from collections.abc import Sequence
from html import escape

from common.runs.report.run_files import Curve, RunFiles
from common.runs.report.svg_charts import Line, draw_lines, shown

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
OVERVIEW = (
    "sft/loss",
    "sft/eval_loss",
    "sft/eval_perplexity",
    "sft/grad_norm",
    "sft/learning_rate",
    "reward/loss",
    "reward/accuracy",
    "reward/margin",
    "reward/eval_accuracy",
    "reward/eval_margin",
    "reward/grad_norm",
    "dpo/loss",
    "dpo/accuracy",
    "dpo/margin",
    "dpo/chosen_reward",
    "dpo/rejected_reward",
    "dpo/eval_loss",
    "dpo/eval_accuracy",
    "dpo/grad_norm",
    "eval/score",
    "eval/win_rate",
    "eval/pass_rate",
    "eval/kl",
    "objective/score",
    "objective/kl",
    "objective/reward",
    "policy/loss",
    "policy/clip_fraction",
    "policy/grad_norm",
    "value/loss",
    "value/explained_variance",
)
# Of step 3: shown beside the signs of reward hacking, and not a second time.
HACKING = (
    "objective/score_length_correlation",
    "rollout/response_tokens",
    "rollout/distinct_2",
    "rollout/distinct_1",
    "policy/entropy",
    "rollout/finished_fraction",
)
TRAILS = (
    ("objective/kl", "nats of KL", "objective/score", "score against KL", "more score for little KL is good"),
    (
        "rollout/response_tokens",
        "tokens",
        "objective/score",
        "score against length",
        "a slope: longer answers, more score",
    ),
)
GROUP_ORDER = ("eval", "objective", "rollout", "policy", "value", "reward", "dpo", "sft", "hybrid")


def render_legend(runs: Sequence[RunFiles], kind: str = "") -> str:
    """Return the colours of the runs, or of those of one kind; "" where there is one run."""
    if len(runs) < 2:
        return ""
    items = (
        f'<span class="key t{i % 6}">{escape(run.name)}</span>'
        for i, run in enumerate(runs)
        if kind in ("", run.kind)
    )
    return f'<p class="legend">{"".join(items)}</p>'


def render_panel(name: str, runs: Sequence[RunFiles]) -> str:
    """Return the panel of a metric, with the curves of all runs that have it."""
    lines = [
        Line(run.curves[name].steps, run.curves[name].values, i, run.name if len(runs) > 1 else "")
        for i, run in enumerate(runs)
        if name in run.curves
    ]
    return _panel(
        name, MEANINGS.get(name, ""), _last_values(lines), draw_lines(lines, f"{name} over the steps")
    )


def _last_values(lines: Sequence[Line]) -> str:
    return " ".join(f'<b class="t{line.color % 6}">{shown(line.y[-1])}</b>' for line in lines)


def _panel(title: str, meaning: str, values: str, chart: str) -> str:
    return (
        f'<figure class="panel"><figcaption><span class="title">{_breakable(title)}</span>'
        f'<span class="values">{values}</span><span class="meaning">{escape(meaning)}</span></figcaption>'
        f"{chart}</figure>"
    )


def _breakable(name: str) -> str:
    """Return a name that a narrow panel breaks at its parts."""
    return escape(name).replace("_", "_<wbr>").replace("/", "/<wbr>")


def join_on_steps(x: Curve, y: Curve) -> tuple[list[float], list[float]]:
    """Return the values of two curves at the steps that both have."""
    known = dict(zip(x.steps, x.values, strict=True))
    pairs = [(known[step], value) for step, value in zip(y.steps, y.values, strict=True) if step in known]
    return [a for a, _ in pairs], [b for _, b in pairs]


def render_trails(runs: Sequence[RunFiles]) -> str:
    """Return score against KL and against length: a point a step, in the order of time."""
    panels = []
    for x_name, unit, y_name, title, meaning in TRAILS:
        lines = []
        for i, run in enumerate(runs):
            if x_name in run.curves and y_name in run.curves:
                x, y = join_on_steps(run.curves[x_name], run.curves[y_name])
                if len(x) > 1:
                    lines.append(Line(x, y, i, run.name if len(runs) > 1 else ""))
        if lines:
            chart = draw_lines(lines, title, x_name=unit, is_trail=True)
            panels.append(_panel(title, f"{meaning}; the dot is now", "", chart))
    return "".join(panels)


def render_hacking_panels(runs: Sequence[RunFiles]) -> str:
    """Return the panels by which reward hacking shows, "" when no run has a score."""
    names = {name for run in runs for name in run.curves}
    panels = render_trails(runs) + "".join(render_panel(name, runs) for name in HACKING if name in names)
    return f'<div class="panels">{panels}</div>' if panels else ""


def render_overview(runs: Sequence[RunFiles]) -> str:
    """Return the panels that are looked at first."""
    names = {name for run in runs for name in run.curves}
    panels = "".join(render_panel(name, runs) for name in OVERVIEW if name in names)
    return f'<div class="panels">{panels}</div>' if panels else ""


def render_rest(runs: Sequence[RunFiles]) -> str:
    """Return all other numbers, folded, by their groups; perf/ has a section of its own."""
    names = {name for run in runs for name in run.curves} - {*OVERVIEW, *HACKING}
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        groups.setdefault(name.split("/")[0], []).append(name)
    groups.pop("perf", None)
    order = sorted(groups, key=lambda g: (GROUP_ORDER.index(g) if g in GROUP_ORDER else 99, g))
    return "".join(
        f"<details><summary>{len(groups[g])} more of {escape(g)}/</summary>"
        f'<div class="panels">{"".join(render_panel(name, runs) for name in groups[g])}</div></details>'
        for g in order
    )
