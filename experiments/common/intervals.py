"""Confidence intervals: of figures by resampling the prompts, and of paired ratios of times."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

_RESAMPLES = 2000
_MIN_RESAMPLED = 8  # pairs


class Interval(NamedTuple):
    """A figure and its 95 % confidence interval, NaN where there is none.

    There is none of a single prompt, nor where a resample leaves the figure undefined.
    """

    value: float
    low: float
    high: float

    def within(self, bottom: float, top: float) -> Interval:
        """Returns the interval without its parts outside of what the figure can be."""
        return Interval(self.value, max(self.low, bottom), min(self.high, top))

    def __str__(self) -> str:
        text = f"{self.value:.3f}".replace("nan", "–")
        return f"{text} ({self.low:.3f} to {self.high:.3f})" if self.low < self.high else text


def bootstrap(figures: Callable[[np.ndarray], np.ndarray], num_prompts: int) -> list[Interval]:
    """Resamples prompts with replacement and returns the interval of each figure.

    Rounds of one text are not independent, so prompts are resampled and not rounds. Every call
    with the same number of prompts draws the same resamples. Of fewer than eight prompts the
    resamples vary too little (their interval of two covers the truth half of the time), so the
    interval is Student's t of the jackknife.

    Args:
      figures: Maps the indices of the chosen prompts, i64[..., P], to f64[N, ...].
      num_prompts: P, the number of prompts.

    Returns:
      N intervals, by the percentile method, in the order of ``figures``.
    """
    prompts = np.arange(num_prompts)
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # says that one is NaN
        values = figures(prompts)
        if num_prompts == 1:  # there is nothing to resample
            return [Interval(float(value), math.nan, math.nan) for value in values]
        if num_prompts < _MIN_RESAMPLED:
            return _jackknife(figures, values, num_prompts)
        found = stats.bootstrap(
            (prompts,), lambda chosen, axis: figures(chosen), vectorized=True,
            method="percentile", n_resamples=_RESAMPLES, rng=np.random.default_rng(0),
        )  # fmt: skip
    return [Interval(*map(float, x)) for x in zip(values, *found.confidence_interval)]


def _jackknife(
    figures: Callable[[np.ndarray], np.ndarray], values: np.ndarray, n: int
) -> list[Interval]:
    """Returns Student's t intervals, from the figures without each of the n prompts."""
    without = np.asarray([[j for j in range(n) if j != i] for i in range(n)])
    width = stats.t.ppf(0.975, n - 1) * figures(without).std(axis=-1) * math.sqrt(n - 1)
    return [Interval(float(x), float(x - w), float(x + w)) for x, w in zip(values, width)]


def paired_speedup(
    own_s: np.ndarray, plain_s: np.ndarray, own_tokens: np.ndarray, plain_tokens: np.ndarray
) -> Interval:
    """Returns how many times as fast tokens came, and its interval over pairs.

    The figure is the ratio of the totals. The interval is Student's t of the pairs' influence on
    the ratio's logarithm, so that few pairs make it wide.

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
    time, tokens, own_time, their_tokens = (part.sum() for part in parts)
    ratio = float(time * tokens / (own_time * their_tokens))
    n = len(parts[0])
    if n == 1:
        return Interval(ratio, math.nan, math.nan)
    signs = (1, 1, -1, -1)
    influence = sum(sign * part / part.mean() for sign, part in zip(signs, parts))
    width = stats.t.ppf(0.975, n - 1) * influence.std(ddof=1) / math.sqrt(n)
    return Interval(ratio, ratio * math.exp(-width), ratio * math.exp(width))


def resampled_speedup(
    own_s: np.ndarray, plain_s: np.ndarray, own_tokens: np.ndarray, plain_tokens: np.ndarray
) -> Interval:
    """Returns the ratio of ``paired_speedup``, with its interval by resampling the pairs.

    Of fewer than eight pairs a resample tells too little, and the interval is that of
    ``paired_speedup``.

    Args:
      own_s: f64[N], times of N questions, each of which was timed in turns.
      plain_s: f64[N], what they are compared with.
      own_tokens: i64[N], tokens in these times.
      plain_tokens: i64[N], likewise.
    """
    whole = paired_speedup(own_s, plain_s, own_tokens, plain_tokens)
    if len(own_s) < _MIN_RESAMPLED or whole.value != whole.value:
        return whole
    sums = lambda i: [x[i].sum(-1) for x in (plain_s, own_tokens, own_s, plain_tokens)]

    def ratio(chosen: np.ndarray) -> np.ndarray:
        time, tokens, own_time, their_tokens = sums(chosen)
        return (time * tokens / (own_time * their_tokens))[None]

    (found,) = bootstrap(ratio, len(own_s))
    return found
