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
    large_weights,
    plain,
    random_tokens,
    random_weights,
)

from spec_jax import SamplerConfig, SpeculativeConfig, SpeculativeDecoder, decoding
from spec_jax.decoding import loop
from spec_jax.drafters.standalone.model import standalone
from spec_jax.engine.adaptive.deferred import with_deferred_commits
from spec_jax.errors import ConfigError, ShapeError
from spec_jax.models import transformer
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.config import ModelConfig
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
    "eagle-1": lambda: eagle_heads.system_of(eagle_heads.CONFIGS["eagle-1"]),
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


@pytest.mark.representatives("5-eagle-3")
@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("chunk", [1, 5, 8])
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


V = 29
LONG = dict(max_new_tokens=9, stop_tokens=())


@functools.cache
def pair(is_mock=False):
    if is_mock:
        return mock_model(V, 0), mock_model(V, 1)
    config = lambda layers: ModelConfig(V, 16, 24, layers, 2, 1, max_position_embeddings=64)
    return large_weights("target", config(2), 0), large_weights("draft", config(1), 1)


def decoder(strategy="match", temperature=1.0, is_mock=False, **options):
    target, draft = pair(is_mock)
    config = strategy and SpeculativeConfig(rejection_sampling_strategy=strategy)
    sampler = SamplerConfig(temperature, seed=7)
    return SpeculativeDecoder(
        target, draft if strategy else None, config, target_sampler=sampler, **options
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(  # every rule and every mesh once
    ("strategy", "on"),
    [
        (None, None),
        ("residual", None),
        ("match", "data:2,tensor:1"),
        ("residual", "data:4,tensor:1"),
    ],
)
def test_chunks_that_divide_nothing_give_the_tokens_of_one_pass(strategy, on):
    prompts = [[i % V for i in range(n)] for n in (37, 3, 12, 16)]
    expected = [row.tokens for row in decoder(strategy).generate(prompts, **LONG)]
    for chunk in (5, 16):
        found = decoder(strategy, prefill_chunk=chunk, mesh=on).generate(prompts, **LONG)
        assert [row.tokens for row in found] == expected


def test_a_chunk_without_a_token_or_beyond_the_cache_is_refused():
    for chunk, message in ((0, "prefill_chunk is 0"), (65, "prefill_chunk is 65.*holds 64")):
        with pytest.raises(ConfigError, match=message):
            decoder(prefill_chunk=chunk)
    system, params = SYSTEMS["eagle-3"]()
    with pytest.raises(ShapeError, match="prefill_chunk is 0"):
        prefill(system._replace(prefill_chunk=0), params, PROMPTS, 8)


def sampled(strategy, monkeypatch, **options):
    """The rows of several samples of two prompts, and how many rows the target was fed."""
    fed, run = [], loop.prefill_target
    count = lambda params, tokens, *rest, **more: (
        fed.append(len(tokens)) or run(params, tokens, *rest, **more)
    )
    monkeypatch.setattr(loop, "prefill_target", count)
    seeds = dict(seeds=[5, 9, 5, 11, 2, 3])
    return decoder(strategy, **options).generate(
        [[1, 2, 3], [4] * 9], num_samples=3, **seeds, **LONG
    ), fed


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_mock", [True, False])
@pytest.mark.parametrize("strategy", [None, "match", "residual"])
def test_samples_of_a_prompt_are_those_of_separate_calls(strategy, is_mock, monkeypatch):
    rows, fed = sampled(strategy, monkeypatch, is_mock=is_mock)
    assert fed == [2]
    one = decoder(strategy, is_mock=is_mock)
    alone = [
        one.generate(prompt, seeds=[seed], **LONG).tokens
        for prompt, seed in zip([[1, 2, 3]] * 3 + [[4] * 9] * 3, (5, 9, 5, 11, 2, 3))
    ]
    assert [row.tokens for row in rows] == alone
    assert alone[0] == alone[2] != alone[1]


def test_samples_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="num_samples"):
        decoder().generate([1, 2], num_samples=0)
    system, params = SYSTEMS["eagle-3"]()
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
