"""A prompt fed in chunks leaves what one pass leaves: caches, features, logits and tokens."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support import eagle_heads, mtp_modules
from support.decoders import prefill, propose, rule
from support.tiny_models import (
    BAMBA,
    DEEPSEEK_TARGET,
    LLAMA,
    MAMBA2,
    QWEN35,
    plain,
    random_tokens,
    random_weights,
)

from spec_jax import SamplerConfig, SpeculativeDecoder, decoding
from spec_jax.drafters.standalone.model import standalone
from spec_jax.engine.adaptive.deferred import with_deferred_commits
from spec_jax.errors import ShapeError
from spec_jax.models import transformer
from spec_jax.models.caches.kv import KVCache
from spec_jax.sampling import make_sampler
from spec_jax.testing import mock_model

LENGTHS = (13, 4, 1)
PROMPTS = [np.asarray(random_tokens(n, seed=n)).tolist() for n in LENGTHS]


def of_models(target, draft):
    models = transformer.model(target), transformer.model(draft)
    params = {"target": random_weights(target), "draft": random_weights(draft, seed=1)}
    return decoding.System(models[0], standalone(models[1]), rule("greedy"), 3), params


def deferred():
    system, params = eagle_heads.system_of(eagle_heads.CONFIGS["eagle-3"])
    return system._replace(drafter=with_deferred_commits(system.drafter, 8)), params


SYSTEMS = {
    "eagle-3": lambda: eagle_heads.system_of(eagle_heads.CONFIGS["eagle-3"]),
    "mtp in turn": lambda: mtp_modules.system_of(mtp_modules.CONFIGS["sequential"]),
    "deferred": deferred,
    "scanned": lambda: of_models(dataclasses.replace(LLAMA, scan_layers=True), LLAMA),
    "bamba": lambda: plain(BAMBA, {"target": random_weights(BAMBA)}),
    "deepseek": lambda: plain(DEEPSEEK_TARGET, {"target": random_weights(DEEPSEEK_TARGET)}),
    "qwen3.5": lambda: plain(QWEN35, {"target": random_weights(QWEN35)}),
    "bamba, mamba-2": lambda: of_models(BAMBA, MAMBA2),
    "mamba-2, bamba": lambda: of_models(MAMBA2, BAMBA),
}


def committed(state):
    """The arrays of a state, without what no row has committed."""
    is_cache = lambda node: isinstance(node, KVCache)

    def read(node):
        if not is_cache(node):
            return np.asarray(node)
        (*arrays, length), B = node.snapshot(), len(node.length)
        cut = lambda x: [np.asarray(x)[b, :, : int(length[b])] for b in range(B)]
        return [cut(x) for x in jax.tree.leaves(arrays)], np.asarray(length)

    return jax.tree.map(read, state, is_leaf=is_cache)


# The width of the prompts is no multiple of 5, and one of 8.
CASES = [*((5, name) for name in SYSTEMS), (8, "eagle-3")]


@pytest.mark.representatives("5-eagle-3")
@pytest.mark.parametrize(("chunk", "name"), CASES)
def test_chunks_leave_the_state_of_one_pass(name, chunk):
    system, params = SYSTEMS[name]()
    whole = prefill(system, params, PROMPTS, 8)
    state = prefill(system._replace(prefill_chunk=chunk), params, PROMPTS, 8)
    assert jax.tree.structure(state) == jax.tree.structure(whole)
    close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5)
    if name == "mtp in turn":  # its modules' first slots have no row, and anything in them
        jax.tree.map(close, propose(system, params, state), propose(system, params, whole))
        state, whole = (x.replace(draft=()) for x in (state, whole))
    jax.tree.map(close, committed(state), committed(whole))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["eagle-3", "mtp in turn", "deferred"])
def test_samples_of_one_prompt_have_the_state_of_prompts_of_their_own(name):
    """Also of a prompt of one token, and of samples that begin with different tokens."""
    system, params = SYSTEMS[name]()
    system = system._replace(rule=rule("match"))
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    warm = SamplerConfig(temperature=9.0)
    shared = prefill(system, params, prompts, 8, warm, samples=2)
    own = prefill(system, params, prompts, 8, warm)
    first = np.asarray(own.tokens)[range(6), np.repeat(LENGTHS, 2)]
    assert (first[::2] != first[1::2]).any()
    close = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=2e-5)
    if name == "mtp in turn":
        jax.tree.map(close, propose(system, params, shared), propose(system, params, own))
        shared, own = (x.replace(draft=()) for x in (shared, own))
    jax.tree.map(close, committed(shared), committed(own))


def test_requests_that_cannot_be_prefilled_are_refused():
    system, params = SYSTEMS["eagle-3"]()
    with pytest.raises(ShapeError, match="prefill_chunk is 0"):
        prefill(system._replace(prefill_chunk=0), params, PROMPTS, 8)
    with pytest.raises(ShapeError, match="samples is 2.*3 rows"):
        prefill(system, params, PROMPTS, 8, samples=2)


def test_within_a_callers_program_prompts_of_known_lengths_may_be_traced():
    model = mock_model(4)
    target = model.model._replace(can_rewind=False)
    system = SpeculativeDecoder(dataclasses.replace(model, model=target)).system()
    params = {"target": model.params, "draft": None}
    sampler, lengths, tokens = make_sampler(SamplerConfig(), 1, 4), np.asarray([3]), [[1, 2, 3]]

    def run(tokens):
        request = tokens, lengths, lengths + 2, np.full((1, 1), -1), sampler, sampler
        return decoding.prefill(params, *request, system=system, slots=16).tokens

    assert (jax.jit(run)(np.asarray(tokens)) == run(np.asarray(tokens))).all()
