"""The plots of a comparison: over K, by position, by category, over batches, and predicted."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.comparison.report import best_cells
from experiments.run.plots import look_of, panels, whole_numbers
from spec_jax.evaluation.costs import Costs, predict
from spec_jax.evaluation.results import CellResult
from spec_jax.intervals import Interval

_SPEEDUP = "speed-up over plain decoding (bars: 95 %)"
_MOST = 4  # methods of a panel; where there are more, each has a panel
_WIDEST = 1.7  # a bar that is longer than so many times the largest speed-up is cut off


class _Series(NamedTuple):
    """Results that are drawn alike, trees hollow, in the order of K."""

    label: str
    look: dict[str, Any]
    results: list[CellResult]


def _series(results: Sequence[CellResult], *, is_by_cell: bool = False) -> list[_Series]:
    """Groups results of one temperature by method and rule, chains and trees, or by cell."""
    groups: dict[tuple[str, bool], list[CellResult]] = {}
    for r in results:
        label = f"{r.cell.title}{' trees' if r.cell.tree else ''}, {r.cell.rule}"
        groups.setdefault((r.cell.name if is_by_cell else label, bool(r.cell.tree)), []).append(r)
    return [
        _Series(
            label,
            look_of(i) | ({"markerfacecolor": "none"} if is_tree else {}),
            sorted(rows, key=lambda r: r.cell.k),
        )
        for i, ((label, is_tree), rows) in enumerate(groups.items())
    ]


def _beside(number: int, count: int, room: float = 0.5) -> float:
    """How far one of ``count`` points is drawn beside its place, so that no bar hides another."""
    return room * ((number + 0.5) / count - 0.5)


def _points(
    axis: Any,
    look: dict[str, Any],
    places: Sequence[float],
    figures: Sequence[Interval],
    names: Sequence[str],
    *,
    is_across: bool = False,
) -> None:
    """Draws figures with bars, which a figure without an interval does not have.

    Args:
      axis: The panel.
      look: Colour and marker.
      places: Where each figure is.
      figures: The figures.
      names: Of the figures; a page shows one when the pointer is over its point.
      is_across: Whether figures are horizontal.
    """
    look = look | {"linestyle": "", "capsize": 3}
    for place, figure, name in zip(places, figures, names):
        value, low, high = figure
        error = np.nan_to_num(np.maximum([[value - low], [high - value]], 0))
        if is_across:
            point = axis.errorbar([value], [place], xerr=error, **look)
        else:
            point = axis.errorbar([place], [value], yerr=error, **look)
        point.lines[0].set_gid(f"point {name}: {figure:.2f}")


def _draw(
    path: pathlib.Path,
    results: Sequence[CellResult],
    draw: Callable[[Any, list[CellResult]], None],
    labels: tuple[str, str],
    size: tuple[float, float] = (4.3, 5.2),
    *,
    is_by_cell: bool = False,
) -> None:
    """Saves panels that ``draw(axis, results)`` fills.

    There is one for each temperature, and one for each of its methods if they are many.
    """
    drafted = [r for r in results if not r.cell.is_plain]
    groups = {r.cell.temperature: [] for r in results}
    for r in drafted:
        groups[r.cell.temperature].append(r)
    kinds = {t: f"{'greedy' if t == 0 else 'sampled'}, temperature {t:g}" for t in groups}
    series = {t: _series(group, is_by_cell=is_by_cell) for t, group in groups.items()}
    parts = [(kinds[t], group) for t, group in groups.items()]
    columns = len(parts)
    is_small = max(map(len, series.values()), default=0) > _MOST
    if is_small:
        parts = [(f"{s.label}\ntemperature {t:g}", s.results) for t in series for s in series[t]]
        labels = tuple(label.partition(" (")[0] for label in labels)
        columns = min(max(map(len, series.values())), 5)
        size = (size[0] / 2, size[1] / 2)
    rows = -(-len(parts) // columns)
    figure = (1.2 * (not is_small) + size[0] * columns, size[1] * rows)
    options = {"rows": rows, "sharey": True, "legend": None}
    font = {"fontsize": 8} if is_small else {}
    with panels(path, columns, figure, **options) as axes:
        for axis, (title, group) in zip(axes, parts):
            axis.set_title(title, **font)
            axis.set_xlabel(labels[0], **font)
            axis.set_ylabel(labels[1], **font)
            draw(axis, group)
            # A page may show each panel in a row of its own.
            axis.tick_params(labelleft=True, labelsize=8 if is_small else 10)
        for axis in axes[len(parts) :]:
            axis.remove()
        if is_small:
            return
        names = [name for axis in axes for name in axis.get_legend_handles_labels()[1]]
        columns = max(1, int((size[0] + 0.3) / (0.6 + 0.08 * max(map(len, names), default=0))))
        rows = -(-len(names) // (columns * len(axes)))
        axes[0].figure.set_figheight(size[1] + 0.18 * max(rows - 3, 0))
        for axis in (axis for axis in axes if axis.get_legend_handles_labels()[0]):
            axis.legend(loc="upper left", bbox_to_anchor=(0.0, -0.16), ncols=columns)


def plot_speedup(
    path: pathlib.Path, results: Sequence[CellResult], costs: Mapping[str | None, Costs]
) -> None:
    """Draws the speed-up over K: measured points with their 95 % intervals, and predicted lines.

    A bar that is longer than the plot is high is cut off.

    Args:
      path: The PNG file.
      results: Of one batch size.
      costs: The costs of passes by dtype.
    """
    top = 1.0

    def draw(axis, results):
        nonlocal top
        axis.axhline(1, color="0.45", linewidth=1)
        series = _series(results)
        for number, s in enumerate(series):
            last = s.results[-1]
            beside = _beside(number, len(series))
            figures = [r.speedup for r in s.results]
            names = [r.cell.name for r in s.results]
            _points(axis, s.look, [r.cell.k + beside for r in s.results], figures, names)
            # A bar that is much longer is cut off.
            ends = [x for i in figures for x in (i.value, min(i.high, 2 * i.value))]
            known = None if last.cell.tree else costs.get(last.cell.dtype)  # none for trees
            if known is not None:
                ks = range(1, last.cell.k + 1)
                predicted = np.asarray([predict(known, last, k) for k in ks])
                # Of several rows the table's also counts those that end early.
                predicted *= last.predicted_speedup / predicted[-1]
                axis.plot(ks, predicted, **s.look | {"marker": ""})
                ends += predicted.tolist()
            top = max([top, *(x for x in ends if math.isfinite(x))])
            axis.plot([], [], label=s.label, **s.look | ({} if known else {"linestyle": ""}))
        # A point at zero is seen whole. The panels share this axis, so the last limits hold.
        axis.set_ylim(-0.03 * top, 1.05 * top)
        whole_numbers(axis)

    _draw(path, results, draw, ("K, drafted tokens per round (lines: predicted)", _SPEEDUP))


def plot_acceptance(path: pathlib.Path, results: Sequence[CellResult]) -> None:
    """Draws acceptance by position (of a tree, by level) at the largest K.

    Bars show 95 % intervals, crosses the expected acceptance.
    """

    def draw(axis, results):
        series = _series(results)
        for number, s in enumerate(series):
            last = s.results[-1]
            rates = [x.value for x in last.acceptance]
            places = [i + _beside(number, len(series)) for i in range(1, 1 + len(rates))]
            axis.plot(places, rates, label=f"{s.label}, K={last.cell.k}", **s.look)
            names = [f"{last.cell.name} at {i}" for i in range(1, 1 + len(rates))]
            _points(axis, s.look, places, last.acceptance, names)
            if expected := last.stats.expected_by_position:
                axis.plot(places, expected, "x", color="black", markersize=7)
        axis.set_ylim(-0.03, 1.03)
        whole_numbers(axis)

    has_expected = any(r.stats.expected_by_position for r in results)
    label = "position in the draft" + " (x: expected of the rule)" * has_expected
    _draw(path, results, draw, (label, "accepted, if reached (bars: 95 %)"))


def plot_batches(path: pathlib.Path, results: Sequence[CellResult]) -> None:
    """Draws the speed-up over the batch size, of each draft's fastest cell."""
    sizes = sorted({r.batch for r in results})
    best = {r.cell for r in best_cells(results)}
    results = [r for r in results if r.cell in best]
    end = _WIDEST * _largest(results)

    def draw(axis, results):
        axis.axhline(1, color="0.45", linewidth=1)
        for number, s in enumerate(_series(results, is_by_cell=True)):
            places = [r.batch * 1.02**number for r in s.results]
            axis.plot(places, [r.speedup.value for r in s.results], label=s.label, **s.look)
            names = [f"{s.label}, batch {r.batch}" for r in s.results]
            _points(axis, s.look, places, [r.speedup for r in s.results], names)
        whole_numbers(axis, sizes)
        axis.set_ylim(0, end)

    _draw(path, results, draw, ("prompts decoded together", _SPEEDUP), is_by_cell=True)


