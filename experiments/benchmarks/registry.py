"""The parts of the benchmark, by name; a new part is a module and one entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ml_collections import ConfigDict

from experiments.benchmarks import (
    adaptive,
    cpu_layout,
    heads,
    peers,
    states,
    streaming,
    synthetic,
    training,
    zoo,
)
from experiments.benchmarks.table import Result


class Part(NamedTuple):
    """One part of the benchmark.

    Attributes:
      check: Raises ConfigError if its section of the config has a value out of range.
      measure: ``(config, records) -> Result``; the records of the parts before it by name.
    """

    check: Callable[[ConfigDict], None]
    measure: Callable[[ConfigDict, Mapping[str, dict]], Result]


PARTS = {
    "llama110m": Part(synthetic.check, synthetic.measure),
    "heads": Part(heads.check, heads.measure),
    "streaming": Part(streaming.check, streaming.measure),
    "zoo": Part(zoo.check, zoo.measure),
    "adaptive": Part(adaptive.check, adaptive.measure),
    "cpu_layout": Part(cpu_layout.check, cpu_layout.measure),
    "states": Part(states.check, states.measure),
    "training": Part(training.check, training.measure),
    "peers": Part(peers.check, peers.measure),
}
