"""Curves by matplotlib: panels as SVG for the page, which colours them, and all of them as one PNG."""

import io
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tools.report import LAYOUT
from tools.report.run_reader import Curve

WIDTH, HEIGHT = 360, 190  # of a panel, in points: SVG's unit
COLORS = ("#2463c5", "#d2600f", "#11835a", "#8e44ad", "#b58612", "#c0304d")  # of runs
QUIET, GRID, CARD = "#68707a", "#eceef0", "#fffffe"
# The page's style sheet gives these variables a value for light and one for dark.
VARIABLES = {color: f"var(--c{i})" for i, color in enumerate(COLORS)}
VARIABLES |= {QUIET: "var(--quiet)", GRID: "var(--grid)", CARD: "var(--card)"}
SETTINGS = {"svg.fonttype": "none", "path.simplify_threshold": 1.0, "font.size": 10.5}
# Comments, a style sheet for all of the page, names of groups, digits below a tenth of a point.
_NOT_NEEDED = re.compile(
    r"<!--.*?-->|<style.*?</style>|\n\s*| id=\"(?!m[0-9a-f]{10}|C\d)[^\"]*\"|(?<=\.\d)\d{4,}"
    r"|font-family:[^;]*; ",
    re.S,
)
MAX_HOVER_POINTS, MAX_TRAIL_POINTS = 32, 240
ROUND = (1, 2, 2.5, 5, 10)  # steps of an axis, times a power of ten
SMOOTH_FROM = 40  # values from which a mean is drawn over them
NOISY_FROM = 3.0  # path length over range, above which a curve is noisy


@dataclass(frozen=True)
class Line:
    """One curve: points in the order in which they are joined."""

    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    name: str = ""


