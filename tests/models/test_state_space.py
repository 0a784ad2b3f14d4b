"""States of models without attention: the closed forms, and targets that cannot rewind them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.state_space import run_delta_net, run_mamba2
from support.tiny_models import MAMBA2, QWEN35, random_tensor, random_tokens, random_weights

from spec_jax import SpeculativeConfig, SpeculativeDecoder
from spec_jax.errors import ConfigError, PromptError
from spec_jax.loading import LoadedModel
from spec_jax.models import transformer
from spec_jax.models.caches.state import StateCache
from spec_jax.models.delta import delta_net, invert_unit_lower
from spec_jax.models.families.bamba import BambaConfig
from spec_jax.models.layers import Window
from spec_jax.models.params import init_params, num_params
from spec_jax.models.ssm import CHUNK

_ODD = dict(n_groups=1, conv_kernel=3, use_conv_bias=False, use_bias=True)
_ODD |= dict(time_step_limit=(0.6, 0.9), tie_word_embeddings=True)
ODD = dataclasses.replace(MAMBA2, **_ODD)
whole = jax.jit(transformer.logits, static_argnames="config")


def weights(config):
    """Random ones, with heads that forget at once beside heads that hardly do."""
    params = random_weights(config)
    decay = jnp.asarray([-6.0, -1.0, 1.0, 5.0])
    layers = {i: {**layer, "decay": decay} for i, layer in params["layers"].items()}
    return {**params, "layers": layers}


@pytest.mark.parametrize("config", [MAMBA2, ODD], ids=["usual", "odd"])
def test_the_closed_form_equals_the_recurrence(config):
    """Over several chunks, and the state that a ragged prompt of as many leaves."""
    params, T = weights(config), 2 * CHUNK + 22
    tokens, lengths = random_tokens(2, T), np.array([T, CHUNK + 5])
    model = transformer.model(config)

    @jax.jit
    def run(tokens):
        output = model.forward(params, tokens, model.init_cache(params, 2, T))
        return model.unembed(params, output.hidden), output.cache.commit(jnp.asarray(lengths))

    logits, cache = run(tokens)
    for b, length in enumerate(lengths):
        expected, ends = run_mamba2(params, np.asarray(tokens[b, :length]), config)
        np.testing.assert_allclose(logits[b, :length], expected, atol=2e-5)
        for layer, (state, last) in zip(cache.layers, ends):
            np.testing.assert_allclose(layer.ssm[b], state, atol=1e-5)
            np.testing.assert_allclose(layer.conv[b], last, atol=1e-5)


def test_a_delta_net_equals_its_recurrence():
    """Over chunks, keys that repeat among them, and the state that ragged rows leave."""
    config, T = QWEN35.mixer, CHUNK + 21
    layer = dict(random_weights(QWEN35)["layers"]["0"], decay=jnp.asarray([-6.0, -1.0, 1.0, 5.0]))
    x = random_tensor("inputs", (2, T, QWEN35.hidden_size), 0)
    x[:, 9:40] = x[:, 8:9]
    lengths = np.array([T, CHUNK + 2])

    @jax.jit
    def run(x):
        cache = StateCache.create(config, 1, 2)
        window = Window.after(QWEN35, cache, 2, T)
        out, cache = delta_net(layer, x, cache, 0, window, QWEN35)
        return out, cache.commit(jnp.asarray(lengths))

    out, cache = run(x)
    as_64 = {name: np.asarray(w, np.float64) for name, w in layer.items()}
    for b, length in enumerate(lengths):
        expected, state, last = run_delta_net(as_64, x[b, :length].astype(np.float64), config)
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(out[b, :length], expected, atol=2e-5)
        np.testing.assert_allclose(cache.layers[0].ssm[b], state, atol=2e-5)
        np.testing.assert_allclose(cache.layers[0].conv[b], last, atol=1e-6)


@pytest.mark.parametrize("size", [9, 16, CHUNK])
def test_inverses_of_triangular_matrices(size):
    """Random ones, and those of keys that repeat, where a series of powers loses all digits."""
    lower = np.tril(np.random.default_rng(size).normal(size=(2, size, size)) / 3, -1)
    lower[1] = np.tril(np.full((size, size), 0.9), -1)
    spoiled = lower + np.triu(np.full((size, size), np.nan))  # is not read
    found = jax.jit(invert_unit_lower)(spoiled.astype(np.float32))
    np.testing.assert_allclose(found, np.linalg.inv(lower + np.eye(size)), atol=2e-5)


def test_bfloat16_keeps_the_state_in_float32_and_stays_near():
    half, tokens = random_weights(MAMBA2, dtype="bfloat16"), random_tokens(2, 12)
    single = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    expected = whole(single, tokens, config=MAMBA2)
    model = transformer.model(MAMBA2)
    cache = model.init_cache(half, 2, 12)
    output = jax.jit(model.forward)(half, tokens, cache)
    layer = output.cache.layers[0]
    assert layer.conv.dtype == output.hidden.dtype == jnp.bfloat16
    assert layer.ssm.dtype == layer.window.u.dtype == jnp.float32
    error = jnp.abs(model.unembed(half, output.hidden) - expected).max()
    assert error < 0.05 * jnp.abs(expected).max()


def loaded(name, config, params):
    return LoadedModel(name, transformer.model(config), params, config=config)


def test_a_target_that_can_neither_rewind_nor_replay_takes_one_token_a_pass():
    """And never a pad; the decoder counts the rows that fell back."""
    whole = loaded("target", MAMBA2, random_weights(MAMBA2))
    target = dataclasses.replace(whole, model=whole.model._replace(can_rewind=False))
    decoder = SpeculativeDecoder(target, None, SpeculativeConfig("ngram", 2))
    prompt = [3, 1, 4, 1, 3]
    row = decoder.generate(prompt, 6)
    assert row.tokens == SpeculativeDecoder(whole).generate(prompt, 6).tokens
    assert decoder.num_draft == 0 and decoder.stats.n1_fallbacks == 1
    assert decoder.stats.rounds == 5 and decoder.stats.drafted == 0
    with pytest.raises(PromptError, match="one by one"):
        decoder.generate([prompt, prompt[1:]], 6)


def test_random_weights_begin_as_published():
    params = init_params(MAMBA2, jax.random.key(0))["layers"]["0"]
    np.testing.assert_allclose(jnp.exp(params["decay"]), [1, 2, 3, 4], rtol=1e-6)
    step = jax.nn.softplus(params["time_bias"])
    assert ((step > 0.9e-3) & (step < 0.11)).all()
    assert (params["skip"] == 1).all() and (jnp.abs(params["conv"]) < 0.5).all()
    assert num_params(MAMBA2) == num_params(dataclasses.replace(MAMBA2, residual_in_fp32=False))


def test_an_infinite_limit_is_read_and_absent_keys_are_named():
    infinite = {**ODD.to_hf(), "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert type(ODD).from_hf(infinite).time_step_limit == (0.0, float("inf"))
    assert type(ODD).from_hf(ODD.to_hf()) == ODD
    with pytest.raises(ConfigError, match="attn_layer_indices, .* are missing"):
        BambaConfig.from_hf({"vocab_size": 3})
