"""Charts with matplotlib: SVG panels for the page, or one picture."""

import io
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib
import numpy
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tools.report.run_reader import Curve

PAGE = Path(__file__).with_name("report.html")  # has the style sheet with the colors
WIDTH, HEIGHT = 360, 190  # size of a panel, in points (SVG's unit)
COLORS = ("#2463c5", "#d2600f", "#11835a", "#8e44ad", "#b58612", "#c0304d", "#343a40")  # colors of runs
QUIET = "#68707a"
GRID = "#eceef0"
CARD = "#fffffe"
# The page's style sheet defines these variables for light and dark mode.
VARIABLES = {color: f"var(--c{i})" for i, color in enumerate(COLORS)}
VARIABLES |= {QUIET: "var(--quiet)", GRID: "var(--grid)", CARD: "var(--card)"}
SETTINGS = {"svg.fonttype": "none", "path.simplify_threshold": 1.0, "font.size": 10.5}
# Comments, style sheets (they would apply to the whole page), group ids, digits below a tenth of a point.
_REMOVED = re.compile(
    r"<!--.*?-->|<style.*?</style>|\n\s*| id=\"(?!m[0-9a-f]{10}|C\d)[^\"]*\"|(?<=\.\d)\d{4,}"
    r"|font-family:[^;]*; ",
    re.S,
)
MAX_HOVER_POINTS, MAX_TRAIL_POINTS = 32, 240
ROUND = (1, 2, 2.5, 5, 10)  # steps of an axis, times a power of ten
SMOOTH_FROM = 40  # number of values from which their mean is drawn too
NOISY_FROM = 3.0  # path length over range, above which a curve is noisy
Colored = tuple[int, str, Curve]  # run number (for the color), name, curve
Draw = Callable[[Axes, Curve, str], None]


def shown(value: float) -> str:
    """A number with four digits, short enough for an axis or a table."""
    if 1000 <= abs(value) < 1e6:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e+0", "e").replace("e-0", "e-")


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Centred means over `width` values (the next odd number), fewer at the ends."""
    window = numpy.ones(width // 2 * 2 + 1)
    means = numpy.convolve(values, window) / numpy.convolve(numpy.ones(len(values)), window)
    return means[width // 2 :][: len(values)].tolist()


def is_noisy(values: Sequence[float]) -> bool:
    """Whether values fluctuate more than they change overall; a schedule, or a running peak, does not."""
    path_length = sum(abs(after - before) for before, after in itertools.pairwise(values))
    return path_length > NOISY_FROM * (max(values) - min(values))


def join_on_steps(curves: Mapping[str, Curve], x: str, y: str) -> Curve:
    """The values of `y` over those of `x` at the steps that both have; none if one is missing."""
    if x not in curves or y not in curves:
        return Curve([], [])
    x_by_step = dict(zip(curves[x].steps, curves[x].values, strict=True))
    y_by_step = dict(zip(curves[y].steps, curves[y].values, strict=True))
    both = [step for step in y_by_step if step in x_by_step]
    return Curve([x_by_step[step] for step in both], [y_by_step[step] for step in both])


def spread(items: Sequence[Any], max_items: int) -> list[Any]:
    """At most `max_items` items, evenly spaced, including the first and the last."""
    indexes = numpy.linspace(0, len(items) - 1, min(max_items, len(items))).round()
    return [items[int(index)] for index in indexes]


def _line(axis: Axes, x: Sequence[float], y: Sequence[float], color: str, **style: Any) -> None:
    axis.plot(x, y, **{"color": color, "clip_on": False, "linewidth": 1.6} | style)


def draw_curve(axis: Axes, curve: Curve, color: str) -> None:
    """Draw a curve over the steps: noisy values thin, with their mean; one or two as dots."""
    y = curve.values
    if len(y) < 3:
        _line(axis, curve.steps, y, color, marker="o", linewidth=1, markersize=5)
    elif len(y) < SMOOTH_FROM or not is_noisy(y):
        _line(axis, curve.steps, y, color)
    else:
        _line(axis, curve.steps, y, color, linewidth=0.9, alpha=0.28)
        _line(axis, curve.steps, smooth(y, max(len(y) // 20, 5)), color)


def draw_trail(axis: Axes, curve: Curve, color: str) -> None:
    """Draw one metric against another: points that grow darker with time, their mean, a dot at its end."""
    x = spread(curve.steps, MAX_TRAIL_POINTS)
    y = spread(curve.values, MAX_TRAIL_POINTS)
    alpha = numpy.linspace(0.15, 0.8, len(x))
    axis.scatter(x, y, s=16, alpha=alpha, linewidths=0, color=color, clip_on=False)
    if len(curve.steps) >= 5:
        width = max(len(curve.steps) // 6, 3)
        x = smooth(curve.steps, width)
        y = smooth(curve.values, width)
        _line(axis, x, y, color)
        _line(axis, x[-1:], y[-1:], color, marker="o", markersize=8, markeredgecolor=CARD)


def draw_bars(axis: Axes, curve: Curve, color: str) -> None:
    """Draw a translucent bar per value, so that those of other runs show through."""
    axis.bar(curve.steps, curve.values, color=color, alpha=0.5)


def _style(axis: Axes, x_name: str) -> None:
    """Set lines, margins, ticks, and the name of the horizontal axis, after its last tick."""
    is_step = x_name == "step"
    axis.spines[["left", "top", "right"]].set_visible(False)
    axis.spines["bottom"].set_color(QUIET)
    axis.tick_params(length=0, labelcolor=QUIET, pad=5)
    axis.set_axisbelow(True)
    axis.grid(axis="y", color=GRID, linewidth=1, clip_on=False)
    axis.margins(x=0.0 if is_step else 0.05, y=0.06)
    axis.yaxis.set_major_locator(MaxNLocator(4, steps=ROUND))
    low, high = axis.get_xlim()
    end = high - (high - low) * (18 + 6 * len(x_name)) / 304  # start of the axis name
    ticks = MaxNLocator(5, steps=ROUND, integer=is_step).tick_values(low, high)
    axis.set_xticks([tick for tick in ticks if low <= tick < end and (not is_step or tick == int(tick))])
    axis.text(1, -5 / 156, x_name, transform=axis.transAxes, ha="right", va="top", color=QUIET)
    for one in (axis.xaxis, axis.yaxis):
        one.set_major_formatter(lambda value, _: shown(value))


def render_svg(
    curves: Sequence[Colored],
    label: str,
    *,
    x_name: str = "step",
    draw: Draw = draw_curve,
) -> str:
    """A panel as an <svg> element for a page; `label` is for screen readers.

    Invisible circles with titles show the numbers of points under the pointer: no script is needed.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, facecolor="none")
        axis = figure.add_axes((46 / WIDTH, 24 / HEIGHT, 304 / WIDTH, 156 / HEIGHT), facecolor="none")
        for number, _, curve in curves:
            draw(axis, curve, COLORS[number % len(COLORS)])
        _style(axis, x_name)
        figure.savefig(buffer, format="svg")
    body = buffer.getvalue().partition("</metadata>")[2].rpartition("</svg>")[0]
    body = _REMOVED.sub("", body)
    body = re.sub("|".join(VARIABLES), lambda match: VARIABLES[match[0]], body)
    for _, name, curve in curves:
        point = f"{name}: {x_name}" if len(curves) > 1 else x_name
        for x, y in spread(list(zip(curve.steps, curve.values, strict=True)), MAX_HOVER_POINTS):
            left, bottom = axis.transData.transform((x, y))
            body += f'<circle class="hover" cx="{left:.1f}" cy="{HEIGHT - bottom:.1f}" r="6">'
            body += f"<title>{escape(f'{point} {shown(x)}: {shown(y)}')}</title></circle>"
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label, quote=True)}">'
    return f"{head}{body}</svg>"


