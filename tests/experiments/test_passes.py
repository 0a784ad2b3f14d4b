"""Timed loops of passes: what runs in them, and that no cache moves."""

import jax
import jax.numpy as jnp
import pytest
from support.pairs import tiny_pair
from support.products import products

from spec_jax import load_model
from spec_jax.drafters.loaded import draft_params
from spec_jax.evaluation import costs, passes

SLOTS = 128


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tiny_pair(tmp_path_factory.mktemp("pair"))
    return load_model(folder / "target"), load_model(folder / "draft")


def of_pass(model, params, tokens, scored):
    """The products of a pass of a model, without any of the timers' code."""

    def run(tokens, cache):
        hidden = model.forward(params, tokens, cache).hidden
        return model.unembed(params, hidden[:, -scored:])

    cache = model.init_cache(params, 1, SLOTS)
    return products(jax.make_jaxpr(run)(jnp.zeros((1, tokens), jnp.int32), cache).jaxpr)


@pytest.fixture
def caught(monkeypatch):
    """Keeps loops and what they begin with, and times nothing."""
    loops = []
    monkeypatch.setattr(passes, "loop_timer", lambda run, carry, *_: loops.append((run, carry)))
    return loops


@pytest.mark.parametrize("k, num_passes", [(0, 0), (4, 0), (4, 1), (4, 4), (1, 2)])
def test_a_timed_round_is_the_passes_of_a_round(pair, caught, k, num_passes):
    target, draft = pair
    passes.round_timer(target, draft, k, num_passes, SLOTS, 1, iterations=3)
    run, carry = caught[0]
    laid_out = target.cpu_layout.prepare(k + 1)  # as the decoder lays weights out for such rounds
    expected = of_pass(target.model, laid_out, k + 1, k + 1)
    if num_passes:  # the first feeds two tokens and scores one
        laid_out = draft_params(draft, laid_out, 1, k)
        later = of_pass(draft.model, laid_out, 1, 1)
        expected += of_pass(draft.model, laid_out, 2, 1) + (num_passes - 1) * later
    assert products(jax.make_jaxpr(run)(carry).jaxpr) == 3 * expected


def test_a_timed_round_moves_no_cache(pair, caught):
    passes.round_timer(*pair, 2, 2, SLOTS, 2, iterations=2)
    run, carry = caught[0]
    lengths = lambda carry: [cache.length.tolist() for _, cache in carry[1:]]
    before = lengths(carry)
    assert before == [[62, 62], [63, 63], [63, 63]]  # half of the slots
    assert lengths(run(carry)) == before


def test_what_is_timed_is_what_the_costs_of_every_k_need(pair):
    target, draft = pair
    wanted = costs.timer_makers(
        target, {"standalone": draft}, {"standalone": {1, 4}, "ngram": {6}}, 128, 1
    )
    assert [*wanted] == [
        *(costs.TimedLoop("target", k) for k in (0, 1, 4, 6)),
        costs.TimedLoop("standalone", 4, 1),
        costs.TimedLoop("standalone", 4, 4),
    ]
