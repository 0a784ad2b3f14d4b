"""The axes of plots: whole numbers that were tried, with labels that fit."""

import math

import numpy as np
from support.results import result

from experiments.comparison.plots import plot_speedup
from experiments.planning import plan_report
from experiments.run import plots


def test_a_plot_of_one_value_has_whole_ticks(tmp_path, monkeypatch):
    """Of one K, and of one batch on a logarithmic axis; what was tried is labelled if it fits."""
    monkeypatch.setattr(plots.plt, "close", lambda figure: None)
    shown = lambda axis: [t for t in axis.get_xticks() if np.prod(axis.get_xlim() - t) <= 0]
    figure = lambda: plots.plt.figure(plots.plt.get_fignums()[-1])
    results = [result(name, 1.0, 1.2, tree="3") for name in "ab"]
    plot_speedup(tmp_path / "a.png", results, {})
    assert shown(figure().axes[0]) == [3.0]
    cell = {"topology": "t", "mesh": "m", "fits": True}
    tried = {64: [12], 128: [3, 4, 5]}
    cells = [
        cell | {"slots": slots, "batch": b, "k": k, "tok_s": 1.0 + k}
        for slots, batches in tried.items()
        for b in batches
        for k in (0, 2)
    ]
    plan_report.plot(tmp_path / "b.png", cells)
    for axis, batches in zip(figure().axes, tried.values(), strict=True):
        assert shown(axis) == batches and not [*axis.get_xticks(minor=True)]
        assert [label.get_text() for label in axis.get_xticklabels()] == [*map(str, batches)]
    monkeypatch.undo()
    plots.plt.close("all")


def test_labels_that_would_overlap_are_left_out():
    sizes = [2**i for i in range(18)]
    assert plots.spaced(sizes, 200) == sizes
    few = plots.spaced(sizes, 40)
    assert few[:4] == sizes[:4] and len(few) < 15 and set(few) < set(sizes)
    assert plots.spaced([8, 1, 2, 9, 2], 12) == [1, 2, 8] and plots.spaced([7], 3) == [7]
    # Two labels and a space between them need the room of all their digits.
    widths = [len(str(n)) + 1 for n in few]
    centers = [40 * math.log2(n) / 17 for n in few]
    assert all(b - a >= (v + w) / 2 for a, b, v, w in zip(centers, centers[1:], widths, widths[1:]))