def plot_categories(path: pathlib.Path, results: Sequence[CellResult]) -> None:
    """Draws the speed-up of each cell by category, of batches of one question."""
    names = list(results[0].categories)
    end = _WIDEST * _largest([part for r in results for part in r.categories.values()])

    def draw(axis, results):
        axis.axvline(1, color="0.45", linewidth=1)
        series = _series(results, is_by_cell=True)
        for number, s in enumerate(series):
            beside = _beside(number, len(series), 0.7)
            figures = [s.results[0].categories[name].speedup for name in names]
            places = [i + beside for i in range(len(names))]
            titles = [f"{s.label}, {name}" for name in names]
            _points(axis, s.look | {"markersize": 4}, places, figures, titles, is_across=True)
            axis.plot([], [], label=s.label, **s.look | {"linestyle": ""})
        axis.set(xlim=(0, end), ylim=(len(names) - 0.5, -0.5))
        axis.set_yticks(range(len(names)), names)

    size = (5.5, 1.8 + 0.32 * len(names))
    _draw(path, results, draw, (_SPEEDUP, ""), size, is_by_cell=True)


def plot_predicted(path: pathlib.Path, results: Sequence[CellResult]) -> None:
    """Draws measured over predicted speed-ups, as far as they are known."""
    known = [r for r in results if math.isfinite(r.predicted_speedup or math.nan)]
    end = 1.1 * max(_largest(known), *(r.predicted_speedup for r in known))

    def draw(axis, results):
        axis.plot([0, end], [0, end], ":", color="0.45", linewidth=1)
        for s in _series(results):
            predicted = [r.predicted_speedup for r in s.results]
            names = [r.cell.name for r in s.results]
            _points(axis, s.look, predicted, [r.speedup for r in s.results], names)
            axis.plot([], [], label=s.label, **s.look | {"linestyle": ""})
        axis.set(xlim=(0, end), ylim=(0, end))

    _draw(path, known, draw, ("predicted speed-up", "measured speed-up (bars: 95 %)"))


def _largest(entries: Sequence[Any]) -> float:
    """The largest speed-up of results or categories, at least 1."""
    return float(np.nanmax([1.0, *(e.speedup.value for e in entries)]))
