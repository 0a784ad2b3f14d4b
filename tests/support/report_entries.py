"""Results of cells and lines of answers.jsonl, made by hand."""

import math

from experiments.run.report import environment
from spec_jax.engine.stats import Stats
from spec_jax.evaluation.cells import Cell
from spec_jax.evaluation.results import NONE, CategoryResult, CellResult
from spec_jax.intervals import Interval

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "\"'&<!--",
    "{{ 7*7 }}",
    "\u202egnp.exe",
    "日本語 🎉",
    "",
    "\ud83d",
    "\u2028",
    "x" * 50_000,
    "\x00\x07",
)


def report_of(**changes):
    """What report.json holds beside results."""
    target = dict(name="zoo/target", parameters=9, dtype="float32", notes=[])
    found = dict(environment=environment(), models={"target": target}, own={}, mesh=None)
    found |= dict(prompts={"description": "two prompts"}, command="c", config={"repeats": 2})
    return found | dict(notes=[], conclusions=[], warnings=[]) | changes


def result(method="eagle-3", k=3, temperature=0.0, **changes):
    """What was measured of a cell, as a page shows it."""
    cell = dict(rule="greedy", tree=None)
    cell = Cell(method, k, temperature, *(changes.pop(name, x) for name, x in cell.items()))
    fields = dict(batch=1, is_lossless=True, speedup=Interval(1.4321, 1.2111, 1.6543))
    fields |= dict(tokens_per_s=733.0, plain_tokens_per_s=511.8, num_pairs=16, stats=Stats())
    fields |= dict(tau=NONE._replace(value=2.765), predicted_speedup=1.5678)
    fields |= dict(acceptance=tuple(NONE._replace(value=x) for x in (0.8, 0.71, math.nan)))
    fields |= dict(identical_rows=16, finish_reasons={"length": 16})
    return CellResult(cell, **fields | changes)


def plain(temperature=0.0, **changes):
    one = NONE._replace(value=1.0)
    fields = dict(speedup=one, tau=one, acceptance=(), predicted_speedup=None)
    return result("plain", 0, temperature, **fields | changes)


def sped_up(name="a", low=math.nan, high=math.nan, k=3, stats=Stats(), **changes):
    """A result of four prompts with this interval, whose figures are those of its statistics."""
    rates = tuple(NONE._replace(value=x) for x in stats.acceptance_by_position)
    fields = dict(speedup=Interval((low * high) ** 0.5, low, high), acceptance=rates, stats=stats)
    fields |= dict(tau=NONE._replace(value=stats.tau), num_pairs=4, identical_rows=4)
    return result(name, k, **fields | dict(finish_reasons={"length": 4}) | changes)


def counts(reached, accepted, drafted=None, rounds=10):
    """Statistics of ``rounds`` rounds, by position."""
    options = dict(reached_at=tuple(reached), accepted_at=tuple(accepted))
    return Stats(rounds=rounds, drafted_at=tuple(drafted or reached), **options)


def category(tau=2.0, speedup=0.9, low=math.nan, high=math.nan, questions=8):
    """What was measured of a category."""
    tau = NONE._replace(value=tau)
    return CategoryResult("g", questions, tau, (), 1.0, Interval(speedup, low, high))


def answer(question="q1", cell="eagle-3 K=3 T=0", pieces=("def", " f", "(", "x"), **changes):
    """A line of answers.jsonl: the first token, then a round that accepts one draft of two."""
    n = len(pieces)
    turn = dict(prompt="Write f.", prompt_tokens=3, tokens=list(range(n)), pieces=list(pieces))
    turn |= dict(kinds=["first", *(("accepted", "corrected")[i % 2] for i in range(n - 1))])
    turn |= dict(offered=[-1, *((2, -1)[i % 2] for i in range(n - 1))])
    turn |= dict(rejected=[None, *((None, " bad")[i % 2] for i in range(n - 1))])
    turn |= dict(decode_s=[0.012, 0.011, 0.010], finish="length", probs=[0.5] * n)
    turn |= dict(alternatives=[[[pieces[i], 0.5], ["other", 0.25]] for i in range(n)])
    line = dict(cell=cell, method="eagle-3", k=3, tree=None, temperature=0.0, rule="greedy")
    line |= dict(
        batch=1, question=question, category="writing", turns=[turn | changes.pop("turn", {})]
    )
    return line | changes
