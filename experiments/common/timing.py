"""Interleaved repeats, their spread, and the lines of a benchmark's table."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from experiments.common.tables import Section
from spec_jax.meshes import use_mesh
from spec_jax.progress import Progress

Timer = Callable[[], float]  # runs once, returns milliseconds of one unit of work
HEADER = ("part", "measured", "median", "quartiles", "bar", "met", "note")


def loop_timer(
    run: Callable[[Any], Any], carry: Any, iterations: int, mesh: Mesh | None = None
) -> Timer:
    """Returns a timer of ``carry = run(carry)``, in milliseconds of one of its iterations.

    Args:
      run: A compiled loop that may donate its carry. It runs once before it is timed.
      carry: What it begins with.
      iterations: The number of its iterations.
      mesh: The devices that it runs on; None: those of its arrays.
    """

    def time_ms() -> float:
        nonlocal carry
        begin = time.perf_counter()
        with use_mesh(mesh):
            carry = jax.block_until_ready(run(carry))
        return (time.perf_counter() - begin) * 1e3 / iterations

    time_ms()
    return time_ms


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


def measure_all(
    part: str, makers: Mapping[Any, Callable[[], Timer]], repeats: int
) -> tuple[dict[Any, Timer], dict[Any, np.ndarray]]:
    """Makes all timers, then runs them interleaved, with progress.

    Args:
      part: The benchmark's part, for the progress.
      makers: Functions that compile a timer, by its name.
      repeats: The number of turns.

    Returns:
      The timers, and the times of ``interleave``.
    """
    timers = {}
    with Progress(len(makers) + repeats, part) as bar:
        for name, make in makers.items():
            timers[name] = make()
            bar.step(f"compiled {name if isinstance(name, str) else ', '.join(map(str, name))}")
        return timers, interleave(timers, repeats, bar.step)


class Spread(NamedTuple):
    """The median of repeats and their quartiles."""

    median: float
    low: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """Returns the median and the quartiles of repeats."""
    low, median, high = np.quantile(np.asarray(values, float), [0.25, 0.5, 0.75])
    return Spread(float(median), float(low), float(high))


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of a benchmark's table.

    Attributes:
      what: What is measured.
      values: The value of every repeat; the line shows their median and quartiles.
      unit: "x" for a ratio, "ms", "tok/s".
      bar: The value that the median is compared with, or None.
      is_upper: Whether the bar is an upper bound of the median; else it is a lower one.
      note: What a reader must know beside the number.
      part: The part of the benchmark; ``experiments.benchmark`` fills it in.
    """

    what: str
    values: Sequence[float]
    unit: str = "x"
    bar: float | None = None
    is_upper: bool = True
    note: str = ""
    part: str = ""

    @property
    def value(self) -> Spread:
        return spread(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is met; None without one."""
        if self.bar is None:
            return None
        median = self.value.median
        return median <= self.bar if self.is_upper else median >= self.bar

    def to_dict(self) -> dict[str, Any]:
        """Returns the line as values for a JSON file."""
        kept = {n: getattr(self, n) for n in ("part", "what", "unit", "bar", "is_upper", "note")}
        median, *quartiles = self.value
        return kept | {"value": median, "quartiles": quartiles, "is_met": self.is_met}

    def cells(self) -> list[str]:
        """Returns the line as text, in the order of ``HEADER``."""
        form = (lambda x: f"{x:.0f}") if self.unit == "tok/s" else (lambda x: f"{x:.3g}")
        unit = self.unit if self.unit == "x" else f" {self.unit}"
        bar = "" if self.bar is None else f"{'<=' if self.is_upper else '>='} {self.bar:g}"
        met = {True: "yes", False: "NO", None: ""}[self.is_met]
        median, low, high = map(form, self.value)
        return [self.part, self.what, f"{median}{unit}", f"{low}–{high}", bar, met, self.note]


class Result(NamedTuple):
    """What a part of the benchmark returns.

    Attributes:
      lines: Its lines of the table.
      record: What report.json keeps of it besides.
      notes: What the reader of the whole report must know.
      sections: Tables of its own.
    """

    lines: list[Line]
    record: dict[str, Any]
    notes: Sequence[str] = ()
    sections: Sequence[Section] = ()
