"""Confidence intervals from resampling the prompts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy import stats

_RESAMPLES = 2000


class Interval(NamedTuple):
    """A figure and its 95 % confidence interval; NaN where a resample leaves it undefined."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        text = f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"
        return text.replace("nan", "–")


def bootstrap(figures: Callable[[np.ndarray], np.ndarray], num_prompts: int) -> list[Interval]:
    """Resamples prompts with replacement and returns the interval of each figure.

    Rounds of one text are not independent, so prompts are resampled and not rounds. Every call
    with the same number of prompts draws the same resamples.

    Args:
      figures: Maps the indices of the chosen prompts, i64[..., P], to f64[N, ...].
      num_prompts: P, the number of prompts.

    Returns:
      N intervals by the percentile method, in the order of ``figures``.
    """
    prompts = np.arange(num_prompts)
    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # says that one is NaN
        values = figures(prompts)
        if num_prompts == 1:  # there is nothing to resample
            return [Interval(float(value), float(value), float(value)) for value in values]
        found = stats.bootstrap(
            (prompts,), lambda chosen, axis: figures(chosen), vectorized=True,
            method="percentile", n_resamples=_RESAMPLES, rng=np.random.default_rng(0),
        )  # fmt: skip
    return [Interval(*map(float, x)) for x in zip(values, *found.confidence_interval)]
