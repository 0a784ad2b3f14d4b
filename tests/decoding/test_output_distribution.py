"""Outputs against their enumerated distribution, for drafters whose chains vary in length.

    pytest -m measure -s tests/decoding/test_output_distribution.py    # 7 CPU-minutes

Whole outputs go through the public ``generate``, first calls only. The distribution is that
of ``oracles/markov.py``: it knows the target's table, and nothing of this package.
"""

from __future__ import annotations

import functools
import operator
import time

import numpy as np
import pytest
from oracles import markov
from support.markov import DECODERS, K, Row, calls

from spec_jax import SamplerConfig
from spec_jax.engine.request import slots_for

DRAWN = ("suffix", "ngram", "host", "sampled-host", "adaptive", "confidence")
CASES = [
    *((drafter, rule) for drafter in DRAWN for rule in ("residual", "block")),
    ("chain-on-mesh", "residual"),  # each of the eight devices samples an eighth of the rows
    *((d, r) for d in ("tree", "dynamic-tree") for r in ("residual", "traversal")),
]
FEW, MANY = 4096, 65_536
COUNTING = (0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2)
INSIDE = [
    Row(COUNTING, 6),
    Row((3, 1, 0, 3, 1, 0, 3, 1), 6, SamplerConfig(temperature=0.8, top_k=3)),
]
SLOTS = 128  # that decoding allocates for a shorter text


def at_end(decoder):
    """Prompts that leave room for 1, 2, ... K + 1 tokens where no slot is left over."""
    system = decoder.system()
    limit = SLOTS - system.lookahead_slots
    assert slots_for(system, limit - 1, 1) == SLOTS < slots_for(system, limit, 1)
    text = (0, 1, 2) * SLOTS
    return [Row(text[: limit - n], n) for n in range(1, K + 2)], limit


def windows(num_tokens, size=3):
    """Consecutive tokens of which few outputs show the distribution; and all of them together."""
    starts = range(1, num_tokens - size + 1)
    return [tuple(range(num_tokens)), *(tuple(range(i, i + size)) for i in starts)]


def least_p(outputs, expected):
    """The least p of all windows, times their number."""
    p_values = []
    for window in windows(expected.ndim):
        others = tuple(set(range(expected.ndim)) - set(window))
        p_values.append(markov.p_value(outputs[:, window], expected.sum(axis=others)))
    return min(1.0, min(p_values) * len(p_values))


def check(name, rule, place, trials):
    """Draws outputs, holds them against their distribution, and says what was drafted."""
    make = functools.partial(DECODERS[name], rule)
    if place == "inside":
        rows, options = INSIDE, {"max_new_tokens": INSIDE[0].num_tokens}
    else:
        rows, limit = at_end(make())
        options = {"max_length": limit}
    if name == "adaptive":
        options["rounds_per_sync"] = 1
    begin = time.process_time()
    batch = 32 if name == "adaptive" else min(trials, 8192)
    outputs, stats = zip(*calls(make, rows, trials, batch, **options))
    outputs, stats = map(np.concatenate, zip(*outputs)), functools.reduce(operator.add, stats)
    spent = time.process_time() - begin
    p_values = [least_p(tokens, row.distribution) for tokens, row in zip(outputs, rows)]
    print(
        f"\n{name}, {rule}, {place}: {trials} outputs in {spent:.0f} CPU-seconds, p "
        f"{', '.join(f'{p:.3g}' for p in p_values)}; rounds by accepted drafts {stats.lengths}, "
        f"drafts by position {stats.drafted_at}"
    )
    assert min(p_values) > 1e-5
    check_drafted(name, place, stats)


def check_drafted(name, place, stats):
    """Every number of drafts was accepted, and offered where it varies."""
    depth = 2 if "tree" in name else K
    assert len(stats.lengths) == depth + 1 and min(stats.lengths) > 0
    offered = (stats.rounds, *stats.offered_at)
    fewer = [a - b for a, b in zip(offered, offered[1:])]  # rounds of 0, 1, ... drafts
    assert offered[-1] > 0
    if name in ("suffix", "ngram") or (name == "adaptive" and place == "inside"):
        assert fewer[0] > 0 and sum(fewer) > fewer[0]
    elif name in ("host", "confidence"):
        assert max(fewer) > 0


name_of = lambda case: "-".join(case)
# Of the exhaustive tier: each drafter with one of its rules, and some where the cache ends.
DUE = [(*case, "inside") for case in zip(DRAWN, ("residual", "block") * 3)]
DUE += [("chain-on-mesh", "residual", "inside"), ("tree", "residual", "inside")]
DUE += [("dynamic-tree", "traversal", "inside")]
DUE += [(name, "residual", "at the end") for name in ("adaptive", "tree")]
ALL = [(*case, "inside") for case in CASES]
ALL += [(name, "residual", "at the end") for name in DECODERS]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", DUE, ids=name_of)
def test_outputs_have_the_distribution_of_plain_decoding(case):
    check(*case, FEW)


@pytest.mark.measure
@pytest.mark.parametrize("case", ALL, ids=name_of)
def test_65536_outputs_have_the_distribution_of_plain_decoding(case):
    check(*case, MANY)
