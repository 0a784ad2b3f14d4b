"""The plots of ``experiments.evaluate`` beside those of decode: by category, and over batches."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.run.plots import look_of, panels, whole_numbers

_BELOW = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.12), "ncols": 2}
_WIDEST = 1.7  # a bar that is longer than so many times the largest speed-up is cut off


def _labels(results: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(r["label"] for r in results if r["method"] != "plain"))


def _bars(entries: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Speed-ups and the two lengths of their error bars."""
    value = np.asarray([e["speedup"] for e in entries], float)
    bounds = [e["speedup_interval"] or (np.nan, np.nan) for e in entries]
    low, high = np.asarray(bounds, float).T
    return value, np.nan_to_num(np.maximum([value - low, high - value], 0))


def _end(entries: Sequence[Mapping[str, Any]]) -> float:
    """The end of an axis of speed-ups, on which the longest bars are cut off."""
    return _WIDEST * max([1.0, *(e["speedup"] for e in entries if e["speedup"] == e["speedup"])])


def plot_batches(path: pathlib.Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Draws the speed-up over the batch size: where speculation stops paying.

    Args:
      path: The PNG file.
      results: With several values of ``batch``.
    """
    sizes = sorted({r["batch"] for r in results})
    with panels(path, 1, (7, 5), _BELOW) as (axis,):
        axis.axhline(1, color="0.45", linewidth=1)
        for number, label in enumerate(_labels(results)):
            same = [r for r in results if r["label"] == label]
            value, error = _bars(same)
            at = [r["batch"] * 1.02**number for r in same]
            axis.errorbar(at, value, error, capsize=3, label=label, **look_of(number))
        whole_numbers(axis, sizes)
        axis.set(xlabel="prompts decoded together", ylabel="speed-up over plain (bars: 95 %)")
        axis.set_ylim(0, _end(results))


def plot_categories(path: pathlib.Path, results: Sequence[Mapping[str, Any]]) -> None:
    """Draws the speed-up of each method by category, a panel for each temperature.

    Args:
      path: The PNG file.
      results: Of batches of one question.
    """
    temperatures = list(dict.fromkeys(r["temperature"] for r in results))
    names = list(results[0]["categories"])
    end = _end([part for r in results for part in r["categories"].values()])
    size = (1.5 + 5.5 * len(temperatures), 1.8 + 0.32 * len(names))
    with panels(path, len(temperatures), size, _BELOW, sharey=True) as axes:
        for axis, temperature in zip(axes, temperatures):
            axis.axvline(1, color="0.45", linewidth=1)
            group = [r for r in results if r["temperature"] == temperature]
            labels = _labels(group)
            for number, label in enumerate(labels):
                (r,) = (r for r in group if r["label"] == label)
                value, error = _bars([r["categories"][name] for name in names])
                place = np.arange(len(names)) + 0.7 * ((number + 0.5) / len(labels) - 0.5)
                axis.errorbar(
                    value, place, xerr=error, capsize=2, label=label,
                    **look_of(number) | {"linestyle": "", "markersize": 4},
                )  # fmt: skip
            kind = "greedy" if temperature == 0 else "sampled"
            axis.set(title=f"{kind}, temperature {temperature:g}")
            axis.set(xlabel="speed-up over plain (bars: 95 %)", xlim=(0, end))
        axes[0].set_yticks(range(len(names)), names)
        axes[0].invert_yaxis()
