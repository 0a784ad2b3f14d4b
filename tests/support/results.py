"""Results of a comparison, as far as tables, plots and conclusions read them."""

import math

from spec_jax.engine import stats
from spec_jax.evaluation.cells import Cell
from spec_jax.evaluation.results import NONE, CellResult
from spec_jax.intervals import Interval


def result(name="a", low=math.nan, high=math.nan, speedup=None, stats=stats.Stats(), **changes):
    """A result, as far as tables and conclusions read it."""
    cell = {"k": 3, "temperature": 0.0, "rule": "greedy", "tree": None}
    cell = Cell(name, *(changes.pop(key, x) for key, x in cell.items()))
    value = (low * high) ** 0.5 if speedup is None else speedup
    fields = dict(batch=1, is_lossless=True, speedup=Interval(value, low, high))
    fields |= dict(tokens_per_s=400.0, plain_tokens_per_s=200.0, num_pairs=4, stats=stats)
    fields |= dict(
        tau=NONE._replace(value=stats.tau), finish_reasons={"length": 4}, identical_rows=4
    )
    fields |= dict(acceptance=tuple(NONE._replace(value=x) for x in stats.acceptance_by_position))
    fields |= dict(predicted_speedup=1.0)
    return CellResult(cell, **fields | changes)


def counts(reached, accepted, drafted=None, rounds=10):
    """Statistics of ``rounds`` rounds, by position."""
    options = dict(reached_at=tuple(reached), accepted_at=tuple(accepted))
    return stats.Stats(rounds=rounds, drafted_at=tuple(drafted or reached), **options)
