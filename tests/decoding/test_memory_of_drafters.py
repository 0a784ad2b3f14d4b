"""Drafters and Ks that learn from outputs: with a seed used again, the target's distribution stays.

The noise that judges drafts must not be the noise that made what they were learned from.
"""

from __future__ import annotations

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import start
from support.remembering import (
    DIST,
    TARGET,
    Counting,
    HostMemories,
    K,
    SampledMemories,
    SuffixMemories,
    V,
    calls,
    p_value,
)
from support.scripted import Known

import spec_jax
from spec_jax import decoding, testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.contracts import UpdateCount
from spec_jax.drafters.suffix import History, suffix
from spec_jax.engine.adaptive.policy import RoundCosts, Tuner
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError, InvalidDraftError
from spec_jax.loading import LoadedModel
from spec_jax.overlap import overlap
from spec_jax.rules import MATCH, make_rule
from spec_jax.sampling import make_sampler

ALPHA = 1e-4  # of 3,000 right rows none is near; wrong ones give 1e-50 and less
MEMORIES = {"suffix": SuffixMemories, "host": HostMemories, "sampled": SampledMemories}
RESIDUAL = make_rule(SpeculativeConfig("suffix", rejection_sampling_strategy="residual"))
WARM = SamplerConfig(temperature=1.0)


@pytest.mark.representatives("suffix")
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_second_call_with_the_same_seed_matches_target_distribution(memory):
    # What was sampled shows in the third call, and less: the first one draws from no memory.
    rows, num_calls = (4096, 3) if memory == "sampled" else (1500, 2)
    first, second, *rest = calls(MEMORIES[memory](rows), "residual", rows, num_calls)
    assert min(p_value(output, 3) for output in (first, second, *rest)) > ALPHA
    assert (first[:, 0] == second[:, 0]).all()  # prefill drafts nothing: the same noise
    assert (first != second).any(axis=1).mean() > 0.3


@pytest.fixture(scope="module")
def remembering():
    target = LoadedModel("target", testing.toy_model(V), TARGET)
    config = SpeculativeConfig("suffix", K, rejection_sampling_strategy="residual")
    return SpeculativeDecoder(target, config=config, target_sampler=WARM)


def learned(decoder) -> list[list[int]]:
    """The counts that a row's noise is made with after a round of this decoder."""
    engine = decoder.engine()
    state = start(decoder, [[0, 1, 2]], [8], make_sampler(WARM, 1, V))
    state, _ = engine.generate(state, np.zeros(1, np.int32), 1)
    return [np.asarray(x.update_counts).tolist() for x in (state.sampler, state.draft_sampler)]


@pytest.mark.exhaustive
def test_the_count_of_updates_belongs_to_the_memory_and_not_to_the_decoder(remembering):
    target, history = remembering.target, remembering.history
    again = SpeculativeDecoder(target, config=remembering.config, target_sampler=WARM)
    again = again.with_parts(history=history)
    before = history.num_updates
    remembering.warmup([3], 8)
    assert history.num_updates == before and learned(remembering) == [[[before, 0]]] * 2
    remembering.generate([[0, 1, 2]], 8)
    assert learned(remembering) == learned(again) == [[[before + 1, 0]]] * 2
    again.generate([[0, 1, 2]], 8)
    assert learned(remembering) == [[[before + 2, 0]]] * 2
    history.add([])  # nothing is learned from nothing
    assert history.num_updates == before + 2


def test_a_memory_must_state_its_updates(remembering):
    target = remembering.target
    options = {"config": SpeculativeConfig(num_speculative_tokens=K), "target_sampler": WARM}
    counting = spec_jax.host_drafter(lambda *_: [], num_updates=lambda: 0)
    for drafter, message in (
        (counting._replace(memory=None), "counts updates of a memory; set memory="),
        (suffix(V)._replace(memory=UpdateCount()), "no num_updates although the drafter has"),
    ):
        decoder = SpeculativeDecoder(target, drafter=drafter, **options)
        with pytest.raises(ConfigError, match=message):
            decoder.generate([[0, 1]], 4)
    for answer in (-1, None, 2**31, 0.5):
        host = spec_jax.host_drafter(lambda *_: [], num_updates=lambda: answer)
        decoder = SpeculativeDecoder(target, drafter=host, **options)
        with pytest.raises(InvalidDraftError) as caught:
            decoder.generate([[0, 1]], 4)
        assert f"num_updates() returned {answer!r}; expected an" in str(caught.value.__cause__)


