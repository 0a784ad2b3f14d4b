"""Rows that end with the cache: in its last slots a block is cut, and changes no token.

Prompts leave room for 1 to K + 2 tokens. With what a round writes ahead they fill every slot there
is, and with their outputs all that the target may hold. One row begins earlier, so that those
that have ended stay while it goes on.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support import markov
from support.scripted import Known, Script
from support.sharded import Case, K, make_decoder

from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, host_drafter
from spec_jax.decoding import Finish
from spec_jax.engine.request import make_request
from spec_jax.errors import PromptError
from spec_jax.models import transformer
from spec_jax.sampling import make_sampler

SLOTS = 128  # that decoding allocates for a shorter text
ROOMS = (1, 2, 3, K + 1, K + 2, 60)  # tokens that are left to a prompt
HOT = [SamplerConfig(temperature=t, seed=i) for i, t in enumerate((1, 0, 1, 0.6, 1, 0.8))]
COLD = [SamplerConfig()] * len(ROOMS)


def case(target, drafter, member="first", tree="chain", rule="match", drive="call"):
    options = dict(
        rule=rule, sampling="bare", layers="separate", draft="sharded", rows="even", drive=drive
    )
    return Case(mesh="", target=target, drafter=drafter, member=member, tree=tree, **options)


def host(target, rule):
    drafter = host_drafter(markov.count_on)
    config = SpeculativeConfig(num_speculative_tokens=K, rejection_sampling_strategy=rule)
    return SpeculativeDecoder(target, None, config, drafter=drafter)


def itself(target, rule):
    """Every draft is right, so that every block would reach beyond the end."""
    config = SpeculativeConfig(num_speculative_tokens=K, rejection_sampling_strategy=rule)
    return SpeculativeDecoder(target, target, config)


@functools.cache
def plain_decoder(target):
    return make_decoder(case(target, "plain"), is_sharded=False)


def decoder_of(chosen):
    """A decoder whose target holds what leaves no slot over, and that number of tokens.

    Of its drafter no length is known, so that it drafts up to the last slot.
    """
    if callable(chosen.drafter):
        decoder = chosen.drafter(plain_decoder(chosen.target).target, chosen.rule)
    else:
        decoder = make_decoder(chosen, is_sharded=False)
    parts = decoder._parts
    limit = SLOTS - decoder.system(COLD).lookahead_slots
    decoder = decoder.with_parts(
        model=parts.model._replace(max_length=limit),
        drafter=parts.drafter._replace(max_length=None),
    )
    return decoder, limit


def prompts_of(limit, rooms):
    """Text that repeats itself, of ids that every target here has."""
    text = np.random.default_rng(0).integers(0, 9, 12).tolist() * SLOTS
    return [text[i : i + limit - room] for i, room in enumerate(rooms)]


def run(decoder, prompts, max_new_tokens, samplers):
    """The state in which every row has ended."""
    engine = decoder.engine(samplers)
    sampler = make_sampler(samplers, len(prompts), decoder.target.model.vocab_size)
    request = make_request(engine.system, prompts, max_new_tokens, sampler, sampler)
    state, go_on = engine.prefill(request), np.zeros(len(prompts), np.int32)
    while state.is_active.any():
        state, _ = engine.generate(state, go_on, SLOTS)
    return state, request


def outputs(state):
    tokens, begin, total = map(np.asarray, (state.tokens, state.prompt_length, state.total))
    return [row[i:n].tolist() for row, i, n in zip(tokens, begin, total)]


def held(state):
    """Keys and values of the tokens that were fed, f32[L,2,B,G,S,H]; zeros in the other slots."""
    cache, is_fed = state.target, np.arange(SLOTS) < np.asarray(state.length)[:, None]
    layers = np.asarray([cache.layer(i) for i in range(len(cache.keys))])
    by_row = layers.reshape(*layers.shape[:2], len(is_fed), -1, *layers.shape[-2:])
    return np.where(is_fed[:, None, :, None], by_row, 0)


def check(chosen):
    samplers = COLD if chosen.rule == "greedy" else HOT
    decoder, limit = decoder_of(chosen)
    plain = plain_decoder(chosen.target)
    accepted = 0
    # By what is left to each row, and by a number that all of them share.
    for prompts, new in (
        (prompts_of(limit, ROOMS), list(ROOMS)),
        (prompts_of(limit, [K, K, K, K + 3, 40, 2 * K]), K),
    ):
        if decoder.adaptive is not None:
            decoder.adaptive.tuner, decoder.adaptive.costs = Script((3, 0, 0, 1, 0, 3)), Known()
        state, request = run(decoder, prompts, new, samplers)
        expected, _ = run(plain, prompts, new, samplers)
        assert outputs(state) == outputs(expected)
        if chosen.target == "llama":  # its cache is of slots alone
            np.testing.assert_allclose(held(state), held(expected), atol=1e-4)
        assert request.slots == SLOTS == limit + decoder.system(samplers).lookahead_slots
        assert max(request.limits) == limit
        total, fed = np.asarray(state.total), np.asarray(state.length)
        np.testing.assert_array_equal(total, request.limits)
        np.testing.assert_array_equal(fed, total - 1)
        np.testing.assert_array_equal(state.finish, Finish.LENGTH)
        is_beyond = np.arange(SLOTS) >= total[:, None]
        for name, blank in (("tokens", 0), ("kind", 0), ("offered", -1), ("rejected", -1)):
            assert (np.asarray(getattr(state, name))[is_beyond] == blank).all(), name
        accepted += int((np.asarray(state.kind) == 2).sum())
    assert accepted > 0
    with pytest.raises(
        PromptError, match=f"are {limit + 1}; the maximum length of the target is {limit}"
    ):
        run(decoder, prompts_of(limit, [1]), 2, samplers[:1])


CASES = {
    "host": case("llama", host),
    "the target itself": case("llama", itself),
    "ngram": case("mamba2", "copies"),
    "suffix": case("llama", "copies", "second"),
    "standalone": case("llama", "standalone"),
    "standalone-tree": case("llama", "standalone", tree="static"),
    "standalone-dynamic": case("llama", "standalone", tree="dynamic"),
    "eagle3": case("llama", "eagle"),
    "eagle3-tree": case("mamba2", "eagle", tree="static"),
    "eagle1": case("bamba", "eagle", "second"),
    "mtp": case("llama", "mtp"),
    "mtp-modules": case("llama", "mtp", "second"),
    "adaptive": case("llama", "standalone", drive="adaptive"),
    "adaptive-eagle3": case("llama", "eagle", drive="adaptive"),
    "greedy-tree": case("llama", "eagle", tree="static", rule="greedy"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_rows_that_fill_the_cache_are_those_of_plain_decoding(name):
    check(CASES[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["llama", "mamba2", "bamba"])
def test_plain_rows_that_fill_the_cache_are_those_of_a_pass_without_one(target):
    decoder, limit = plain_decoder(target), SLOTS - 1
    prompts = prompts_of(limit, ROOMS)
    state, request = run(decoder, prompts, list(ROOMS), COLD)
    assert request.slots == SLOTS and np.asarray(state.total).tolist() == [limit] * len(ROOMS)
    tokens = np.asarray(state.tokens)
    loaded = decoder.target
    logits = transformer.logits(loaded.params, jnp.asarray(tokens), config=loaded.config)
    best = np.asarray(logits).argmax(axis=-1)
    for row, (prompt, output) in enumerate(zip(prompts, outputs(state))):
        assert output == best[row, len(prompt) - 1 : limit - 1].tolist()
