"""The plots of a run, as PNG files."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np

from experiments.common.costs import Costs, predict

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402, the back end comes first

_COLORS = {  # Okabe and Ito's palette
    "standalone": "#0072B2", "ngram": "#D55E00", "eagle": "#009E73", "mtp": "#CC79A7",
    "eagle-1": "#E69F00", "eagle-3": "#009E73", "suffix": "#56B4E9",
}  # fmt: skip
_MARKERS = "osD^vP"
_STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "axes.titlesize": 11, "legend.frameon": False, "legend.fontsize": 9, "font.size": 10,
    "figure.dpi": 130,
}  # fmt: skip


class _Series(NamedTuple):
    """Results of one method and rule at one temperature, chains or trees, in the order of K."""

    label: str
    color: str
    marker: str
    results: list[dict]
    is_tree: bool

    @property
    def face(self) -> str:
        return "none" if self.is_tree else self.color


def _series(results: Sequence[dict], temperature: float) -> list[_Series]:
    found: dict[tuple[str, str, bool], list[dict]] = {}
    for r in sorted(results, key=lambda r: r["k"]):
        if r["temperature"] == temperature and r["method"] != "plain":
            found.setdefault((r["method"], r["rule"], bool(r.get("tree"))), []).append(r)
    rules = list(dict.fromkeys(rule for _, rule, _ in found))
    return [
        _Series(
            f"{method}{' trees' if is_tree else ''}, {rule}", _COLORS.get(method, "0.4"),
            _MARKERS[rules.index(rule) % len(_MARKERS)], rows, is_tree,
        )
        for (method, rule, is_tree), rows in sorted(found.items(), reverse=True)
    ]


def _draw(path: pathlib.Path, results: Sequence[dict], draw, x_label: str, y_label: str) -> None:
    """Saves one panel a temperature; ``draw(axis, series)`` fills it."""
    temperatures = list(dict.fromkeys(r["temperature"] for r in results))
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(
            1, len(temperatures), figsize=(1.2 + 4.3 * len(temperatures), 3.9), sharey=True,
            squeeze=False, layout="constrained",
        )
        for axis, temperature in zip(axes[0], temperatures):
            kind = "greedy" if temperature == 0 else "sampled"
            axis.set_title(f"{kind}, temperature {temperature:g}")
            axis.set_xlabel(x_label)
            draw(axis, _series(results, temperature))
            axis.xaxis.get_major_locator().set_params(integer=True)
            if axis.get_legend_handles_labels()[0]:
                axis.legend()
        axes[0, 0].set_ylabel(y_label)
        figure.savefig(path)
        plt.close(figure)


def plot_speedup(path: pathlib.Path, results: Sequence[dict], costs: Costs) -> None:
    """Speed-up against K: measured points, and the curve that acceptance and costs predict."""

    def draw(axis, series):
        axis.axhline(1, color="0.45", linewidth=1, linestyle=":", label="plain decoding")
        for s in series:
            ks, last = [r["k"] for r in s.results], s.results[-1]
            axis.plot(
                ks, [r["speedup"] for r in s.results], s.marker, color=s.color, label=s.label,
                markerfacecolor=s.face,
            )
            if s.is_tree:
                continue  # no prediction
            ks = range(1, last["k"] + 1)
            axis.plot(ks, [predict(costs, last, k) for k in ks], "--", color=s.color, linewidth=1.3)
        axis.plot([], [], "--", color="0.45", linewidth=1.3, label="predicted")
        axis.set_ylim(bottom=0)

    _draw(path, results, draw, "K, tokens drafted a round", "speed-up over plain decoding")


def plot_acceptance(path: pathlib.Path, results: Sequence[dict]) -> None:
    """Acceptance by position (of a tree, by level) at the largest K, with one standard error,
    beside the expected.
    """

    def draw(axis, series):
        has_expected = False
        for s in series:
            last = s.results[-1]
            rate = np.asarray(last["acceptance_by_position"], float)
            position = np.arange(1, len(rate) + 1)
            error = np.sqrt(rate * (1 - rate) / np.maximum(last["reached_at"], 1))
            label = f"{s.label}, K={last['k']}"
            axis.errorbar(
                position, rate, error, color=s.color, marker=s.marker, capsize=3, label=label,
                markerfacecolor=s.face,
            )
            expected = last["expected_by_position"]
            if expected:
                has_expected = True
                axis.plot(position, np.asarray(expected, float), "--", color=s.color, linewidth=1.3)
        if has_expected:
            axis.plot([], [], "--", color="0.45", label="expected of the rule")
        axis.set_ylim(0, 1.03)

    _draw(path, results, draw, "position in the draft", "accepted, of the drafts judged")


def plot_tree_sizes(path: pathlib.Path, record: dict) -> None:
    """Time of a round and of its verify pass against the size of the tree.

    Args:
      path: of the PNG file.
      record: of ``bench_heads.measure``.
    """
    sizes = record["tree_sizes"]
    with plt.rc_context(_STYLE):
        figure, axis = plt.subplots(figsize=(5.5, 3.9), layout="constrained")
        axis.plot(sizes, record["round_ms"], "o-", color="#0072B2", label="round")
        axis.plot(sizes, record["verify_ms"], "s-", color="#D55E00", label="its verify pass")
        for name, style in (("plain", ":"), ("chain_round", "--")):
            label = {"plain": "plain pass of one token", "chain_round": "round of the chain"}[name]
            value = record[f"{name}_ms"]
            axis.axhline(value, color="0.45", linewidth=1, linestyle=style, label=label)
        axis.set_title("EAGLE-3 dynamic tree")
        axis.set_xlabel("nodes, the root among them")
        axis.set_ylabel("milliseconds")
        axis.set_ylim(bottom=0)
        axis.set_xticks(sizes)
        axis.legend()
        figure.savefig(path)
        plt.close(figure)


def plot_training(path: pathlib.Path, lines: Sequence[Mapping[str, float]]) -> None:
    """Loss by step, and what evaluations measured: tau, and acceptance by position.

    Args:
      path: of the PNG file.
      lines: of a run's metrics.jsonl.
    """
    curve = lambda name: [(line["step"], line[name]) for line in lines if name in line]
    panels = [("loss", ["loss", "held_out_loss"]), ("tokens a target pass", ["tau"])]
    positions = [f"accept_{i}" for i in range(1, 9)]
    measured = [line for line in lines if "tau" in line]
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained")
        for axis, (label, names) in zip(axes, panels):
            for name in names:
                if points := curve(name):
                    axis.plot(*zip(*points), label=name.replace("_", " "))
            axis.set_xlabel("step")
            axis.set_ylabel(label)
            axis.legend()
        for name in positions:
            if points := [(line["step"], line[name]) for line in measured if name in line]:
                axes[2].plot(*zip(*points), label=f"position {name[-1]}")
        axes[2].set_xlabel("step")
        axes[2].set_ylabel("accepted, of the drafts judged")
        axes[2].legend()
        figure.savefig(path)
        plt.close(figure)


def plot_intervals(path: pathlib.Path, rows: Sequence[Mapping]) -> None:
    """Conditional acceptance by position, a line a draft, with intervals.

    Args:
      path: of the PNG file.
      rows: with ``draft``, ``tau`` and ``accept``, of ``experiments.evaluate``.
    """
    with plt.rc_context(_STYLE):
        figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
        for number, row in enumerate(rows):
            at = np.arange(1, len(row["accept"]) + 1) + 0.06 * (number - (len(rows) - 1) / 2)
            value, low, high = np.asarray(row["accept"]).T
            axis.errorbar(
                at, value, [value - low, high - value], marker=_MARKERS[number % len(_MARKERS)],
                capsize=3, label=f"{row['draft']}, tau {row['tau'][0]:.2f}",
            )  # fmt: skip
        axis.set_xticks(range(1, len(rows[0]["accept"]) + 1))
        axis.set_xlabel("position in the draft")
        axis.set_ylabel("accepted, of the drafts judged")
        axis.set_ylim(0, 1.03)
        axis.legend()
        figure.savefig(path)
        plt.close(figure)


def plot_timeline(path: pathlib.Path, spans: Sequence) -> None:
    """What ran when, a row for each set of devices.

    Args:
      path: of the PNG file.
      spans: with ``what``, ``tick``, ``devices``, ``begin_s`` and ``end_s``, of
        ``spec_jax.overlap``.
    """
    rows = sorted({span.devices for span in spans})
    start = min(span.begin_s for span in spans)
    colors = {"prefill": "0.6", "draft": "#0072B2", "verify": "#D55E00", "accept": "#009E73"}
    with plt.rc_context(_STYLE):
        figure, axis = plt.subplots(figsize=(9, 0.9 + 0.7 * len(rows)), layout="constrained")
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
        figure.savefig(path)
        plt.close(figure)