def test_overlapped_drafts_from_a_memory_are_refused(remembering):
    system = remembering.system()
    with pytest.raises(ConfigError, match="drafts from earlier outputs, which overlapped drafting"):
        overlap.check(system)
    overlap.check(system._replace(rule=MATCH))  # its tokens do not depend on drafts


def test_every_count_of_every_source_has_noise_of_its_own():
    """Of drafts, coins and replacements, and of rounds of K = 0 under a rule that drafts."""
    counts = [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2), (1, 2), (2, 1)]
    sampler = make_sampler(WARM, len(counts), V, [7] * len(counts))
    sampler = sampler.replace(update_counts=jnp.asarray(counts, jnp.uint32))
    start, streams = jnp.full((len(counts),), 3), []
    for rule in (RESIDUAL, MATCH):
        make = jax.jit(lambda sampler: decoding.round_noise(rule, sampler, start, K, V))
        noise, unlearned = make(sampler), make(sampler.replace(update_counts=None))
        streams += [noise.uniforms[:, 0], noise.gumbel[:, 0, 0]]
        np.testing.assert_array_equal(unlearned.gumbel[0], noise.gumbel[0])
    for stream in streams:
        assert len(set(np.asarray(stream).tolist())) == len(counts)


def test_the_choice_of_k_counts_its_updates():
    """In the tuner itself, so that the count is shared and kept with it."""
    tuner = Tuner.fresh(1)
    for number in range(3):
        assert tuner.choose(RoundCosts({0: 1.0, 1: 1.0}))[1].num_updates == number
        tuner = tuner.observe(1, 4, [4], [2], 4.0)


@pytest.mark.exhaustive
def test_the_noise_of_a_round_is_made_with_the_updates_of_the_choice_of_k():
    model = testing.toy_model(V)
    target = LoadedModel("target", model, TARGET)
    draft = LoadedModel("draft", model, testing.toy_params(V, 1, contexts=1))
    options = {"adaptive": {"buckets": (0, 1)}, "rejection_sampling_strategy": "residual"}
    config = SpeculativeConfig("standalone", 1, **options)
    decoder = SpeculativeDecoder(target, draft, config, target_sampler=WARM)
    decoder.adaptive.tuner, decoder.adaptive.costs = Counting(), Known()
    engine = decoder.engine()
    state = start(decoder, [[0, 1, 2]], [8], make_sampler(WARM, 1, V))
    for number in range(3):
        state, _ = engine.generate(state, np.zeros(1, np.int32), 1)
        for sampler in (state.sampler, state.draft_sampler):
            assert sampler.update_counts.tolist() == [[0, number]]
        assert decoder.adaptive.tuner.num_updates == number + 1


def test_a_history_is_saved_with_its_count():
    history = History(8)
    history.add([1, 2])
    for kept in (copy.deepcopy(history), pickle.loads(pickle.dumps(history))):
        np.testing.assert_array_equal(kept.params["tokens"], history.params["tokens"])
        kept.add([3])
        assert (kept.num_updates, history.num_updates) == (2, 1)


@pytest.mark.exhaustive
def test_a_function_that_remembers_is_refused_where_devices_share_rows(remembering):
    host = spec_jax.host_drafter(lambda *_: [], num_updates=lambda: 0)
    options = {"config": SpeculativeConfig(num_speculative_tokens=K), "target_sampler": WARM}
    target = LoadedModel("target", testing.toy_model(V), TARGET)
    decoder = SpeculativeDecoder(target, drafter=host, mesh="data:2", **options)
    with pytest.raises(ConfigError, match="remembers .*, and 2 devices of this mesh would call it"):
        decoder.generate([[0, 1, 2]], 4)
    assert len(decoder.generate([[0, 1, 2]] * 2, 4)) == 2  # a row on each device


def test_the_targets_probabilities_are_those_of_the_oracle():
    np.testing.assert_allclose(jnp.exp(TARGET["logits"][0]), DIST, rtol=1e-6)
