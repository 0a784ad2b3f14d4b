"""The lines of the benchmark's table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spec_jax.evaluation.timing import spread
from spec_jax.show.tables import Section, Table

_NAMES = ("part", "measured", "median", "quartiles")


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
      predicted: What a model of the device expects, in place of a bar, or None.
    """

    what: str
    values: Sequence[float]
    unit: str = "x"
    bar: float | None = None
    is_upper: bool = True
    note: str = ""
    part: str = ""
    predicted: float | None = None

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
        names = ("part", "what", "unit", "bar", "is_upper", "predicted", "note")
        kept = {name: getattr(self, name) for name in names}
        median, *quartiles = self.value
        return kept | {"value": median, "quartiles": quartiles, "is_met": self.is_met}

    def cells(self) -> list[str]:
        """Returns the line as text, in the order of ``table_of``."""
        form = (lambda x: f"{x:.0f}") if self.unit.endswith("/s") else (lambda x: f"{x:.3g}")
        unit = self.unit if self.unit == "x" else f" {self.unit}"
        bar = "" if self.bar is None else f"{'<=' if self.is_upper else '>='} {self.bar:g}"
        compared = [bar, {True: "yes", False: "NO", None: ""}[self.is_met]]
        if self.predicted is not None:
            compared = [form(self.predicted), f"{self.value[0] / self.predicted:.2f}"]
        median, low, high = map(form, self.value)
        cells = [self.part, self.what, f"{median}{unit}", f"{low}–{high}"]
        return [*cells, *compared, self.note]


def table_of(lines: Sequence[Line]) -> Table | None:
    """Returns a table of lines, which have bars or predictions; None of no line."""
    is_predicted = any(line.predicted is not None for line in lines)
    compared = ("predicted", "ratio") if is_predicted else ("bar", "met")
    rows = [line.cells() for line in lines]
    return Table((*_NAMES, *compared, "note"), rows) if rows else None


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
