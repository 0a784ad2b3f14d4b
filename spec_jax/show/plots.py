"""Plots of one generation and of statistics. Matplotlib is imported when something is plotted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax.errors import ConfigError
from spec_jax.intervals import wilson
from spec_jax.show.page import COLORS

STYLE = {
    "figure.facecolor": "white",  # a dark page may show it
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "font.size": 10,
}
_LINES = tuple(COLORS[kind] for kind in ("bonus", "accepted", "corrected", "rejected"))


@contextlib.contextmanager
def panels(columns: int, axes: Any = None, size: tuple[float, float] = (4.6, 3.0)) -> Iterator[Any]:
    """Yields axes to draw on: those given, or those of a new figure.

    In a notebook a new figure is shown once, as the value of its cell; elsewhere
    ``matplotlib.pyplot.show`` shows it.

    Args:
      columns: how many are needed.
      axes: to draw on, one or a sequence of them; None: new ones.
      size: of each new panel, in inches.

    Raises:
      ConfigError: matplotlib is not installed, or too few axes are given.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ConfigError(
            "matplotlib is not installed, and plots need it: pip install matplotlib"
        ) from error
    if axes is not None:
        axes = np.atleast_1d(np.asarray(axes, object)).ravel()
        if len(axes) != columns:
            raise ConfigError(f"axes are {len(axes)}; this plot has {columns} panels")
        yield axes
        return
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, columns, figsize=(size[0] * columns, size[1]), squeeze=False, layout="constrained"
        )
        figure._repr_mimebundle_ = functools.partial(_in_notebook, figure)
        yield axes[0]
    if "inline" in plt.get_backend():
        plt.close(figure)


def _in_notebook(figure: Any, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns the picture of a figure, and the text that a notebook shows in place of it."""
    from IPython.core.pylabtools import print_figure

    names = (f"{a.get_title()}: {a.get_ylabel()} by {a.get_xlabel()}" for a in figure.axes)
    alt = f"plot of {'; '.join(name.strip(' :') for name in names)}"
    return {"image/png": print_figure(figure, base64=True)}, {"image/png": {"alt": alt}}


def plot_rounds(
    accepted: Sequence[int], own: Sequence[str], offered: Sequence[int], axes: Any = None
) -> Any:
    """Draws the tokens of each round: accepted drafts, the target's own token, what was left over.

    Args:
      accepted: drafts that each round accepted.
      own: the kind of the token after them, "corrected" or "bonus"; "" for none.
      offered: drafts that each round offered.
      axes: to draw on; None: a new figure.

    Returns:
      The matplotlib figure.
    """
    accepted, offered = np.asarray(accepted, int), np.asarray(offered, int)
    number = np.arange(1, len(accepted) + 1)
    width = max(6.0, min(0.16 * len(number) + 2, 14.0))
    with panels(1, axes, (width, 2.8)) as (axis,):
        axis.bar(number, accepted, 0.85, color=COLORS["accepted"], label="accepted drafts")
        top = accepted
        for kind in ("corrected", "bonus"):
            is_it = np.asarray([name == kind for name in own], int).reshape(len(number))
            if is_it.any():
                axis.bar(number, is_it, 0.85, accepted, color=COLORS[kind], label=kind)
            top = top + is_it
        dropped = np.maximum(offered - accepted, 0)
        if dropped.any():
            look = {"color": "none", "edgecolor": "0.6", "linewidth": 0.8}
            axis.bar(number, dropped, 0.85, top, label="drafts that were dropped", **look)
        mean = top.mean() if len(number) else float("nan")
        axis.set(xlabel="round", ylabel="tokens", title=f"{mean:.2f} tokens a round")
        for which in (axis.xaxis, axis.yaxis):
            which.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axis.legend(ncols=4, loc="upper left", bbox_to_anchor=(0, -0.22), borderaxespad=0)
        return axis.figure


def plot_acceptance(
    rate: Sequence[float],
    reached: Sequence[int],
    expected: Sequence[float],
    lengths: Sequence[int],
    tau: float,
    axes: Any = None,
) -> Any:
    """Draws acceptance by position, and how often a round accepted how many drafts.

    Args:
      rate: conditional acceptance by position, NaN where none was reached.
      reached: drafts that the rule looked at, by position.
      expected: the rule's closed form by position, or nothing.
      lengths: rounds by accepted drafts, 0 to K.
      tau: tokens a round.
      axes: two, to draw on; None: a new figure.

    Returns:
      The matplotlib figure.
    """
    rate, (low, high) = np.asarray(rate, float), wilson(rate, reached).T
    with panels(2, axes) as (left, right):
        position = np.arange(1, len(rate) + 1)
        bars = np.maximum([rate - low, high - rate], 0)
        look = {"fmt": "o-", "capsize": 3, "color": COLORS["accepted"]}
        left.errorbar(position, rate, bars, label="measured (bars: 95 %)", **look)
        if len(expected):
            left.plot(position, expected, "--", color="0.45", label="expected of the rule")
        left.set(xlabel="position in the draft", ylabel="accepted, if reached", title="acceptance")
        left.set_ylim(-0.03, 1.05)
        left.legend(loc="lower left")
        right.bar(range(len(lengths)), lengths, 0.85, color=COLORS["accepted"])
        right.set(xlabel="drafts accepted", ylabel="rounds", title=f"tau {tau:.2f}, tokens a round")
        for which in (left.xaxis, right.xaxis, right.yaxis):
            which.get_major_locator().set_params(integer=True, min_n_ticks=1)
        return left.figure


def plot_lines(
    lines: Mapping[str, Sequence[tuple[float, float]]], label: str, axes: Any = None
) -> Any:
    """Draws a panel for each line.

    Args:
      lines: points (x, y) by the name of y.
      label: of x.
      axes: one a line, to draw on; None: a new figure.

    Returns:
      The matplotlib figure.
    """
    with panels(len(lines), axes) as some:
        for axis, (name, points), color in zip(some, lines.items(), _LINES * len(lines)):
            axis.plot(*zip(*points), "o-" if len(points) < 50 else "-", color=color)
            axis.set(xlabel=label, ylabel=name)
        return some[0].figure
