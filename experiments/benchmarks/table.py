"""The lines of the benchmark's table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spec_jax.evaluation.timing import spread
from spec_jax.show.tables import Section

HEADER = ("part", "measured", "median", "quartiles", "bar", "met", "note")


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
    def value(self) -> tuple[float, float, float]:
        """The median and the quartiles."""
        return spread(self.values)

    @property
    def is_met(self) -> bool | None:
        """Whether the bar is met; None without one."""
        if self.bar is None:
            return None
        median = self.value[0]
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


def listed(times: Mapping[Any, np.ndarray]) -> dict[str, list[float]]:
    """Returns times for the record, by name as text."""
    return {str(name): values.tolist() for name, values in times.items()}
