"""Line charts and bars as inline SVG. Colours are classes `c0`, `c1` ... of the page's style sheet. PURE."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 360, 190
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24
MAX_POINTS = 240  # of a drawn curve; of more, the lowest and the highest of each stretch stay
MAX_HOVER_POINTS = 32
NUM_COLORS = 6
SMOOTH_FROM = 40  # values from which a mean is drawn over them
NOISY_FROM = 3.0  # times its range, the way that a curve goes


@dataclass(frozen=True)
class Line:
    """One curve: points in the order in which they are joined."""

    x: Sequence[float]
    y: Sequence[float]
    color: int
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


def choose_ticks(low: float, high: float, most: int = 4) -> list[float]:
    """Return round numbers within [low, high], 2 to `most` + 1 of them for a range that has width."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(x: Sequence[float], y: Sequence[float], most: int = MAX_POINTS) -> list[tuple[float, float]]:
    """Return at most `most` points in order; of each stretch its lowest and highest, so no spike is lost."""
    points = list(zip(x, y, strict=True))
    if len(points) <= most:
        return points
    kept = {0, len(points) - 1}
    num_buckets = (most - 2) // 2
    for bucket in range(num_buckets):
        span = range(bucket * len(points) // num_buckets, (bucket + 1) * len(points) // num_buckets)
        kept |= {min(span, key=lambda i: points[i][1]), max(span, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]


def smooth(values: Sequence[float], width: int) -> list[float]:
    """Return centred means over `width` values, fewer at the ends."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    half = width // 2
    result = []
    for i in range(len(values)):
        first, end = max(i - half, 0), min(i + half + 1, len(values))
        result.append((sums[end] - sums[first]) / (end - first))
    return result


def is_noisy(values: Sequence[float]) -> bool:
    """Whether values go up and down more than they go anywhere; a schedule, or a peak so far, does not."""
    way = sum(abs(after - before) for before, after in itertools.pairwise(values))
    return way > NOISY_FROM * (max(values) - min(values))


class Plane:
    """The scales of a chart."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.low_x, self.high_x = _range([x for line in lines for x in line.x])
        low, high = _range([y for line in lines for y in line.y])
        margin = (high - low) * 0.06
        self.low_y, self.high_y = low - margin, high + margin

    def x(self, value: float) -> float:
        """Return the place of a value on the x axis."""
        share = (value - self.low_x) / (self.high_x - self.low_x)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        """Return the place of a value on the y axis."""
        share = (value - self.low_y) / (self.high_y - self.low_y)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        """Return the points as an SVG path."""
        return "M" + "L".join(f"{self.x(x):g},{self.y(y):g}" for x, y in points)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest value, a little apart where they are one."""
    low, high = min(values), max(values)
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    spread = abs(low) * 0.1 or 1.0
    return low - spread, high + spread


def draw_lines(lines: Sequence[Line], label: str, *, x_name: str = "step", is_trail: bool = False) -> str:
    """Return a chart of curves as an <svg>; `label` is what a screen reader says.

    A trail (score against KL) is joined in the order of time: its points grow darker, and its end has a dot.
    """
    lines = [line for line in lines if len(line.x)]
    plane = Plane(lines)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label, quote=True)}">',
        _draw_axes(plane, x_name),
    ]
    for line in lines:
        parts.append(_draw_trail(plane, line) if is_trail else _draw_curve(plane, line))
        parts.append(_draw_hover(plane, line, x_name))
    return "".join([*parts, "</svg>"])


def _draw_axes(plane: Plane, x_name: str) -> str:
    parts = []
    for tick in choose_ticks(plane.low_y, plane.high_y):
        y = plane.y(tick)
        parts.append(f'<path class="grid" d="M{LEFT},{y:g}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 3.5:g}" text-anchor="end">{shown(tick)}</text>')
    base = HEIGHT - BOTTOM
    ticks = choose_ticks(plane.low_x, plane.high_x, 5)
    if x_name == "step":
        ticks = [tick for tick in ticks if tick == int(tick)]
    for tick in ticks:
        x = plane.x(tick)
        if x < WIDTH - 28 - 6 * len(x_name):  # the name of the axis stands there
            parts.append(f'<text x="{x:g}" y="{base + 15}" text-anchor="middle">{shown(tick)}</text>')
        parts.append(f'<path class="axis" d="M{x:g},{base}v3"/>')
    parts.append(f'<path class="axis" d="M{LEFT},{base}H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{base + 15}" text-anchor="end" class="name">{escape(x_name)}</text>'
    )
    return "".join(parts)


def _draw_curve(plane: Plane, line: Line) -> str:
    points = thin(line.x, line.y)
    color = f"c{line.color % NUM_COLORS}"
    if len(points) < 3:
        dots = (
            f'<circle class="dot {color}" cx="{plane.x(x):g}" cy="{plane.y(y):g}" r="3"/>' for x, y in points
        )
        return f'<path class="line faint {color}" d="{plane.path(points)}"/>{"".join(dots)}'
    if len(line.x) < SMOOTH_FROM or not is_noisy(line.y):
        return f'<path class="line {color}" d="{plane.path(points)}"/>'
    means = smooth(line.y, max(len(line.y) // 20, 5))
    return (
        f'<path class="line faint {color}" d="{plane.path(points)}"/>'
        f'<path class="line {color}" d="{plane.path(thin(line.x, means, 120))}"/>'
    )


def _draw_trail(plane: Plane, line: Line) -> str:
    color = f"c{line.color % NUM_COLORS}"
    places = range(len(line.x))
    if len(places) > MAX_POINTS:
        places = [round(i * (len(line.x) - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)]
    dots = "".join(
        f'<circle class="dot {color}" cx="{plane.x(line.x[i]):g}" cy="{plane.y(line.y[i]):g}" r="2.4" '
        f'opacity="{0.15 + 0.65 * n / max(len(places) - 1, 1):.2f}"/>'
        for n, i in enumerate(places)
    )
    if len(line.x) < 5:
        return dots
    width = max(len(line.x) // 6, 3)
    trail = list(zip(smooth(line.x, width), smooth(line.y, width), strict=True))
    trail = trail[:: max(len(trail) // 60, 1)] + [trail[-1]]
    x, y = plane.x(trail[-1][0]), plane.y(trail[-1][1])
    end = f'<circle class="end {color}" cx="{x:g}" cy="{y:g}" r="4.5"/>'
    return f'{dots}<path class="line {color}" d="{plane.path(trail)}"/>{end}'


def _draw_hover(plane: Plane, line: Line, x_name: str) -> str:
    """Return invisible circles whose title says the numbers: no script is needed for that."""
    step = max(-(-len(line.x) // MAX_HOVER_POINTS), 1)
    places = sorted({*range(0, len(line.x), step), len(line.x) - 1})
    name = f"{line.name}: " if line.name else ""
    return "".join(
        f'<circle class="hover" cx="{plane.x(line.x[i]):g}" cy="{plane.y(line.y[i]):g}" r="6">'
        f"<title>{escape(name)}{escape(x_name)} {shown(line.x[i])}: {shown(line.y[i])}</title></circle>"
        for i in places
    )


def draw_shares(shares: Sequence[tuple[str, float]], label: str) -> str:
    """Return one bar cut into named shares, as an <svg> over the whole width; sizes of any unit above 0."""
    total = sum(size for _, size in shares)
    parts, x = [], 0.0
    for index, (name, size) in enumerate(shares):
        width = 1000 * size / total
        parts.append(
            f'<rect class="bar c{index % NUM_COLORS}" x="{x:.1f}" y="0" width="{width:.1f}" height="22">'
            f"<title>{escape(name)}: {100 * size / total:.1f} %</title></rect>"
        )
        x += width
    return (
        f'<svg class="shares" viewBox="0 0 1000 22" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label, quote=True)}">{"".join(parts)}</svg>'
    )
