"""The small bars of the page's tables, as SVG: colours are CSS variables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from spec_jax.intervals import Interval


def _picture(kind: str, width: float, height: int, title: str, shapes: Sequence[Markup]) -> Markup:
    """Joins shapes into a picture whose alternative text is ``title``."""
    return Markup(
        '<svg class="{0}" viewBox="0 0 {1} {2}" width="{1}" height="{2}" role="img">'
        "<title>{3}</title>{4}</svg>"
    ).format(kind, width, height, title, Markup("").join(shapes))


def _at(form: str, *values: object) -> Markup:
    return Markup(form).format(*(round(x, 1) if isinstance(x, float) else x for x in values))


def interval(
    speedup: Interval, top: float, predicted: float | None = None, width: int = 132
) -> Markup:
    """Draws a speed-up with its interval on a line from 0 to ``top``, beside a mark at 1.

    Args:
      speedup: What was measured; what lies beyond ``top`` is cut off.
      top: The end of the line, which other rows share.
      predicted: Drawn as a tick if it is finite.
      width: In pixels.
    """

    def place(x):
        return 4 + (width - 8) * min(max(x, 0.0), top) / top

    kind = "faster" if speedup.low > 1 else "slower" if speedup.high < 1 else "unsure"
    shapes = [
        _at('<line class="rail" x1="4" x2="{}" y1="9" y2="9"/>', width - 4),
        _at('<line class="one" x1="{0}" x2="{0}" y1="1" y2="17"/>', place(1)),
    ]
    if speedup.low <= speedup.high:
        line = '<line class="ci {}" x1="{}" x2="{}" y1="9" y2="9"/>'
        shapes.append(_at(line, kind, place(speedup.low), place(speedup.high)))
    if predicted is not None and math.isfinite(predicted):
        shapes.append(_at('<path class="predicted" d="M{},3V15"/>', place(predicted)))
    if math.isfinite(speedup.value):
        shapes.append(_at('<circle class="{}" cx="{}" cy="9" r="4"/>', kind, place(speedup.value)))
    return _picture("bar", width, 18, f"{speedup:.2f}", shapes)


def stacked(parts: Sequence[float], mark: float, top: float, title: str) -> Markup:
    """Draws parts of a whole in a row, and a tick at ``mark`` if it is finite and within ``top``.

    Args:
      parts: Not negative.
      mark: What the whole is compared with.
      top: The end of the line, which other rows share.
      title: The alternative text.
    """
    width = 240
    begin = 0.0
    shapes = []
    for number, part in enumerate(parts):
        rect = '<rect class="stage s{}" x="{}" y="3" width="{}" height="12"/>'
        shapes.append(_at(rect, number % 3, width * begin / top, width * part / top))
        begin += part
    if mark <= top:
        shapes.append(_at('<path class="predicted" d="M{},0V18"/>', width * mark / top))
    return _picture("bar", width, 18, title, shapes)


def rates(values: Sequence[float]) -> Markup:
    """Draws acceptance by position as small columns; NaN as 0."""
    known = [0.0 if math.isnan(v) else v for v in values]
    width = 9 * len(known) + 1
    shapes = [_at('<path class="rail" d="M0,20.5H{}"/>', width)]
    column = '<path class="col" d="M{},20v-{}h7v{}z"/>'
    shapes += [_at(column, 1 + 9 * i, 18 * v, 18 * v) for i, v in enumerate(known)]
    return _picture("rates", width, 21, " ".join(f"{v:.2f}" for v in known), shapes)
