"""The choice of K, on numbers alone: against the best fixed K, and what it may spend on trials."""

from __future__ import annotations

import functools
import random

import pytest

from spec_jax.engine.adaptive.policy import (
    EXPLORED_SHARE,
    MAX_ROUNDS,
    MIN_ROUNDS,
    RoundCosts,
    Tuner,
    expected_tokens,
)

BUCKETS = (0, 1, 2, 3, 4, 6, 8)
TABLES = {  # a round's cost by K, in plain rounds
    "processor": (1.0, 1.5, 1.75, 2.0, 2.3, 2.9, 3.5),
    "small models": (1.0, 1.12, 1.45, 1.7, 1.9, 2.4, 2.9),
    "accelerator": (1.0, 1.07, 1.12, 1.17, 1.22, 1.32, 1.42),
    "large batch": (1.0, 1.9, 2.7, 3.5, 4.3, 6.0, 7.7),
}


def costs_of(table, catch_up_ms=0.05):
    return RoundCosts(dict(zip(BUCKETS, TABLES[table])), catch_up_ms, catch_up_width=9)


@functools.cache
def simulate(table, rates, batch, rounds=1000, seed=0, catch_up_ms=0.05):
    """Priced time a token of the batch, and the Ks; ``rates`` by position, or a list over time."""
    chance, costs = random.Random(seed), costs_of(table, catch_up_ms)
    tuner, spent, tokens, done, lag, ks = Tuner.fresh(8), 0.0, 0, 0, 0, []
    while done < rounds:
        now = rates[len(rates) * done // rounds] if isinstance(rates[0], tuple) else rates
        (k, n), tuner = tuner.choose(costs, lag)
        if k and lag:
            spent, lag = spent + costs.of_lag(lag), 0
        accepted = [0] * k
        for _ in range(n * batch):
            for i in range(k):
                if chance.random() >= now[i]:
                    break
                accepted[i] += 1
        lag += 0 if k else n
        spent += n * costs.round_ms[k]
        reached = (n * batch, *accepted)
        tuner = tuner.observe(k, n, reached, accepted, n * costs.round_ms[k])
        tokens, done, ks = tokens + n * batch + sum(accepted), done + n, [*ks, *[k] * n]
    return spent / tokens * batch, tuple(ks)


BATCHES = [
    ("processor", 1),
    ("processor", 4),
    ("small models", 1),
    ("small models", 4),
    ("accelerator", 1),
    ("accelerator", 16),
    ("large batch", 16),
]


@pytest.mark.parametrize("table, batch", BATCHES)
def test_never_slower_than_plain_and_near_the_best_fixed_k(table, batch):
    for tenths in range(11):
        rates = (tenths / 10,) * 8
        found, _ = simulate(table, rates, batch)
        tokens = expected_tokens(rates)
        fixed = {k: ms / tokens[k] for k, ms in costs_of(table).round_ms.items()}
        assert found <= 1.03 * fixed[0], (tenths, found)
        assert min(fixed.values()) >= 0.95 * found, (tenths, found)


def test_follows_a_text_that_changes():
    bad, good = (0.05,) * 8, (0.95,) * 8
    _, ks = simulate("processor", (bad, good, bad), 4, rounds=6000)
    for begin, wanted in ((1000, 0), (3000, 8), (5000, 0)):
        share = ks[begin : begin + 1000].count(wanted) / 1000
        assert share > 0.85, (begin, share)


@pytest.mark.parametrize("catch_up_ms", [0.0, 0.3])
def test_trials_cost_no_more_than_their_share(catch_up_ms):
    """Nothing is ever accepted, so whatever is drafted is lost."""
    time, ks = simulate("large batch", (0.0,) * 8, 4, rounds=6000, catch_up_ms=catch_up_ms)
    assert set(ks) == {0, 1}
    learning = ks.index(0) * TABLES["large batch"][1] / 6000
    assert 1 <= time <= 1 + EXPLORED_SHARE + learning + 1e-9
    assert (ks[3000:].count(1) > 0) == (catch_up_ms == 0.0)  # a long lag is never worth a trial


def observed(rounds=1, k=4, times=50, **counts):
    tuner = Tuner.fresh(8)
    for _ in range(times):
        tuner = tuner.observe(k, rounds, time_ms=0.0, **counts)
    return tuner


def test_rates_are_what_was_seen_and_beyond_it_the_last_one():
    rates = observed(reached_at=(100, 80, 40, 10), accepted_at=(80, 40, 10, 5)).rates
    assert rates[:4] == pytest.approx((0.8, 0.5, 0.25, 0.5), abs=5e-3)
    assert rates[4:] == pytest.approx([rates[3]] * 4)
    assert expected_tokens((0.8, 0.5, 0.25)) == pytest.approx((1, 1.8, 2.2, 2.3))


def test_old_counts_fade_but_never_vanish():
    tuner = observed(reached_at=(10, 0, 0, 0), accepted_at=(0, 0, 0, 0))
    for _ in range(100):
        tuner = tuner.observe(0, 32, (), (), 0.0)
    assert tuner.rates[0] < 0.1  # not the prior again: that would be a trial nobody paid for
    again = tuner.observe(1, 4, (40,), (36,), 0.0)
    assert again.rates[0] > 0.7


def test_k_stays_unless_another_is_clearly_better():
    tuner = observed(reached_at=(1000, 500, 0, 0), accepted_at=(500, 0, 0, 0))  # E(1) is 1.5
    settled = lambda ms, last: (
        tuner.__class__(tuner.reached, tuner.accepted, settled=last)
        .choose(RoundCosts({0: 1.0, 1: ms}))[0]
        .num_draft
    )
    assert settled(1.495, 0) == 0 and settled(1.495, 1) == 1
    assert settled(1.45, 0) == 1 and settled(1.55, 1) == 0


def test_a_choice_that_stays_is_looked_at_less_often():
    """The first choice drafts, whatever it costs; then K = 0 stays."""
    tuner, costs, rounds = (
        observed(reached_at=(9, 0, 0, 0), accepted_at=(0,) * 4),
        RoundCosts({0: 1.0, 1: 2.0}),
        [],
    )
    for _ in range(7):
        plan, tuner = tuner.choose(costs)
        rounds.append(plan.rounds)
    assert rounds[1:] == [MIN_ROUNDS, 2 * MIN_ROUNDS, 4 * MIN_ROUNDS, *[MAX_ROUNDS] * 3]
