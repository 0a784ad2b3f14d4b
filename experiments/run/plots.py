"""The plots of a run, as PNG and PDF files, to be read in grey too."""

from __future__ import annotations

import contextlib
import pathlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from cycler import cycler

from experiments.run.ticks import spaced
from spec_jax import processes
from spec_jax.evaluation.costs import Costs, predict
from spec_jax.overlap.overlap import Span
from spec_jax.show.plots import STYLE, wilson

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402, the back end comes first

_COLORS = {  # Okabe and Ito's palette
    "standalone": "#0072B2", "ngram": "#D55E00", "eagle": "#009E73", "mtp": "#CC79A7",
    "eagle-1": "#E69F00", "eagle-2": "#F0E442", "eagle-3": "#009E73", "suffix": "#56B4E9",
    "dflash": "#0072B2", "dspark": "#CC79A7",
}  # fmt: skip
# A series is told from others by colour, by marker and by line.
_MARKERS = "osD^vPX*"
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 3)), (0, (1, 3)), (0, (8, 2)))
_CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")
_ACCEPTED = "accepted, if reached"
_STYLE = STYLE | {
    "figure.dpi": 130, "axes.prop_cycle": cycler(color=_CYCLE) + cycler(linestyle=_LINES),
}


class _Series(NamedTuple):
    """Results of one method and rule at one temperature, chains or trees, in the order of K."""

    label: str
    color: str
    marker: str
    line: Any
    results: list[dict]
    is_tree: bool

    @property
    def look(self) -> dict[str, Any]:
        """Colour, marker and line, as options of a plot; trees are hollow."""
        face = "none" if self.is_tree else self.color
        return {
            "color": self.color, "marker": self.marker, "linestyle": self.line, "linewidth": 1.2,
            "markerfacecolor": face,
        }  # fmt: skip


def _series(results: Sequence[dict], temperature: float) -> list[_Series]:
    found: dict[tuple[str, str, bool], list[dict]] = {}
    for r in sorted(results, key=lambda r: r["k"]):
        if r["temperature"] == temperature and r["method"] != "plain":
            found.setdefault((r["method"], r["rule"], bool(r.get("tree"))), []).append(r)
    return [
        _Series(
            f"{method}{' trees' if is_tree else ''}, {rule}",
            _COLORS.get(method, _CYCLE[i % len(_CYCLE)]),
            _MARKERS[i % len(_MARKERS)], _LINES[i % len(_LINES)], rows, is_tree,
        )
        for i, ((method, rule, is_tree), rows) in enumerate(sorted(found.items(), reverse=True))
    ]


def look_of(number: int) -> dict[str, Any]:
    """Returns colour, marker and line of series ``number``, as options of a plot."""
    looks = {"color": _CYCLE, "marker": _MARKERS, "linestyle": _LINES}
    return {"linewidth": 1.2} | {name: x[number % len(x)] for name, x in looks.items()}


def _beside(at: float, number: int, count: int) -> float:
    """Where one of ``count`` points at ``at`` is drawn, so that their bars can be told apart."""
    return at + 0.5 * ((number + 0.5) / count - 0.5)


