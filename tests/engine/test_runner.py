"""Adaptive K: tokens, their distribution and the draft's state stay what they should be."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import start
from support.scripted import BUCKETS, Known, Script
from support.tiny_models import LLAMA, loaded

from spec_jax import decoding, testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Prompt
from spec_jax.drafters.common.chain import with_confidence_stop
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.drafters.standalone.model import standalone
from spec_jax.engine.adaptive import runner
from spec_jax.engine.adaptive.deferred import with_deferred_commits
from spec_jax.engine.adaptive.policy import Plan
from spec_jax.engine.adaptive.runner import AdaptiveRunner, AdaptiveState
from spec_jax.engine.cancellation import CancellationToken
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import random_head
from spec_jax.rules import make_rule
from spec_jax.sampling import make_sampler
from spec_jax.testing import Row, certify_rule, mock_model
from spec_jax.tree import DynamicTree, Tree

PROMPTS = [[1, 2], [3], [4, 4, 0]]
SAMPLERS = [SamplerConfig(), *(SamplerConfig(temperature=1.0, seed=i) for i in (5, 6))]


def adaptive(target, draft, method="standalone", **options):
    config = SpeculativeConfig(method, is_adaptive=True, adaptive_buckets=BUCKETS, **options)
    return SpeculativeDecoder(target, draft, config)


@pytest.fixture(scope="module")
def mocks():
    return testing.mock_model(7, 0), testing.mock_model(7, 1)


@pytest.fixture(scope="module")
def plain(mocks):
    return SpeculativeDecoder(mocks[0]).generate(PROMPTS, 30, sampler=SAMPLERS)


def test_emits_exactly_the_plain_stream(mocks, plain):
    """Costs are timed; then K goes up and down by script, in a batch and in a queue."""
    decoder = adaptive(*mocks, rejection_sampling_strategy="match")
    for script in (None, Script((3, 0, 0, 1, 0, 3))):
        if script is not None:
            decoder.adaptive.tuner = script
            decoder.reset_stats()
        rows = decoder.generate(PROMPTS, 30, sampler=SAMPLERS)
        assert [row.tokens for row in rows] == [row.tokens for row in plain]
    told = tuple(script.reached), tuple(script.accepted)
    assert told == (decoder.stats.reached_at, decoder.stats.accepted_at)
    (costs,) = decoder.adaptive.costs.values()
    assert set(costs.round_ms) == set(BUCKETS) and all(ms > 0 for ms in costs.round_ms.values())
    rounds, drafted = decoder.stats.rounds, decoder.stats.drafted_at
    assert len(drafted) == 3 and rounds > drafted[0] > drafted[2] > 0  # rounds of K = 0 and 1


TARGET = loaded(LLAMA, "target")
HEAD = random_head(EagleConfig.of_target(LLAMA, 3, 20), jax.random.key(2))


@pytest.mark.exhaustive
def test_a_head_catches_up_when_there_is_no_more_room(monkeypatch):
    """However few rounds a call runs of those that are planned."""

    class Long(Script):
        def choose(self, costs, lag=0):
            return Plan(0, 32), self

    caught_up, whole = [], runner.catch_up
    watch = lambda *args, **names: caught_up.append(1) or whole(*args, **names)
    monkeypatch.setattr(runner, "catch_up", watch)
    decoder = adaptive(TARGET, HEAD, "eagle")
    system, params = decoder.system(), decoder.params()
    sampler = make_sampler(SamplerConfig(), 1, LLAMA.vocab_size)
    state = start(decoder, PROMPTS[:1], 70, sampler, system)
    learned = AdaptiveState(BUCKETS)
    learned.tuner, learned.costs = Long(()), Known()
    pacer = AdaptiveRunner(system, lambda k: params, learned)
    while sum(rounds for _, rounds in pacer.plans) < 66:
        state, _ = pacer(state, jnp.zeros(1, jnp.int32), 5)
    assert len(caught_up) == 2  # behind 32 and behind 64


def test_a_head_catches_up_with_each_rows_own_tokens_and_the_states_before_them():
    """A row has skipped as many as it has emitted; the second one paused once."""
    fed = []

    def commit(params, state, *what):
        fed.append(what)
        return state

    drafter = with_deferred_commits(NO_DRAFT._replace(commit=commit), 4)
    tokens, rows = np.arange(16).reshape(2, 8), np.arange(2)
    begin = length = np.array([3, 2])
    state_of = lambda tokens: jnp.asarray(tokens, jnp.float32)[..., None]
    state = drafter.init(None, 2, 8)
    state = drafter.prefill(
        None, state, Prompt(tokens[:, :3], begin, None, state_of(tokens[:, :3]))
    )
    for n in ([1, 1], [1, 0], [1, 1]):
        new, before = tokens[rows, length + 1, None], state_of(tokens[rows, length, None])
        state = drafter.sync.defer_commit(None, state, new, jnp.asarray(n), before, None)
        length = length + n
    drafter.sync.catch_up(None, state, jnp.asarray(tokens), jnp.asarray(length), 8)
    ((new, n, before, _),) = fed
    for row, (first, last) in enumerate(zip(begin, length)):
        assert n[row] == last - first
        assert new[row, : n[row]].tolist() == tokens[row, first + 1 : last + 1].tolist()
        assert before[row, : n[row], 0].tolist() == tokens[row, first:last].tolist()


def test_a_round_without_drafts_runs_no_pass_of_a_head():
    def refuse(*args):
        raise AssertionError("the head was told")

    decoder = adaptive(TARGET, HEAD, "eagle")
    system = decoder.system()
    drafter = system.drafter._replace(commit=refuse, propose=refuse)
    sampler = make_sampler(SamplerConfig(), len(PROMPTS), LLAMA.vocab_size)
    state = start(decoder, PROMPTS, 60, sampler, system)
    resting = runner.system_of(system._replace(drafter=drafter), 0)
    after = jax.jit(decoding.decode_round, static_argnums=2)(decoder.params(), state, resting)
    np.testing.assert_array_equal(after.draft.count, 1)
    np.testing.assert_array_equal(after.draft.state.cache.length, state.length)


def test_a_call_that_is_cancelled_measures_nothing_first():
    decoder = adaptive(mock_model(11, 0), mock_model(11, 1))

    class AfterPrefill(CancellationToken):
        def watch(self):
            looks = itertools.count()
            return lambda: next(looks) >= 2  # the first two are before and behind prefill

    row = decoder.generate([1, 2], 8, cancellation_token=AfterPrefill())
    assert row.finish_reason == "cancelled" and len(row.tokens) == 1
    assert decoder.adaptive.costs == {}


# ---------------------------------------------------------------- the distribution

RESIDUAL = make_rule(SpeculativeConfig(rejection_sampling_strategy="residual"))
BLOCK = make_rule(SpeculativeConfig(rejection_sampling_strategy="block"))
ROWS = [
    Row((0, 1), SamplerConfig(temperature=1.0), SamplerConfig(temperature=0.8)),
    Row((2,), SamplerConfig(temperature=0.7, top_k=2), SamplerConfig(temperature=1.3)),
]
certify = functools.partial(certify_rule, rows=ROWS, num_tokens=3, batch=128)


def by_past(drafter):
    """Another K for every past: what is offered depends on the tokens so far."""

    def propose(params, state, context, num_draft):
        proposal, state = drafter.propose(params, state, context, num_draft)
        index = jnp.arange(context.tokens.shape[1])
        past = jnp.where(index <= context.length[:, None], context.tokens, 0).sum(axis=1)
        return proposal.replace(n_draft=past % (num_draft + 1)), state

    return drafter._replace(propose=propose)


RULES = [(RESIDUAL, "by past"), (RESIDUAL, "confidence"), (BLOCK, "confidence")]


@pytest.mark.representatives("residual-by past", "block-confidence")
@pytest.mark.parametrize("rule, case", RULES, ids=lambda value: getattr(value, "name", value))
def test_adaptive_k_matches_target_distribution(rule, case):
    drafter = standalone(testing.toy_model(3))
    drafter = by_past(drafter) if case == "by past" else with_confidence_stop(drafter, 0.35)
    assert certify(rule, drafter=drafter) <= 1e-6


def test_the_config_says_which_tree():
    assert SpeculativeConfig(tree=[2, 1]).tree_shape == Tree((0, 0, 1, 2))
    assert SpeculativeConfig(tree=[2, 1]).num_speculative_tokens == 4
    grown = SpeculativeConfig(num_speculative_tokens=59, tree_depth=6)
    assert grown.tree_shape == DynamicTree(59, 6, 10)
    assert SpeculativeConfig().tree_shape is None


def test_buckets_follow_k_and_k_follows_given_buckets():
    config = SpeculativeConfig.from_dict({"is_adaptive": True, "num_speculative_tokens": "5"})
    assert config.buckets == (0, 1, 2, 3, 4, 5)
    given = SpeculativeConfig.from_dict({"is_adaptive": True, "adaptive_buckets": [1, 7]})
    assert given.buckets == (1, 7) and given.num_speculative_tokens == 7
    assert SpeculativeConfig().buckets == (2,)
