"""Small SVG plots that follow the page's theme: colours are CSS variables, texts inherit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from experiments.run.ticks import spaced

# Marks that tell series apart without colours, around (0, 0).
_MARKS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z",
    "M-3.5,-3.5h7v7h-7z",
    "M0,-4.8L4.6,3.4L-4.6,3.4z",
    "M0,-5L5,0L0,5L-5,0z",
    "M0,4.8L4.6,-3.4L-4.6,-3.4z",
    "M-5,-1.7h3.3v-3.3h3.4v3.3h3.3v3.4h-3.3v3.3h-3.4v-3.3h-3.3z",
)
_WIDTH, _HEIGHT = 440, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 40, 12, 10, 40
_ROOM = 46  # digits below a plot, in the larger type of a narrow screen


class Look(NamedTuple):
    """How a method looks in every plot: the number of its colour, and its mark."""

    color: int
    mark: str

    @property
    def key(self) -> Markup:
        """The mark as a small picture, for a legend or a table."""
        return Markup(
            '<svg class="key" viewBox="-7 -7 14 14" aria-hidden="true">'
            '<path d="{}" fill="var(--m{})"/></svg>'
        ).format(self.mark, self.color)


PLAIN = Look(0, _MARKS[0])


class Point(NamedTuple):
    """A point of a series; ``low`` and ``high`` are NaN where it has no interval."""

    x: float
    y: float
    low: float
    high: float
    title: str


class Series(NamedTuple):
    """Points of one method, in order. Hollow marks are trees; lines may be dashed."""

    look: Look
    points: Sequence[Point]
    is_hollow: bool = False
    has_line: bool = True
    is_dashed: bool = False
    has_marks: bool = True


def looks(methods: Sequence[str]) -> dict[str, Look]:
    """Returns the look of each method; plain decoding is grey."""
    others = [name for name in dict.fromkeys(methods) if name != "plain"]
    found = {"plain": PLAIN}
    for i, name in enumerate(others):
        found[name] = Look(1 + i % 7, _MARKS[i % len(_MARKS)])
    return found


def _is_finite(*values: float) -> bool:
    return all(value is not None and math.isfinite(value) for value in values)


def nice_top(value: float) -> tuple[float, float]:
    """Returns the end of an axis that begins at 0 and holds a value, and the step of its ticks."""
    for step in (0.1, 0.2, 0.25, 0.5, 1, 2, 2.5, 5, 10, 20, 50, 100):
        if value / step <= 6:
            return math.ceil(value / step - 1e-9) * step, step
    return value, value / 5


def interval(
    value: float,
    low: float,
    high: float,
    top: float,
    *,
    predicted: float = math.nan,
    title: str = "",
    width: int = 132,
) -> Markup:
    """Draws a speed-up with its interval on a line from 0 to ``top``, beside a mark at 1.

    Args:
      value: The measured speed-up.
      low, high: Its interval; NaN for none. What lies beyond ``top`` is cut off.
      top: The end of the line, which other rows share.
      predicted: Drawn as a tick; NaN for none.
      title: What the bar says, for who cannot see it.
      width: In pixels.
    """
    at = lambda x: round(4 + (width - 8) * min(max(x, 0), top) / top, 1)
    kind = "unsure"
    if _is_finite(low, high):
        kind = "faster" if low > 1 else "slower" if high < 1 else "unsure"
    parts = [Markup('<line class="rail" x1="4" x2="{}" y1="9" y2="9"/>').format(width - 4)]
    parts += [Markup('<line class="one" x1="{0}" x2="{0}" y1="1" y2="17"/>').format(at(1))]
    if _is_finite(low, high):
        parts.append(
            Markup('<line class="ci {}" x1="{}" x2="{}" y1="9" y2="9"/>').format(
                kind, at(low), at(high)
            )
        )
    if _is_finite(predicted):
        parts.append(Markup('<path class="predicted" d="M{0},3V15"/>').format(at(predicted)))
    if _is_finite(value):
        parts.append(Markup('<circle class="{}" cx="{}" cy="9" r="4"/>').format(kind, at(value)))
    return Markup(
        '<svg class="bar" viewBox="0 0 {0} 18" width="{0}" height="18" role="img">'
        "<title>{1}</title>{2}</svg>"
    ).format(width, title, Markup("").join(parts))


def stacked(parts: Sequence[float], mark: float, top: float, title: str) -> Markup:
    """Draws parts of a whole in a row, and a tick at ``mark`` if it is finite and within ``top``.

    Args:
      parts: Not negative.
      mark: What the whole is compared with.
      top: The end of the line, which other rows share.
      title: What the bar says, for who cannot see it.
    """
    width, begin, shapes = 240, 0.0, []
    for number, part in enumerate(parts):
        shapes.append(
            Markup('<rect class="stage s{}" x="{}" y="3" width="{}" height="12"/>').format(
                number % 3, round(width * begin / top, 1), round(width * part / top, 1)
            )
        )
        begin += part
    if _is_finite(mark) and mark <= top:
        shapes.append(
            Markup('<path class="predicted" d="M{},0V18"/>').format(round(width * mark / top, 1))
        )
    return Markup(
        '<svg class="bar" viewBox="0 0 {0} 18" width="{0}" height="18" role="img">'
        "<title>{1}</title>{2}</svg>"
    ).format(width, title, Markup("").join(shapes))


def rates(values: Sequence[float | None]) -> Markup:
    """Draws acceptance by position as small columns."""
    known = [v if v is not None and math.isfinite(v) else 0.0 for v in values]
    width = 9 * len(known) + 1
    columns = Markup("").join(
        Markup('<path class="col" d="M{},20v-{}h7v{}z"/>').format(
            1 + 9 * i, round(18 * v, 1), round(18 * v, 1)
        )
        for i, v in enumerate(known)
    )
    text = " ".join(f"{v:.2f}" for v in known)
    return Markup(
        '<svg class="rates" viewBox="0 0 {0} 21" width="{0}" height="21" role="img">'
        '<title>{1}</title><path class="rail" d="M0,20.5H{0}"/>{2}</svg>'
    ).format(width, text, columns)


def plot(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_ticks: Sequence[float],
    top: float,
    step: float,
    reference: float | None = None,
    is_log: bool = False,
) -> Markup:
    """Draws series of points with intervals over shared axes.

    Args:
      series: What is drawn.
      title: What the plot shows, for who cannot see it.
      x_label, y_label: The axes' names.
      x_ticks: Values of x that are named, but for those whose labels would overlap; the axis
        reaches a little beyond them.
      top: The end of the y axis, which begins at 0.
      step: Between the ticks of y.
      reference: A value of y that is marked across the plot.
      is_log: Whether equal ratios of x lie equally far apart.
    """
    scale = math.log2 if is_log else float
    begin, end = scale(min(x_ticks)), scale(max(x_ticks))
    margin = 0.5 if begin == end else 0.06 * (end - begin)
    inner_w, inner_h = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    span = end - begin + 2 * margin
    at_x = lambda x: round(_LEFT + inner_w * (scale(x) - begin + margin) / span, 1)
    at_y = lambda y: round(_TOP + inner_h * (1 - min(max(y, 0), top) / top), 1)
    parts = []
    for i in range(int(top / step + 1.5)):
        y = at_y(i * step)
        parts.append(
            Markup(
                '<line class="grid" x1="{}" x2="{}" y1="{y}" y2="{y}"/>'
                '<text x="{}" y="{}" text-anchor="end">{}</text>'
            ).format(_LEFT, _WIDTH - _RIGHT, _LEFT - 6, y + 4, f"{i * step:g}", y=y)
        )
    for x in spaced(x_ticks, room=_ROOM, is_log=is_log):
        parts.append(
            Markup('<text x="{}" y="{}" text-anchor="middle">{}</text>').format(
                at_x(x), _HEIGHT - _BOTTOM + 17, f"{x:g}"
            )
        )
    parts.append(
        Markup('<text class="label" x="{}" y="{}" text-anchor="middle">{}</text>').format(
            _LEFT + inner_w / 2, _HEIGHT - 5, x_label
        )
    )
    if reference is not None and reference <= top:
        parts.append(
            Markup('<line class="one" x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(
                _LEFT, _WIDTH - _RIGHT, y=at_y(reference)
            )
        )
    for s in series:
        parts.append(_draw(s, at_x, at_y))
    return Markup(
        '<figure class="plot"><figcaption>{}</figcaption>'
        '<svg viewBox="0 0 {} {}" role="img"><title>{}</title>{}</svg></figure>'
    ).format(y_label, _WIDTH, _HEIGHT, title, Markup("").join(parts))


def _draw(series: Series, at_x, at_y) -> Markup:
    color = f"var(--m{series.look.color})"
    points = [p for p in series.points if _is_finite(p.x, p.y)]
    parts = []
    if series.has_line and len(points) > 1:
        path = "M" + "L".join(f"{at_x(p.x)},{at_y(p.y)}" for p in points)
        dash = Markup(' stroke-dasharray="4 4"') if series.is_dashed else ""
        parts.append(Markup('<path class="line" d="{}" stroke="{}"{}/>').format(path, color, dash))
    for p in points if series.has_marks else ():
        bar = Markup("")
        if _is_finite(p.low, p.high):
            bar = Markup('<path class="whisker" d="M{0},{1}V{2}" stroke="{3}"/>').format(
                at_x(p.x), at_y(p.low), at_y(p.high), color
            )
        fill = "var(--card)" if series.is_hollow else color
        parts.append(
            Markup(
                '<g><title>{}</title>{}<path class="mark" d="{}" transform="translate({},{})" '
                'fill="{}" stroke="{}"/></g>'
            ).format(p.title, bar, series.look.mark, at_x(p.x), at_y(p.y), fill, color)
        )
    return Markup("").join(parts)
