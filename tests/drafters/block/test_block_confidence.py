"""The confidence that a row fits to its own rounds, of heads that have no output for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.block_drafts import HEADS, TARGET, head_of

from spec_jax import SpeculativeConfig, SpeculativeDecoder
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Proposal, Round
from spec_jax.drafters.block.confidence import PRIOR_MEAN, PRIOR_SPREAD, Fit, draft_features
from spec_jax.engine.adaptive.runner import expected_drafts
from spec_jax.errors import ConfigError

PROMPTS = [[1, 2, 3], [9, 8, 7, 6, 5], [4], [11, 2, 11]]
B, K = 3, 4


@jax.jit
def after(fit, features, offered, n_accept):
    return fit.drafted(features, offered).observed(n_accept)


def test_a_round_is_one_newton_step_for_each_draft_that_the_rule_reached():
    """The precision gains the curvature, the mean the precision's inverse times the gradient."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(B, K, 3)).astype(np.float32)
    offered, n_accept = np.asarray([4, 2, 3]), np.asarray([1, 2, -1])
    fit = after(Fit.fresh(B, K), features, offered, n_accept)
    for b in range(B):
        mean, precision = np.asarray(PRIOR_MEAN), np.diag(1 / np.square(PRIOR_SPREAD))
        for i in range(min(n_accept[b] + 1, offered[b])):
            x = features[b, i].astype(np.float64)
            chance = 1 / (1 + np.exp(-mean @ x))
            precision = precision + chance * (1 - chance) * np.outer(x, x)
            mean = mean + np.linalg.solve(precision, x * ((i < n_accept[b]) - chance))
        np.testing.assert_allclose(fit.mean[b], mean, atol=1e-5)
        np.testing.assert_allclose(fit.spread[b], np.linalg.inv(precision), atol=1e-5)
    assert not fit.offered.any()
    again = after(fit, features, np.zeros(B, int), np.full(B, 3))  # tokens that nobody drafted
    assert jax.tree.all(
        jax.tree.map(np.array_equal, again.replace(features=0), fit.replace(features=0))
    )


def test_it_learns_how_far_the_draft_can_be_believed():
    """Drafts whose log-odds are twice the true ones, and worse at later positions."""
    rng = np.random.default_rng(1)
    fit, place = Fit.fresh(64, K), np.arange(K) / 8
    true = np.asarray([-0.5, 0.5, -1.0])
    for _ in range(60):
        odds = rng.normal(scale=2, size=(64, K))
        x = np.stack([np.ones_like(odds), odds, np.broadcast_to(place, odds.shape)], axis=-1)
        is_right = rng.random((64, K)) < 1 / (1 + np.exp(-x @ true))
        n_accept = np.cumprod(is_right, axis=1).sum(axis=1)
        fit = after(fit, x.astype(np.float32), np.full(64, K), n_accept)
    x = jnp.asarray([[1.0, 1.0, 0.125]] * 64)
    found = jax.nn.sigmoid(jnp.einsum("bf,bf->b", fit.mean, x))
    chance = 1 / (1 + np.exp(-np.asarray(x[0]) @ true))
    assert abs(found.mean() - chance) < 0.04 < abs(1 / (1 + np.exp(-1.0)) - chance)
    assert (fit.estimate(x) > found).all(), "what is uncertain is tried"


def test_features_are_known_before_the_token_and_finite_whatever_the_logits():
    logits = jnp.asarray([[0.0, 0, 0, 0], [50.0, 0, 0, 0], [0.0, -jnp.inf, -jnp.inf, -jnp.inf]])
    found = draft_features(logits, 2)
    np.testing.assert_allclose(found[:, 1], [np.log(1 / 3), 6, 6], atol=1e-5)
    assert (found[:, 0] == 1).all() and (found[:, 2] == 0.25).all()
    assert jnp.isfinite(draft_features(jnp.full((1, 4), jnp.nan), 0)).all()


ADAPTIVE = {"buckets": (0, K), "by_confidence": True}
WAYS = {"chain": {}, "adaptive": {"adaptive": ADAPTIVE}, "mesh": {}}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_a_head_without_an_output_for_it_stops_where_it_is_unsure(way):
    """Plain decoding's tokens, with all of K drafts in some rounds and fewer in others."""
    samplers = [SamplerConfig(), SamplerConfig(temperature=1.0, seed=3)] * 2
    options = dict(rejection_sampling_strategy="match", confidence_threshold=0.25, **WAYS[way])
    config = SpeculativeConfig("dflash", K, **options)
    mesh = "data:2,tensor:2" if way == "mesh" else None
    decoder = SpeculativeDecoder(TARGET, head_of(HEADS["dflash"]), config, mesh=mesh)
    rows = decoder.generate(PROMPTS, 30, sampler=samplers)
    plain = SpeculativeDecoder(TARGET).generate(PROMPTS, 30, sampler=samplers)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    first, *_, last = decoder.stats.drafted_at
    if way == "adaptive":
        assert all(0 < lift < 2 for lift in decoder.adaptive.tuner.lifts)
    else:
        assert 0 < last < first


def test_what_is_expected_of_a_round_is_summed_over_rows_that_are_active():
    """By position, of offered drafts, each if those before it are accepted."""
    sure = jnp.asarray([[0.5, 0.4, 0.9], [0.8, 0.5, 0.5], [0.9, 0.9, 0.9]])
    proposal = Proposal(jnp.zeros((3, 3), jnp.int32), jnp.asarray([3, 1, 3]), confidence=sure)
    of = Round(proposal, None, None, jnp.zeros(3, jnp.int32), jnp.asarray([2, 1, 0]))
    observer = expected_drafts(4)
    seen = observer.update(observer.init(3, 8), of)
    np.testing.assert_allclose(seen, [0.5 + 0.8, 0.5 * 0.4, 0.5 * 0.4 * 0.9, 0], atol=1e-6)
    nothing = of._replace(proposal=proposal.replace(confidence=None))
    assert observer.update(seen, nothing) is seen


def test_k_by_the_confidence_of_a_draft_that_has_none_is_refused():
    config = SpeculativeConfig("standalone", 2, adaptive={"by_confidence": True})
    with pytest.raises(ConfigError, match="by_confidence is set; drafter 'standalone' does not"):
        SpeculativeDecoder(TARGET, TARGET, config)


@pytest.mark.exhaustive
def test_what_is_learned_is_the_row_s_and_ends_with_it():
    """Rows beside others, in another order, and in a second call draft what they draft alone."""
    config = SpeculativeConfig("dflash", K, confidence_threshold=0.25)
    decoder = SpeculativeDecoder(TARGET, head_of(HEADS["dflash"]), config)
    sampler = [SamplerConfig(temperature=1.0, seed=i) for i in range(4)]
    trace = lambda rows: [(row.tokens, row.trace.offered) for row in rows]
    first = trace(decoder.generate(PROMPTS, 30, sampler=sampler))
    turned = trace(decoder.generate(PROMPTS[::-1], 30, sampler=sampler[::-1]))[::-1]
    assert first == turned == trace(decoder.generate(PROMPTS, 30, sampler=sampler))
    assert len({count for _, offered in first for count in offered if count >= 0}) > 1