@contextlib.contextmanager
def panels(
    path: pathlib.Path, columns: int, size: tuple[float, float],
    legend: Mapping[str, Any] = types.MappingProxyType({}), **options: Any,
) -> Iterator[Sequence[Any]]:  # fmt: skip
    """Yields the axes of a figure, and saves it; every axis with labels has a legend.

    Beside the PNG file ``path`` there will be a PDF file, for papers.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            1, columns, figsize=size, squeeze=False, layout="constrained", **options
        )
        yield axes[0]
        for axis in axes[0]:
            if axis.get_legend() is None and axis.get_legend_handles_labels()[0]:
                axis.legend(**legend)
        if processes.is_writer():
            figure.savefig(path)
            figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None})
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
    ticks = spaced(values, room=9 * axis.get_position().width * axis.figure.get_figwidth(),
                   is_log=True)  # fmt: skip
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlim(min(values) / 2**0.3, max(values) * 2**0.3)


def _draw(
    path: pathlib.Path, results: Sequence[dict], draw: Callable[[Any, list[_Series]], None],
    x_label: str, y_label: str,
) -> None:  # fmt: skip
    """Saves one panel for each temperature; ``draw(axis, series)`` fills it."""
    temperatures = list(dict.fromkeys(r["temperature"] for r in results))
    size = (1.2 + 4.3 * len(temperatures), 5.2)
    below = {"loc": "upper left", "bbox_to_anchor": (0.0, -0.16), "ncols": 2}
    with panels(path, len(temperatures), size, below, sharey=True) as axes:
        for axis, temperature in zip(axes, temperatures):
            kind = "greedy" if temperature == 0 else "sampled"
            axis.set(title=f"{kind}, temperature {temperature:g}", xlabel=x_label)
            draw(axis, _series(results, temperature))
            whole_numbers(axis)
        axes[0].set_ylabel(y_label)


def plot_speedup(path: pathlib.Path, results: Sequence[dict], costs: Costs) -> None:
    """Draws the speed-up over K: measured points with their 95 % intervals, and predicted lines.

    A bar that is longer than the plot is high is cut off.
    """
    top = 1.0

    def draw(axis, series):
        nonlocal top
        axis.axhline(1, color="0.45", linewidth=1)
        for number, s in enumerate(series):
            look, last = s.look, s.results[-1]
            x = [_beside(r["k"], number, len(series)) for r in s.results]
            speedup = np.asarray([r["speedup"] for r in s.results], float)
            bounds = [r.get("speedup_interval") or (np.nan, np.nan) for r in s.results]
            low, high = np.asarray(bounds, float).T
            shown = np.concatenate([speedup, np.minimum(high, 2 * speedup)])
            axis.errorbar(
                x, speedup, np.maximum([speedup - low, high - speedup], 0), capsize=3,
                **look | {"linestyle": ""},
            )
            if not s.is_tree:  # no speed-up is predicted for trees
                ks = range(1, last["k"] + 1)
                predicted = np.asarray([predict(costs, last, k) for k in ks])
                # Of several rows the table's also counts those that end early.
                predicted *= last["predicted_speedup"] / predicted[-1]
                axis.plot(ks, predicted, **look | {"marker": ""})
                shown = np.append(shown, predicted)
            top = max([top, *shown[np.isfinite(shown)]])
            axis.plot([], [], label=s.label, **look | ({"linestyle": ""} if s.is_tree else {}))
        # A point at zero is seen whole. The panels share this axis, so the last limits hold.
        axis.set_ylim(-0.03 * top, 1.05 * top)

    _draw(
        path, results, draw, "K, drafted tokens per round (lines: predicted)",
        "speed-up over plain decoding (bars: 95 %)",
    )  # fmt: skip


def plot_acceptance(path: pathlib.Path, results: Sequence[dict]) -> None:
    """Draws acceptance by position (of a tree, by level) at the largest K.

    Bars show 95 % intervals of independent rounds, crosses the expected acceptance.
    """

    def draw(axis, series):
        has_expected = False
        for number, s in enumerate(series):
            last = s.results[-1]
            rate = np.asarray(last["acceptance_by_position"], float)
            position = [_beside(i, number, len(series)) for i in range(1, 1 + len(rate))]
            low, high = wilson(rate, last["reached_at"]).T
            error = np.maximum([rate - low, high - rate], 0)
            axis.errorbar(
                position, rate, error, capsize=3, label=f"{s.label}, K={last['k']}", **s.look
            )
            expected = np.asarray(last["expected_by_position"], float)
            if expected.size:
                has_expected = True
                axis.plot(position, expected, "x", color="black", markersize=7)
        if has_expected:
            axis.plot([], [], "x", color="black", label="expected of the rule")
        axis.set_ylim(-0.03, 1.03)

    _draw(path, results, draw, "position in the draft", f"{_ACCEPTED} (bars: 95 %)")


def plot_tree_sizes(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Draws the time of a round and of its verify pass over the size of the tree.

    Args:
      path: The PNG file.
      record: Of ``experiments.benchmarks.heads.measure``.
    """
    sizes = record["tree_sizes"]
    with panels(path, 1, (5.5, 3.9)) as (axis,):
        axis.plot(sizes, record["round_ms"], "o-", color="#0072B2", label="round")
        axis.plot(sizes, record["verify_ms"], "s-", color="#D55E00", label="its verify pass")
        for name, style, label in (
            ("plain", ":", "plain pass of one token"), ("chain_round", "--", "round of the chain"),
        ):  # fmt: skip
            value = record[f"{name}_ms"]
            axis.axhline(value, color="0.45", linewidth=1, linestyle=style, label=label)
        axis.set(title="EAGLE-3 dynamic tree", xlabel="nodes, with the root", xticks=sizes)
        axis.set(ylabel="milliseconds")
        axis.set_ylim(bottom=0)


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


