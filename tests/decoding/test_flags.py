"""Flags of jax: decoding gives the same tokens with each that docs/bring_a_model.md supports."""

from __future__ import annotations

import functools

import jax
import pytest
from support.tiny_models import LLAMA, large_weights

import spec_jax
from spec_jax import SamplerConfig, SpeculativeConfig
from spec_jax.errors import ConfigError

SAME = {
    "x64": lambda: jax.enable_x64(True),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "leaks": jax.checking_leaks,
    "nans": lambda: jax.debug_nans(True),
}


@functools.cache
def models() -> list[spec_jax.LoadedModel]:
    return [large_weights(name, LLAMA, seed) for seed, name in enumerate(("target", "draft"))]


def texts(num_tokens: int = 8) -> list[tuple[int, ...]]:
    """What a plain, a standalone and an n-gram decoder write, greedily and sampled."""
    target, draft = models()
    found = []
    for config, with_draft in (
        (None, False),
        (SpeculativeConfig(num_speculative_tokens=3), True),
        (SpeculativeConfig("ngram", 3), False),
    ):
        decoder = spec_jax.SpeculativeDecoder(target, draft if with_draft else None, config)
        for sampler in (SamplerConfig(), SamplerConfig(temperature=1.0, top_p=0.9, seed=3)):
            for row in decoder.generate([[3, 1, 4, 1, 5], [9, 2]], num_tokens, sampler=sampler):
                found.append(row.tokens)
    return found


usual = functools.cache(texts)


@pytest.mark.parametrize("flag", SAME)
@pytest.mark.exhaustive
def test_tokens_do_not_depend_on_a_flag_of_jax(flag):
    expected = usual()
    with SAME[flag]():
        assert texts() == expected


@pytest.mark.exhaustive
def test_decoding_without_jit_gives_the_same_tokens():
    expected = texts(2)
    with jax.disable_jit():
        assert texts(2) == expected


def test_a_guard_against_transfers_is_refused_in_one_line():
    models()
    with jax.transfer_guard("disallow"), pytest.raises(ConfigError, match="jax_transfer_guard"):
        texts()
    decoder = spec_jax.SpeculativeDecoder(models()[0])
    with jax.transfer_guard("disallow"), pytest.raises(ConfigError, match="jax_transfer_guard"):
        dict(spec_jax.DecodeQueue(decoder, [[3, 1, 4]], batch=1, max_new_tokens=2))


@pytest.mark.exhaustive
def test_the_generator_of_random_bits_changes_samples_and_not_greedy_text():
    expected = usual()
    usual_impl = jax.config.jax_default_prng_impl
    jax.config.update("jax_default_prng_impl", "rbg")  # noise is keyed by threefry all the same
    try:
        assert texts() == expected
    finally:
        jax.config.update("jax_default_prng_impl", usual_impl)
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        found = texts()
    assert [found[i : i + 2] for i in (0, 4, 8)] == [expected[i : i + 2] for i in (0, 4, 8)]
    assert found != expected
