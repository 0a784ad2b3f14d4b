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
from support.sharded import Case, K, make_decoder

from spec_jax import SamplerConfig
from spec_jax.engine.request import make_request
from spec_jax.models import transformer
from spec_jax.sampling import make_sampler

SLOTS = 128  # that decoding allocates for a shorter text
ROOMS = (1, 2, 3, K + 1, K + 2, 60)  # tokens that are left to a prompt
COLD = [SamplerConfig()] * len(ROOMS)


def case(target, drafter, member="first", tree="chain", rule="match", drive="call"):
    options = dict(
        rule=rule, sampling="bare", layers="separate", draft="sharded", rows="even", drive=drive
    )
    return Case(mesh="", target=target, drafter=drafter, member=member, tree=tree, **options)


@functools.cache
def plain_decoder(target):
    return make_decoder(case(target, "plain"), is_sharded=False)


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
