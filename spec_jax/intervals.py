"""Confidence intervals of figures over questions: the jackknife, and Wilson's of shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit


class Interval(NamedTuple):
    """A figure and its 95 % confidence interval, NaN where there is none.

    There is none of a single question, nor where the others leave the figure undefined.
    """

    value: float
    low: float
    high: float

    def within(self, bottom: float, top: float) -> Interval:
        """Returns the interval without its parts outside of what the figure can be."""
        return Interval(self.value, max(self.low, bottom), min(self.high, top))

    @property
    def bounds(self) -> list[float]:
        """Both ends."""
        return [self.low, self.high]

    @property
    def excludes_1(self) -> bool:
        """Whether the interval exists and does not include 1: a ratio is significant."""
        return self.low > 1 or self.high < 1

    def __format__(self, spec: str) -> str:
        """Formats figure and interval, such as "1.25 (1.10 to 1.40)"; a dash if there is none."""
        spec = spec or ".3f"
        if self.value is None or math.isnan(self.value):
            return "–"
        text = f"{self.value:{spec}}"
        return f"{text} ({self.low:{spec}} to {self.high:{spec}})" if self.low < self.high else text

    def __str__(self) -> str:
        return f"{self:.3f}"


def jackknife(figures: Callable[..., np.ndarray], *parts: np.ndarray) -> list[Interval]:
    """Returns figures of sums over questions, with their intervals.

    Rounds of one text are not independent, so a whole question is left out at a time and not a
    round: Student's t with the spread of the figures without each of the questions. About
    95 % of the intervals cover the truth for any number of questions, see docs/decisions.md.

    Args:
      figures: Maps the sums of the parts, [..., *] each, to f64[..., N].
      *parts: [P, *] each, of P questions.

    Returns:
      N intervals, in the order of ``figures``.
    """
    sums = [part.sum(axis=0) for part in parts]
    n = len(parts[0])
    with np.errstate(invalid="ignore", divide="ignore"):
        values = figures(*sums)
        if n == 1:  # nothing can be left out
            return [Interval(float(value), math.nan, math.nan) for value in values]
        without = figures(*(whole - part for whole, part in zip(sums, parts)))
        width = stdtrit(n - 1, 0.975) * without.std(axis=0) * math.sqrt(n - 1)
    return [Interval(float(x), float(x - w), float(x + w)) for x, w in zip(values, width)]


def wilson(
    rate: Sequence[float], count: Sequence[float], quantile: float | np.ndarray = 1.959964
) -> np.ndarray:
    """Returns Wilson's 95 % interval of each rate, which also rates of 0 and 1 have.

    Args:
      rate: Shares of N samples.
      count: Their numbers.
      quantile: That of 97.5 %, of the normal distribution or of Student's t.

    Returns:
      f64[N,2]; NaN where there is no sample.
    """
    rate, count = np.asarray(rate, float), np.asarray(count, float)
    share = quantile**2 / np.where(count > 0, count, np.nan)
    middle = rate + share / 2
    width = np.sqrt(share * rate * (1 - rate) + share**2 / 4)
    ends = np.stack([middle - width, middle + width], axis=-1) / (1 + share)[..., None]
    return np.clip(ends, 0, 1)


def shares(accepted: np.ndarray, reached: np.ndarray) -> list[Interval]:
    """Returns shares of counts over questions, with Wilson's intervals.

    Where questions differ more than chance lets them, the count is replaced by the effective one,
    that of independent samples with the jackknife's spread, and the quantile is Student's.
    Source: Korn and Graubard (1998), with Wilson's interval.

    Args:
      accepted: [P,N] of P questions.
      reached: [P,N], likewise, what they are shares of.

    Returns:
      N intervals, NaN where nothing was reached.
    """
    n = len(reached)
    total = reached.sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = accepted.sum(axis=0) / total
        without = (accepted.sum(axis=0) - accepted) / (total - reached)
        effective = rate * (1 - rate) / ((n - 1) * without.var(axis=0))
    is_spread = effective < total * (1 - 1 / n) * (1 - 1e-9)
    quantile = np.where(is_spread, stdtrit(max(n - 1, 1), 0.975), 1.959964)
    ends = wilson(rate, np.where(is_spread, effective, total), quantile)
    return [Interval(float(x), *map(float, pair)) for x, pair in zip(rate, ends)]


def paired_speedup(
    own_s: np.ndarray, plain_s: np.ndarray, own_tokens: np.ndarray, plain_tokens: np.ndarray
) -> Interval:
    """Returns how many times as fast tokens came, and its interval over pairs.

    The figure is the ratio of the totals.

    Args:
      own_s: f64[N], times of N pairs, each of which was timed in turns.
      plain_s: f64[N], what they are compared with.
      own_tokens: i64[N], tokens in these times.
      plain_tokens: i64[N], likewise.

    Returns:
      The ratio; without an interval for a single pair, and NaN where there are no tokens.
    """
    parts = [np.asarray(x, float) for x in (plain_s, own_tokens, own_s, plain_tokens)]
    if any(part.sum() <= 0 for part in parts):
        return Interval(math.nan, math.nan, math.nan)
    (found,) = jackknife(
        lambda plain_s, tokens, own_s, plain_tokens: np.stack(
            [plain_s * tokens / (own_s * plain_tokens)], axis=-1
        ),
        *parts,
    )
    return found.within(0.0, math.inf)