def shown(value: float) -> str:
    """A number in at most seven characters, as an axis or a table has room for."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e6 or size < 1e-3:
        return f"{value:.1e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e").replace(".0e", "e")
    if size >= 1000:
        return f"{value:,.0f}"
    digits = 1 if size >= 100 else 2 if size >= 10 else 3 if size >= 1 else 4
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".")


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Return centred means over `width` values (the next odd number), fewer at the ends."""
    window = numpy.ones(width // 2 * 2 + 1)
    sums, counts = (numpy.convolve(of, window)[width // 2 :] for of in (values, numpy.ones(len(values))))
    return (sums / counts)[: len(values)].tolist()


def is_noisy(values: Sequence[float]) -> bool:
    """Whether values go up and down more than they go anywhere; a schedule, or a peak so far, does not."""
    way = sum(abs(after - before) for before, after in itertools.pairwise(values))
    return way > NOISY_FROM * (max(values) - min(values))


def join_on_steps(x: Curve, y: Curve) -> tuple[list[float], list[float]]:
    """Return the values of two curves at the steps that both have."""
    known = dict(zip(x.steps, x.values, strict=True))
    pairs = [(known[step], value) for step, value in zip(y.steps, y.values, strict=True) if step in known]
    return [a for a, _ in pairs], [b for _, b in pairs]


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def draw_curve(axis: Axes, line: Line) -> None:
    """Draw a curve over the steps: noisy values thin, with their mean; one or two as dots."""
    style: dict[str, Any] = {"color": COLORS[line.color % len(COLORS)], "clip_on": False}
    if len(line.x) < 3:
        axis.plot(line.x, line.y, "o-", linewidth=1, markersize=5, **style)
    elif len(line.x) < SMOOTH_FROM or not is_noisy(line.y):
        axis.plot(line.x, line.y, linewidth=1.6, **style)
    else:
        axis.plot(line.x, line.y, linewidth=0.9, alpha=0.28, **style)
        axis.plot(line.x, smooth(line.y, max(len(line.y) // 20, 5)), linewidth=1.6, **style)


def draw_trail(axis: Axes, line: Line) -> None:
    """Draw one metric against another: points that grow darker with time, their mean, a dot at its end."""
    style: dict[str, Any] = {"color": COLORS[line.color % len(COLORS)], "clip_on": False}
    x, y = (spread(values, MAX_TRAIL_POINTS) for values in (line.x, line.y))
    axis.scatter(x, y, s=16, alpha=numpy.linspace(0.15, 0.8, len(x)), linewidths=0, **style)
    if len(line.x) >= 5:
        width = max(len(line.x) // 6, 3)
        x, y = smooth(line.x, width), smooth(line.y, width)
        axis.plot(x, y, linewidth=1.6, **style)
        axis.plot(x[-1:], y[-1:], "o", markersize=8, markeredgecolor=CARD, **style)


def _style(axis: Axes, x_name: str) -> None:
    is_step = x_name == "step"
    axis.margins(x=0.0 if is_step else 0.05, y=0.06)
    axis.spines[["left", "top", "right"]].set_visible(False)
    axis.spines["bottom"].set_color(QUIET)
    axis.tick_params(length=0, labelcolor=QUIET, pad=5)
    axis.set_axisbelow(True)
    axis.grid(axis="y", color=GRID, linewidth=1, clip_on=False)
    axis.yaxis.set_major_locator(MaxNLocator(4, steps=ROUND))
    low, high = axis.get_xlim()
    end = high - (high - low) * (18 + 6 * len(x_name)) / 304  # the name of the axis stands there
    ticks = MaxNLocator(5, steps=ROUND, integer=is_step).tick_values(low, high)
    axis.set_xticks([tick for tick in ticks if low <= tick < end and (not is_step or tick == int(tick))])
    axis.text(1, -5 / 156, x_name, transform=axis.transAxes, ha="right", va="top", color=QUIET)
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(lambda value, _: shown(value))


def _hover(axis: Axes, line: Line, x_name: str, name: str) -> str:
    circles = []
    for x, y in spread(list(zip(line.x, line.y, strict=True)), MAX_HOVER_POINTS):
        left, bottom = axis.transData.transform((x, y))
        title = escape(f"{name}{x_name} {shown(x)}: {shown(y)}")
        circle = f'<circle class="hover" cx="{left:.1f}" cy="{HEIGHT - bottom:.1f}" r="6">'
        circles.append(f"{circle}<title>{title}</title></circle>")
    return "".join(circles)


def render_svg(lines: Sequence[Line], label: str, *, x_name: str = "step", is_trail: bool = False) -> str:
    """Return a panel as an <svg> to stand in a page; `label` is what a screen reader says.

    Invisible circles with titles tell the numbers of points under the pointer: no script is needed.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72)
        axis = figure.add_axes((46 / WIDTH, 24 / HEIGHT, 304 / WIDTH, 156 / HEIGHT))
        for line in lines:
            (draw_trail if is_trail else draw_curve)(axis, line)
        _style(axis, x_name)
        for patch in (figure.patch, axis.patch):
            patch.set_visible(False)
        figure.savefig(buffer, format="svg")
    body = buffer.getvalue().partition("</metadata>")[2].rpartition("</svg>")[0]
    body = _NOT_NEEDED.sub("", body)
    body = re.sub("|".join(VARIABLES), lambda found: VARIABLES[found[0]], body)
    names = [f"{line.name}: " if len(lines) > 1 else "" for line in lines]
    hover = "".join(_hover(axis, *of, x_name) for of in zip(lines, names, strict=True))
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label, quote=True)}">'
    return f"{head}{body}{hover}</svg>"


def save_curves(curves: Mapping[str, Curve], picture: Path) -> None:
    """Write every curve as a panel of one PNG, those of the report's sections first; nothing without any."""
    if not curves:
        return
    known = [name for names in ("overview", "hacking") for name in LAYOUT["panels"][names]]
    names = sorted(curves, key=lambda name: (known.index(name) if name in known else len(known), name))
    num_columns = min(4, len(names))
    num_rows = -(-len(names) // num_columns)
    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(3.6 * num_columns, 2.4 * num_rows), layout="tight")
        axes = figure.subplots(num_rows, num_columns, squeeze=False).flat
        for axis, name in zip(axes, names, strict=False):
            draw_curve(axis, Line(curves[name].steps, curves[name].values))
            _style(axis, "step")
            axis.set_title(name, parse_math=False)
        for axis in list(axes):  # the panels that are left over
            axis.set_visible(False)
        figure.savefig(picture, dpi=110)
