"""The transformer: causality, rotary embedding, weights, taps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import FAMILIES, LLAMA, QWEN3, TINY, random_tokens, random_weights

from spec_jax.models import transformer
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.config import ModelConfig, RopeConfig
from spec_jax.models.params import init_params, num_params
from spec_jax.models.rope import rope_frequencies


def test_each_output_depends_on_its_own_and_earlier_tokens_only():
    tokens = jnp.arange(7, dtype=jnp.int32)[None]  # distinct, so embedding rows are positions

    def outputs(embed):
        params = {**random_weights(LLAMA), "embed": embed}
        return transformer.forward(params, tokens, config=LLAMA).hidden[0, :, 0]

    jacobian = jax.jit(jax.jacrev(outputs))(random_weights(LLAMA)["embed"])[:, :7]
    depends = np.abs(np.asarray(jacobian)).max(axis=-1) > 1e-7  # [output, input]
    np.testing.assert_array_equal(depends, np.tri(7, dtype=bool))
    assert (np.asarray(jacobian)[~np.tri(7, dtype=bool)] == 0).all()


def test_yarn_may_scale_nothing_and_state_its_factor():
    """The formulas are compared with transformers' in test_recorded.py and the parity tests."""
    yarn = RopeConfig("yarn", factor=1.0, original_max_position_embeddings=4096)
    freq, factor = rope_frequencies(yarn, 32)
    np.testing.assert_allclose(freq, rope_frequencies(RopeConfig(), 32)[0], rtol=3e-6)
    assert factor == 1
    stated = dataclasses.replace(yarn, factor=8.0, attention_factor=0.7)
    assert float(rope_frequencies(stated, 32)[1]) == pytest.approx(0.7)


def test_each_config_has_one_model_and_the_table_counts_its_random_weights():
    assert transformer.model(LLAMA) is transformer.model(
        ModelConfig(**{**TINY, "num_attention_heads": 4, "num_key_value_heads": 2})
    )
    assert transformer.model(LLAMA).vocab_size == 31
    assert transformer.model(LLAMA).max_length == LLAMA.max_position_embeddings
    for config in FAMILIES:
        assert num_params(config) == sum(x.size for x in jax.tree.leaves(random_weights(config)))


def test_initial_weights_are_reproducible_and_of_the_declared_distribution():
    first, again, other = (init_params(QWEN3, jax.random.key(k)) for k in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    layer = first["layers"]["0"]
    assert (layer["q_norm"] == 1).all() and (first["final_norm"] == 1).all()
    assert float(first["embed"].std()) == pytest.approx(0.02, rel=0.15)
    assert float(layer["down"].std()) == pytest.approx(0.01, rel=0.15)  # 0.02 / sqrt(2 L)
    for a, b in ((first, other), (first["layers"]["0"], first["layers"]["1"])):
        assert not np.array_equal(a.get("head", a.get("q")), b.get("head", b.get("q")))


@pytest.mark.representatives("True-True")
@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("scan_layers", [False, True])
def test_taps_are_the_states_that_a_shorter_model_ends_in(scan_layers, has_cache):
    config = dataclasses.replace(LLAMA, num_hidden_layers=3, scan_layers=scan_layers)
    params, tokens = random_weights(config), random_tokens(2, 6)
    make = lambda: KVCache.create(config, 2, 8) if has_cache else None
    taps = (2, 0, 4, 3, 1)
    out = transformer.model(config, taps).forward(params, tokens, make())
    assert out.features.shape == (2, 6, 5 * config.hidden_size)
    found = dict(zip(taps, jnp.split(out.features, 5, axis=-1)))
    plain = transformer.model(config).forward(params, tokens, make())
    assert plain.features is None
    np.testing.assert_array_equal(out.hidden, plain.hidden)
    np.testing.assert_array_equal(found[4], out.hidden)
    np.testing.assert_array_equal(found[0], params["embed"][tokens])
    separate = dataclasses.replace(config, scan_layers=False)
    weights = random_weights(separate)
    for num_layers in (1, 2, 3):
        short = dataclasses.replace(separate, num_hidden_layers=num_layers)
        ends = transformer.forward(weights, tokens, config=short, taps=(num_layers,)).features
        np.testing.assert_allclose(found[num_layers], ends, rtol=0, atol=1e-5)