def plot_timeline(path: pathlib.Path, spans: Sequence[Span]) -> None:
    """Draws what ran when, a row for each set of devices.

    Args:
      path: The PNG file.
      spans: Of ``spec_jax.overlap.overlap``.
    """
    rows = sorted({span.devices for span in spans})
    start = min(span.begin_s for span in spans)
    colors = {"prefill": "0.6", "draft": "#0072B2", "verify": "#D55E00", "accept": "#009E73"}
    with panels(path, 1, (9, 0.9 + 0.7 * len(rows))) as (axis,):
        for what, color in colors.items():
            for row, devices in enumerate(rows):
                bars = [
                    ((s.begin_s - start) * 1e3, (s.end_s - s.begin_s) * 1e3)
                    for s in spans if (s.what, s.devices) == (what, devices)
                ]  # fmt: skip
                axis.broken_barh(bars, (row - 0.35, 0.7), color=color, edgecolor="w", linewidth=0.5)
            axis.plot([], [], "s", color=color, label=what)
        axis.set_yticks(range(len(rows)), rows)
        axis.set_xlabel("milliseconds")
        axis.legend(ncols=len(colors), loc="lower center", bbox_to_anchor=(0.5, 1.0))


def plot_published(
    path: pathlib.Path, pairs: Sequence[tuple[str, str, float, float]]
) -> None:
    """Draws predicted over published speed-up, a panel for each group.

    Args:
      path: The PNG file.
      pairs: The drafter's name, the group, the published and the predicted speed-up of each pair.
    """
    groups = list(dict.fromkeys(group for _, group, *_ in pairs))
    marker = dict(zip(sorted({method for method, *_ in pairs}), _MARKERS))
    limits = [0.8, 1.05 * max(max(pair[2:]) for pair in pairs)]
    with panels(path, len(groups), (4.0 * len(groups), 4.2), sharex=True, sharey=True) as axes:
        for axis, group in zip(axes, groups):
            axis.plot(limits, limits, color="0.45", linewidth=1, linestyle=":")
            found: dict[str, list[tuple[float, float]]] = {}
            for method, of, *point in pairs:
                if of == group:
                    found.setdefault(method, []).append(tuple(point))
            for method, points in sorted(found.items()):
                axis.plot(
                    *zip(*points), marker.get(method, "o"), label=method,
                    color=_COLORS.get(method, "0.4"), markersize=5, markeredgecolor="0.3",
                    markeredgewidth=0.4,
                )  # fmt: skip
            axis.set(title=group, xlabel="published speed-up", xlim=limits, ylim=limits)
        axes[0].set_ylabel("predicted from tau, shapes and peaks")


def plot_growth(
    path: pathlib.Path, grown: Mapping[str, Sequence[dict]], chips: Sequence[dict]
) -> None:
    """Draws the floor of a round over what grows, and the speed of a row and of a chip over chips.

    Args:
      path: The PNG file.
      grown: Points by what grows, with ``plain_ms`` and ``round_ms``.
      chips: Points with ``chips``, ``row_tok_s`` and ``chip_tok_s``.
    """
    with panels(path, len(grown) + 1, (4.0 * (len(grown) + 1), 3.8)) as axes:
        for axis, (name, points) in zip(axes, grown.items()):
            x = [p[name] for p in points]
            axis.plot(x, [p["plain_ms"] for p in points], ":", color="0.45", label="plain")
            axis.plot(
                x, [p["round_ms"] for p in points], "-o", markersize=4, color=_COLORS["eagle"],
                label="round",
            )  # fmt: skip
            if name != "k":
                axis.set(yscale="log")
            whole_numbers(axis, None if name == "k" else x)
            axis.set(xlabel="K" if name == "k" else name, ylabel="at least, ms")
        x = [c["chips"] for c in chips if not c["shortfall_gb"]]
        for name, marker in (("row_tok_s", "o"), ("chip_tok_s", "s")):
            y = [c[name] for c in chips if not c["shortfall_gb"]]
            axes[-1].plot(x, y, f"-{marker}", markersize=4, label=f"a {name.split('_')[0]}")
        axes[-1].set(yscale="log", xlabel="chips", ylabel="at most, tokens/s")
        whole_numbers(axes[-1], x)
