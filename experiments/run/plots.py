"""The plots of a run, as PNG, PDF and SVG files, to be read in grey too."""

from __future__ import annotations

import contextlib
import math
import pathlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import matplotlib
from cycler import cycler

from spec_jax import processes
from spec_jax.show.plots import STYLE

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402, the back end comes first

# Series differ in colour (Okabe and Ito's palette), in marker and in line.
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 3)), (0, (1, 3)), (0, (8, 2)))
CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")
_STYLE = STYLE | {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "spec_jax",  # equal plots are equal files
    "figure.dpi": 130,
    "axes.prop_cycle": cycler(color=CYCLE) + cycler(linestyle=LINES),
}


def look_of(number: int) -> dict[str, Any]:
    """Returns colour, marker and line of series ``number``, as options of a plot."""
    looks = {"color": CYCLE, "marker": MARKERS, "linestyle": LINES}
    return {"linewidth": 1.2} | {name: x[number % len(x)] for name, x in looks.items()}


@contextlib.contextmanager
def panels(
    path: pathlib.Path,
    columns: int,
    size: tuple[float, float],
    legend: Mapping[str, Any] | None = types.MappingProxyType({}),
    rows: int = 1,
    **options: Any,
) -> Iterator[Sequence[Any]]:
    """Yields the axes of a figure, and saves it; every axis with labels has a legend.

    Args:
      path: The PNG file. A PDF file, for papers, and an SVG file, for pages, stand beside it. The
        SVG file names each panel "panel X Y WIDTH HEIGHT TITLE", its place in it in points.
      columns: The number of panels in a row.
      size: Of the figure, in inches.
      legend: Options of the legends; None: there are none.
      rows: The number of rows.
      **options: Of ``pyplot.subplots``.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained", **options
        )
        axes = axes.ravel()
        yield axes
        for axis in axes:
            has_labels = legend is not None and axis.get_legend_handles_labels()[0]
            if axis.get_legend() is None and has_labels:
                axis.legend(**legend)
        if processes.is_writer():
            figure.draw_without_rendering()
            figure.set_layout_engine("none")  # it is laid out, once for all files
            for axis in figure.axes:
                box = axis.get_tightbbox().transformed(figure.dpi_scale_trans.inverted())
                top = figure.get_figheight() - box.y1
                place = " ".join(f"{72 * x:.1f}" for x in (box.x0, top, box.width, box.height))
                axis.set_gid(f"panel {place} {' '.join(axis.get_title().split())}")
            figure.savefig(path)
            figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})
            figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
        plt.close(figure)


def whole_numbers(axis: Any, values: Iterable[int] | None = None) -> None:
    """Labels whole numbers alone below a panel, also if there is one value.

    Args:
      axis: The panel, after everything is drawn.
      values: What was tried, on a logarithmic axis; None: the axis is linear.
    """
    if values is None:
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        return
    if not (values := list(values)):
        return
    axis.set_xscale("log", base=2)
    ticks = spaced(values, 9 * axis.get_position().width * axis.figure.get_figwidth())
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlim(min(values) / 2**0.3, max(values) * 2**0.3)


def plot_training(path: pathlib.Path, lines: Sequence[Mapping[str, float]]) -> None:
    """Draws loss by step, and what evaluations measured: tau, and acceptance by position.

    Args:
      path: The PNG file.
      lines: Of a run's metrics.jsonl.
    """
    positions = {f"accept_{i}": f"position {i}" for i in range(1, 9)}
    shown = (
        ("loss", {"loss": "training", "held_out_loss": "held out"}, lines),
        ("tau, mean acceptance length", {"tau": "tau"}, lines),
        ("accepted in real decoding", positions, [line for line in lines if "tau" in line]),
    )
    with panels(path, len(shown), (11, 3.6)) as axes:
        for axis, (label, names, kept) in zip(axes, shown):
            for name, text in names.items():
                if points := [(line["step"], line[name]) for line in kept if name in line]:
                    mark = {"marker": "o", "markersize": 3} if len(points) <= 30 else {}
                    axis.plot(*zip(*points), label=text, **mark)
            axis.set(xlabel="step", ylabel=label)


def spaced(values: Iterable[float], room: float) -> list[float]:
    """Returns those of ``values`` whose labels fit below a logarithmic axis, in order.

    Args:
      values: Where points are; the axis reaches from the smallest to the largest.
      room: The number of digits that fit below the axis.
    """
    found = []
    numbers = sorted(set(values))
    span = math.log2(numbers[-1] / numbers[0]) or 1.0
    for x in numbers:
        digits = len(f"{x:g}{found[-1]:g}") + 2 if found else 0  # and a space around each
        if not found or room * math.log2(x / found[-1]) / span >= digits / 2:
            found.append(x)
    return found
