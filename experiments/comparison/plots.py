"""The plots of a comparison: over K, by position, by category, and over batches."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.run.plots import CYCLE, LINES, MARKERS, look_of, panels, whole_numbers
from spec_jax.evaluation.costs import Costs, predict
from spec_jax.evaluation.results import CategoryResult, CellResult
from spec_jax.show.plots import wilson

_BELOW = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.12), "ncols": 2}
_WIDEST = 1.7  # a bar that is longer than so many times the largest speed-up is cut off


class _Series(NamedTuple):
    """Results of one method and rule at one temperature, chains or trees, in the order of K."""

    label: str
    color: str
    marker: str
    line: Any
    results: list[CellResult]
    is_tree: bool

    @property
    def look(self) -> dict[str, Any]:
        """Colour, marker and line, as options of a plot; trees are hollow."""
        face = "none" if self.is_tree else self.color
        return {
            "color": self.color,
            "marker": self.marker,
            "linestyle": self.line,
            "linewidth": 1.2,
            "markerfacecolor": face,
        }


def _series(results: Sequence[CellResult], temperature: float) -> list[_Series]:
    found: dict[tuple[str, str, bool], list[CellResult]] = {}
    for r in sorted(results, key=lambda r: r.cell.k):
        if r.cell.temperature == temperature and not r.cell.is_plain:
            found.setdefault((r.cell.method, r.cell.rule, bool(r.cell.tree)), []).append(r)
    return [
        _Series(
            f"{method}{' trees' if is_tree else ''}, {rule}",
            CYCLE[i % len(CYCLE)],
            MARKERS[i % len(MARKERS)],
            LINES[i % len(LINES)],
            rows,
            is_tree,
        )
        for i, ((method, rule, is_tree), rows) in enumerate(sorted(found.items(), reverse=True))
    ]


def _beside(at: float, number: int, count: int) -> float:
    """Where one of ``count`` points at ``at`` is drawn, so that their bars can be told apart."""
    return at + 0.5 * ((number + 0.5) / count - 0.5)


def _draw(
    path: pathlib.Path,
    results: Sequence[CellResult],
    draw: Callable[[Any, list[_Series]], None],
    x_label: str,
    y_label: str,
) -> None:
    """Saves one panel for each temperature; ``draw(axis, series)`` fills it."""
    temperatures = list(dict.fromkeys(r.cell.temperature for r in results))
    size = (1.2 + 4.3 * len(temperatures), 5.2)
    below = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.16), "ncols": 2}
    with panels(path, len(temperatures), size, below, sharey=True) as axes:
        for axis, temperature in zip(axes, temperatures):
            kind = "greedy" if temperature == 0 else "sampled"
            axis.set(title=f"{kind}, temperature {temperature:g}", xlabel=x_label)
            draw(axis, _series(results, temperature))
            whole_numbers(axis)
        axes[0].set_ylabel(y_label)


def plot_speedup(path: pathlib.Path, results: Sequence[CellResult], costs: Costs) -> None:
    """Draws the speed-up over K: measured points with their 95 % intervals, and predicted lines.

    A bar that is longer than the plot is high is cut off.
    """
    top = 1.0

    def draw(axis, series):
        nonlocal top
        axis.axhline(1, color="0.45", linewidth=1)
        for number, s in enumerate(series):
            look, last = s.look, s.results[-1]
            x = [_beside(r.cell.k, number, len(series)) for r in s.results]
            speedup = np.asarray([r.speedup.value for r in s.results], float)
            bounds = [r.speedup.bounds for r in s.results]
            low, high = np.asarray(bounds, float).T
            shown = np.concatenate([speedup, np.minimum(high, 2 * speedup)])
            axis.errorbar(
                x,
                speedup,
                np.maximum([speedup - low, high - speedup], 0),
                capsize=3,
                **look | {"linestyle": ""},
            )
            if not s.is_tree:  # no speed-up is predicted for trees
                ks = range(1, last.cell.k + 1)
                predicted = np.asarray([predict(costs, last, k) for k in ks])
                # Of several rows the table's also counts those that end early.
                predicted *= last.predicted_speedup / predicted[-1]
                axis.plot(ks, predicted, **look | {"marker": ""})
                shown = np.append(shown, predicted)
            top = max([top, *shown[np.isfinite(shown)]])
            axis.plot([], [], label=s.label, **look | ({"linestyle": ""} if s.is_tree else {}))
        # A point at zero is seen whole. The panels share this axis, so the last limits hold.
        axis.set_ylim(-0.03 * top, 1.05 * top)

    _draw(
        path,
        results,
        draw,
        "K, drafted tokens per round (lines: predicted)",
        "speed-up over plain decoding (bars: 95 %)",
    )


def plot_acceptance(path: pathlib.Path, results: Sequence[CellResult]) -> None:
    """Draws acceptance by position (of a tree, by level) at the largest K.

    Bars show 95 % intervals of independent rounds, crosses the expected acceptance.
    """

    def draw(axis, series):
        has_expected = False
        for number, s in enumerate(series):
            last = s.results[-1]
            rate = np.asarray(last.stats.acceptance_by_position, float)
            position = [_beside(i, number, len(series)) for i in range(1, 1 + len(rate))]
            low, high = wilson(rate, last.stats.reached_at).T
            error = np.maximum([rate - low, high - rate], 0)
            axis.errorbar(
                position, rate, error, capsize=3, label=f"{s.label}, K={last.cell.k}", **s.look
            )
            expected = np.asarray(last.stats.expected_by_position, float)
            if expected.size:
                has_expected = True
                axis.plot(position, expected, "x", color="black", markersize=7)
        if has_expected:
            axis.plot([], [], "x", color="black", label="expected of the rule")
        axis.set_ylim(-0.03, 1.03)

    _draw(path, results, draw, "position in the draft", "accepted, if reached (bars: 95 %)")


def _labels(results: Sequence[CellResult]) -> list[str]:
    return list(dict.fromkeys(r.cell.label for r in results if not r.cell.is_plain))


def _bars(entries: Sequence[CellResult | CategoryResult]) -> tuple[np.ndarray, np.ndarray]:
    """Speed-ups and the two lengths of their error bars."""
    value = np.asarray([e.speedup.value for e in entries], float)
    bounds = [e.speedup.bounds for e in entries]
    low, high = np.asarray(bounds, float).T
    return value, np.nan_to_num(np.maximum([value - low, high - value], 0))


def _end(entries: Sequence[CellResult | CategoryResult]) -> float:
    """The end of an axis of speed-ups, on which the longest bars are cut off."""
    return _WIDEST * np.nanmax([1.0, *(e.speedup.value for e in entries)])


def plot_batches(path: pathlib.Path, results: Sequence[CellResult]) -> None:
    """Draws the speed-up over the batch size: where speculation stops paying.

    Args:
      path: The PNG file.
      results: Of several batch sizes.
    """
    sizes = sorted({r.batch for r in results})
    with panels(path, 1, (7, 5), _BELOW) as (axis,):
        axis.axhline(1, color="0.45", linewidth=1)
        for number, label in enumerate(_labels(results)):
            same = [r for r in results if r.cell.label == label]
            value, error = _bars(same)
            at = [r.batch * 1.02**number for r in same]
            axis.errorbar(at, value, error, capsize=3, label=label, **look_of(number))
        whole_numbers(axis, sizes)
        axis.set(xlabel="prompts decoded together", ylabel="speed-up over plain (bars: 95 %)")
        axis.set_ylim(0, _end(results))


def plot_categories(path: pathlib.Path, results: Sequence[CellResult]) -> None:
    """Draws the speed-up of each method by category, a panel for each temperature.

    Args:
      path: The PNG file.
      results: Of batches of one question.
    """
    temperatures = list(dict.fromkeys(r.cell.temperature for r in results))
    names = list(results[0].categories)
    end = _end([part for r in results for part in r.categories.values()])
    size = (1.5 + 5.5 * len(temperatures), 1.8 + 0.32 * len(names))
    with panels(path, len(temperatures), size, _BELOW, sharey=True) as axes:
        for axis, temperature in zip(axes, temperatures):
            axis.axvline(1, color="0.45", linewidth=1)
            group = [r for r in results if r.cell.temperature == temperature]
            labels = _labels(group)
            for number, label in enumerate(labels):
                (r,) = (r for r in group if r.cell.label == label)
                value, error = _bars([r.categories[name] for name in names])
                place = np.arange(len(names)) + 0.7 * ((number + 0.5) / len(labels) - 0.5)
                axis.errorbar(
                    value,
                    place,
                    xerr=error,
                    capsize=2,
                    label=label,
                    **look_of(number) | {"linestyle": "", "markersize": 4},
                )
            kind = "greedy" if temperature == 0 else "sampled"
            axis.set(title=f"{kind}, temperature {temperature:g}")
            axis.set(xlabel="speed-up over plain (bars: 95 %)", xlim=(0, end))
        axes[0].set_yticks(range(len(names)), names)
        axes[0].invert_yaxis()
