"""Groups layers with equal structure, so that a repeated pattern compiles as one scan.

A ``ScanGroup`` has the numbers of the layers at each place of the pattern: ``(range(0, 32, 4),
range(1, 32, 4), range(2, 32, 4), range(3, 32, 4))`` scans 8 steps of 4 layers, whose weights are
stacked range by range. A layer by itself is ``(range(i, i + 1),)``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence

from spec_jax.models.families import AnyConfig, family_of, layer_kinds

ScanGroup = tuple[range, ...]

MAX_PERIOD = 16  # longer patterns are not looked for


def laid_out(config: AnyConfig, platform: str) -> AnyConfig:
    """Returns a config whose layers lie as passes on a platform read them fastest.

    On TPUs layers that repeat are stacked, if those of the family can be. On GPUs and CPUs they are
    apart, as a slice of a stack would be written before it is read.

    Args:
      config: of a model.
      platform: as jax names it: "cpu", "gpu" or "tpu".
    """
    if not family_of(config).can_scan:
        return config
    return dataclasses.replace(config, scan_layers=platform == "tpu")


@functools.cache
def runs_of(config: AnyConfig) -> tuple[ScanGroup, ...]:
    """Returns the groups of a model's layers: of one layer each, unless ``config.scan_layers``."""
    if not config.scan_layers:
        return tuple((range(i, i + 1),) for i in range(config.num_hidden_layers))
    tables = map(tuple, (table.items() for table in family_of(config).layer_tables(config)))
    return shortest_runs([*zip(layer_kinds(config), tables)])


def shortest_runs(layers: Sequence[Hashable]) -> tuple[ScanGroup, ...]:
    """Returns the groups that compile the fewest layers, of those the fewest, the longest first.

    Args:
      layers: one value a layer, equal for layers that are alike.
    """
    L = len(layers)
    same = [0] * (MAX_PERIOD + 1)  # how many layers from here on equal the one a period later
    # Layers compiled and runs from here on; the first run's layers, negated, and its period.
    best = {L: (0, 0, 0, 0)}
    for first in reversed(range(L)):
        options = []
        for period in range(1, min(MAX_PERIOD, L - first) + 1):
            later = first + period
            is_same = later < L and layers[first] == layers[later]
            same[period] = same[period] + 1 if is_same else 0
            for count in range(min(period, 2), same[period] // period + 2):
                compiled, runs, *_ = best[first + period * count]
                options.append((compiled + period, runs + 1, -period * count, period))
        best[first] = min(options)
    runs = []
    first = 0
    while first < L:
        *_, size, period = best[first]
        stop = first - size
        runs.append(tuple(range(i, stop, period) for i in range(first, first + period)))
        first = stop
    return tuple(runs)


def name_of(layers: range) -> str:
    """Returns the name of the weights of some layers in ``params["layers"]``.

    It is "3" of one layer, and of a stack what a slice is written as: "3:61", or "0:32:4".
    """
    if len(layers) == 1:
        return str(layers.start)
    step = f":{layers.step}" if layers.step > 1 else ""
    return f"{layers.start}:{layers.stop}{step}"


@functools.cache
def stacks_of(config: AnyConfig) -> dict[int, tuple[range, int]]:
    """Returns of each layer which layers its weights are stacked with, and its place there."""
    stacks = (layers for run in runs_of(config) for layers in run)
    return {i: (layers, place) for layers in stacks for place, i in enumerate(layers)}
