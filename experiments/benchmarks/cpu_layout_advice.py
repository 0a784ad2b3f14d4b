"""The layouts that the part "cpu_layout" compares, and what their times recommend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from experiments.benchmarks.table import Line
from spec_jax.evaluation.timing import spread
from spec_jax.models import cpu_layout
from spec_jax.models.cpu_layout import LARGE, MAX_ROWS, Panels
from spec_jax.show.tables import Section

WIDTHS = {  # ``Panels.widths`` of each layout
    "whole, apart": (),
    "whole, joined": (0,),
    "panels of 16, joined": (16,),
    "panels of 32, joined": (32, 16),
    "panels of 64, joined": (64, 32, 16),
}
TWO_ROWS = ", two rows"  # ends the names of layouts in which one token is padded to two rows
WORTH = 1.05  # times as fast as the table's choice must be what is recommended in its place
OWN = "the table's own"  # what the table chooses, where it is none of these

Times = Mapping[str, np.ndarray]  # milliseconds of every repeat, by layout


def names(tokens: int) -> list[str]:
    """Returns the layouts that are compared for passes of so many tokens."""
    padded = [name + TWO_ROWS for name, widths in WIDTHS.items() if widths and tokens == 1]
    return [*WIDTHS, *padded]


def widths_of(name: str) -> tuple[tuple[int, ...], int]:
    """Returns ``Panels.widths`` and ``Panels.min_rows`` of a layout."""
    return WIDTHS[name.removesuffix(TWO_ROWS)], 2 if name.endswith(TWO_ROWS) else 1


def fastest(times: Times) -> str:
    """Returns the layout with the smallest median."""
    return min(times, key=lambda name: float(np.median(times[name])))


def recommend(times: Times, choice: str) -> str:
    """Returns the fastest layout, or the table's choice if noise alone may part the two.

    Ratios of the two, repeat by repeat, tell: noise may, if their quartiles contain 1. A median
    below ``WORTH`` is left alone as well.

    Args:
      times: Of passes of one number of tokens.
      choice: The table's.
    """
    best = fastest(times)
    gain = spread(times[choice] / times[best])
    return best if gain.low > 1 and gain.median >= WORTH else choice


def lines_for(
    wanted: Mapping[int, str | None],
    dtype: str,
    is_large: bool,
    table: Sequence[Panels] = cpu_layout.TABLE,
) -> list[Panels]:
    """Returns the lines that a table should have for one dtype and size of matrices.

    Args:
      wanted: A layout by tokens a pass, which holds up to the next number that was measured; None
        for what the table has, which also stays before the first number and after the last.
      dtype: Of the weights.
      is_large: See ``Panels``.
      table: The table as it is.
    """
    lines: list[Panels] = []
    for rows in range(1, MAX_ROWS + 1):
        measured = max((n for n in wanted if n <= rows <= max(wanted)), default=None)
        if measured is None or wanted[measured] is None:
            line = cpu_layout.find(rows, LARGE + is_large, dtype, table)
            if line is None:
                continue
            widths, min_rows = line.widths, line.min_rows
        else:
            widths, min_rows = widths_of(wanted[measured])
        line = Panels(jax.__version_info__[:2], dtype, (rows, rows), is_large, widths, min_rows)
        if lines and _continues(lines[-1], line):
            lines[-1] = lines[-1]._replace(rows=(lines[-1].rows[0], rows))
        else:
            lines.append(line)
    return lines


def _continues(before: Panels, line: Panels) -> bool:
    rows = line.rows[0]
    # Padding makes no difference to a pass that has as many rows.
    pads_alike = before.min_rows == line.min_rows or rows >= max(before.min_rows, line.min_rows)
    return before.rows[1] == rows - 1 and before.widths == line.widths and pads_alike


def as_text(line: Panels) -> str:
    """Returns a line of the table as it would stand in ``spec_jax/models/cpu_layout.py``."""
    values = f'{line.since}, "{line.dtype}", {line.rows}, {line.is_large}, {line.widths}'
    return f"Panels({values}{f', min_rows={line.min_rows}' if line.min_rows > 1 else ''}),"


def advice(
    title: str,
    dtype: str,
    again: Mapping[int, Times],
    choices: Mapping[int, str],
    sizes: Sequence[bool],
) -> str:
    """Returns what to use on this machine, with lines for the table where it has something else.

    Args:
      title: The model and its dtype.
      dtype: Of its weights.
      again: Times of the table's choice and of another layout, by tokens a pass, where that seemed
        faster.
      choices: What the table chooses, by tokens a pass.
      sizes: The values of ``Panels.is_large`` that its matrices have.
    """
    wanted: dict[int, str | None] = dict.fromkeys(choices)
    better = []
    for n, times in again.items():
        name = recommend(times, choices[n])
        if name != choices[n]:
            gain = spread(times[choices[n]] / times[name]).median
            better.append(f"{name} for {tokens_text(n)}, {gain:.2f} x as fast")
            wanted[n] = name
    text = f"recommended on this machine for {title}: "
    if not better:
        return f"{text}the table's choice"
    if len(better) < len(wanted):
        better.append("otherwise the table's choice")
    paragraphs = [f"{text}{'; '.join(better)}."]
    for is_large in sizes:
        which = "more than" if is_large else "at most"
        paragraphs.append(
            "  Lines to put first in TABLE of spec_jax/models/cpu_layout.py, for matrices of "
            f"{which} {LARGE:,} elements:"
        )
        lines = lines_for(wanted, dtype, is_large)
        paragraphs.append("\n".join(f"      {as_text(line)}" for line in lines))
    return "\n\n".join(paragraphs)


def tokens_text(n: int) -> str:
    """Returns a number of tokens in words."""
    return f"{n} {'token' if n == 1 else 'tokens'}"


def case_lines(title: str, times: Mapping[int, Times], choices: Mapping[int, str]) -> list[Line]:
    """Returns a line for each number of tokens: the table's choice over the fastest layout."""
    lines = []
    for n, choice in choices.items():
        best = fastest(times[n])
        note = choice if best == choice else f"{choice}; the fastest is {best}"
        what = f"{title}, {tokens_text(n)}: the table's choice / the fastest layout"
        lines.append(Line(what, times[n][choice] / times[n][best], note=note))
    return lines


def section(title: str, times: Mapping[int, Times], choices: Mapping[int, str]) -> Section:
    """Returns the table of the medians of one model in one dtype."""

    def cell(n, name):
        if name not in times[n]:
            return ""
        return f"{'*' if name == choices[n] else ''}{np.median(times[n][name]):.3g}"

    rows = dict.fromkeys(name for n in times for name in times[n])
    header = ["layout", *map(str, times)]
    return Section(
        f"{title}: ms of a pass by its tokens; * is the table's choice",
        header,
        [[name, *(cell(n, name) for n in times)] for name in rows],
        header[1:],
    )
