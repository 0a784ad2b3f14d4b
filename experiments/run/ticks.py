"""Which values of an axis are labelled: those that were tried, and as many as fit."""

from __future__ import annotations

import math
from collections.abc import Iterable


def spaced(values: Iterable[float], *, room: float, is_log: bool = False) -> list[float]:
    """Returns those of ``values`` whose labels fit beside each other, in order.

    Args:
      values: Where points are; an axis reaches from the smallest to the largest.
      room: The number of digits that fit below the axis.
      is_log: Whether the axis is logarithmic; the values are positive then.
    """
    numbers = sorted(set(values))
    if not numbers:
        return []
    scale = math.log2 if is_log else float
    begin = scale(numbers[0])
    span = scale(numbers[-1]) - begin or 1.0
    found, end = [], -math.inf
    for number in numbers:
        center, half = room * (scale(number) - begin) / span, (len(f"{number:g}") + 1) / 2
        if center - half >= end:
            found.append(number)
            end = center + half
    return found
