"""Interleaved repeats, ratios with their spread, and the lines of a benchmark's table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

Timer = Callable[[], float]  # runs once, returns milliseconds of one unit of work


def loop_timer(run: Callable[[Any], Any], carry: Any, iterations: int) -> Timer:
    """Times ``carry = run(carry)``, a compiled loop that may donate its carry; ms an iteration.

    It runs once before it is timed.
    """

    def time_ms() -> float:
        nonlocal carry
        begin = time.perf_counter()
        carry = jax.block_until_ready(run(carry))
        return (time.perf_counter() - begin) * 1e3 / iterations

    time_ms()
    return time_ms


class Spread(NamedTuple):
    """The median of repeats, between their quartiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles of what the repeats gave."""
    low, median, high = np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75])
    return Spread(float(median), float(low), float(high))


def interleave(
    timers: Mapping[Any, Timer], repeats: int,
    on_turn: Callable[[str], None] = lambda text: None, *, is_backwards: bool = False,
) -> dict[Any, np.ndarray]:  # fmt: skip
    """Times A B C ... C B A ..., so that drift of the machine meets all alike.

    Every other turn runs backwards: what one timer does to the next (a cold cache) then
    falls on both of its neighbours.

    Args:
      timers: The timers by name; each is already compiled and has run once.
      repeats: The number of turns.
      on_turn: Called with a text after each turn.
      is_backwards: Whether the first turn is one of those that run backwards.

    Returns:
      f64[repeats] by name: repeat i of one name may be divided by repeat i of another.
    """
    times: dict[Any, list[float]] = {name: [] for name in timers}
    for turn in range(repeats):
        for name in list(timers)[:: -1 if turn % 2 != is_backwards else 1]:
            times[name].append(timers[name]())
        on_turn(f"turn {turn + 1} of {repeats}")
    return {name: np.asarray(values) for name, values in times.items()}


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
      part: of the benchmark.
      what: is measured.
      value: median and quartiles over the repeats.
      unit: "x" for a ratio, "ms", "tok/s".
      bar: what the median is held against, or None: reported only.
      is_upper: the median must not exceed the bar; else it must reach it.
      note: what a reader must know beside the number.
    """

    part: str
    what: str
    value: Spread
    unit: str = "x"
    bar: float | None = None
    is_upper: bool = True
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is met; None without one."""
        if self.bar is None:
            return None
        median = self.value.median
        return median <= self.bar if self.is_upper else median >= self.bar

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {
            "value": self.value.median, "quartiles": [self.value.low, self.value.high],
            "is_met": self.is_met,
        }  # fmt: skip

    def cells(self) -> list[str]:
        """The line as text, in the order of ``HEADER``."""
        form = (lambda x: f"{x:.0f}") if self.unit == "tok/s" else (lambda x: f"{x:.3g}")
        unit = self.unit if self.unit == "x" else f" {self.unit}"
        bar = "" if self.bar is None else f"{'<=' if self.is_upper else '>='} {self.bar:g}"
        met = {True: "yes", False: "NO", None: ""}[self.is_met]
        low, high = form(self.value.low), form(self.value.high)
        return [
            self.part, self.what, f"{form(self.value.median)}{unit}", f"{low}–{high}", bar, met,
            self.note,
        ]  # fmt: skip


HEADER = ("part", "measured", "median", "quartiles", "bar", "met", "note")