def _wrap(names: Sequence[str], width: int) -> list[list[tuple[int, str]]]:
    """Numbered names by line, of at most `width` letters unless a single name is longer."""
    lines: list[list[tuple[int, str]]] = [[]]
    for item in enumerate(names):
        if lines[-1] and sum(len(name) + 2 for _, name in [*lines[-1], item]) > width:
            lines.append([])
        lines[-1].append(item)
    return lines


def render_picture(panels: Mapping[str, Mapping[str, Curve]], x_name: str = "step") -> str:
    """{title: {name: curve}} as an SVG file: two columns of panels, in the colors of the page.

    Names are printed in their colors under the title of their panel, on as many lines as they need.
    """
    style = re.search(r"<style>(.*?)</style>", PAGE.read_text(), re.S)[1]
    gap = 16  # gap between panels
    letter = 7.2  # width of a letter
    line = 18  # height of a line
    names = {title: _wrap(list(curves), int(WIDTH / letter)) for title, curves in panels.items()}
    head = 26 + line * max(map(len, names.values()))  # height of a title and its names
    rows = -(-len(panels) // 2)
    width = 2 * WIDTH + 3 * gap
    height = rows * (HEIGHT + head + gap) + gap
    body = f'<style>{style}</style><rect width="{width}" height="{height}" fill="var(--card)"/>'
    for place, (title, curves) in enumerate(panels.items()):
        left = gap + place % 2 * (WIDTH + gap)
        top = gap + place // 2 * (HEIGHT + head + gap)
        body += f'<text x="{left}" y="{top + 12}" font-weight="600" fill="var(--ink)">{escape(title)}</text>'
        for row, line_names in enumerate(names[title]):
            words = [
                f'<tspan dx="{9 * bool(n)}" fill="var(--c{i % len(COLORS)})">{escape(name)}</tspan>'
                for n, (i, name) in enumerate(line_names)
            ]
            body += f'<text x="{left}" y="{top + 30 + line * row}">{"".join(words)}</text>'
        panel = render_svg([(i, *of) for i, of in enumerate(curves.items())], title, x_name=x_name)
        body += f'<svg x="{left}" y="{top + head}" width="{WIDTH}" height="{HEIGHT}"' + panel.removeprefix(
            "<svg"
        )
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {spaces} viewBox="0 0 {width} {height}" font-size="12.5">{body}</svg>\n'
