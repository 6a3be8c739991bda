"""Curves of a run, drawn from its metrics.jsonl."""

from pathlib import Path

from common.runs.report.run_files import build_curves, read_rows

# One name for a number everywhere; these are worth a picture, in this order.
FIRST = (
    "sft/loss",
    "reward/loss",
    "reward/accuracy",
    "eval/score",
    "eval/win_rate",
    "objective/score",
    "objective/kl",
    "objective/score_length_correlation",
    "rollout/response_tokens",
    "rollout/finished_fraction",
    "rollout/distinct_2",
    "policy/entropy",
    "policy/loss",
    "value/loss",
)
AGAINST = ("objective/score", "objective/kl")


def plot_curves(metrics_file: Path, picture: Path) -> None:
    """Draw every metric of the file as a small panel with a shared step axis; nothing without points."""
    curves = {name: (of.steps, of.values) for name, of in build_curves(read_rows(metrics_file, [])).items()}
    if not curves:
        return
    import matplotlib  # slow to import: only when a run ends

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = sorted(curves, key=lambda n: (FIRST.index(n) if n in FIRST else len(FIRST), n))
    panels = [(name, "step", *curves[name]) for name in names]
    if all(name in curves and len(curves[name][0]) > 1 for name in AGAINST):
        # A policy that hacks its reward pays for score with ever more KL: the curve turns flat, or down.
        score, kl = (curves[name][1] for name in AGAINST)
        panels.insert(0, (f"{AGAINST[0]} against KL", AGAINST[1], kl, score))
    num_columns = min(4, len(panels))
    num_rows = -(-len(panels) // num_columns)
    figure, axes = plt.subplots(
        num_rows, num_columns, figsize=(3.6 * num_columns, 2.4 * num_rows), squeeze=False
    )
    for axis, (title, label, x, y) in zip(axes.flat, panels, strict=False):
        is_curve = label == "step" and len(x) >= 3
        axis.plot(x, y, "-" if is_curve else ".", linewidth=1.2)
        axis.set_title(title, fontsize=9)
        if label != "step":
            axis.set_xlabel(label, fontsize=7)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel("step", fontsize=9)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    plt.close(figure)
