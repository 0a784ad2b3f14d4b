"""The transformer: cached against cache-free, causality, rotary embedding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import FAMILIES, LLAMA, QWEN3, TINY, random_tokens, random_weights

from spec_jax.errors import ConfigError
from spec_jax.models import transformer
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.config import ModelConfig, RopeConfig
from spec_jax.models.params import init_params, num_params
from spec_jax.models.rope import rope_frequencies

forward = jax.jit(transformer.forward, static_argnames="config")
unembed = jax.jit(transformer.unembed)
whole = jax.jit(transformer.logits, static_argnames="config")


def ragged_logits(config, params, tokens, lengths, advances):
    """Logits of the tokens after each row's prompt, fed in windows of 3 that keep 1..3."""
    B, T = tokens.shape
    rows = np.arange(B)[:, None]
    padded = np.where(np.arange(6) < lengths[:, None], tokens[:, :6], 7)
    cache = KVCache.create(config, B, T + 3, params["embed"].dtype)
    cache = forward(params, jnp.asarray(padded), cache, config=config).cache.commit(lengths)
    seen = np.full((B, T, config.vocab_size), np.nan, np.float32)
    for n in advances:
        start = np.asarray(cache.length)
        window = tokens[rows, np.minimum(start[:, None] + np.arange(3), T - 1)]
        output = forward(params, window, cache, config=config)
        logits = np.asarray(unembed(params, output.hidden))
        for b in range(B):
            seen[b, start[b] : start[b] + n[b]] = logits[b, : n[b]]
        np.testing.assert_array_equal(output.cache.length, start)
        cache = output.cache.commit(jnp.asarray(n))
    return seen, np.asarray(cache.length)


@pytest.mark.representatives("qwen3")
@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)
def test_cached_forward_equals_cache_free_forward_on_ragged_rows(config):
    params, tokens = random_weights(config), random_tokens(3, 12)
    lengths = np.array([6, 3, 1])
    advances = np.array([[1, 3, 2], [3, 1, 3], [0, 2, 1], [2, 3, 3]])
    seen, end = ragged_logits(config, params, tokens, lengths, advances)
    expected = np.asarray(whole(params, tokens, config=config))
    for b in range(3):
        assert end[b] == lengths[b] + advances[:, b].sum()
        np.testing.assert_allclose(
            seen[b, lengths[b] : end[b]], expected[b, lengths[b] : end[b]], atol=2e-5
        )


def test_single_steps_in_a_window_equal_one_pass():
    params, tokens = random_weights(LLAMA), random_tokens(3, 12)
    cache = KVCache.create(LLAMA, 3, 15)
    cache = forward(params, tokens[:, :6], cache, config=LLAMA).cache.commit(jnp.array([6, 3, 1]))
    window = tokens[:, 6:9]
    expected = forward(params, window, cache, config=LLAMA)
    hidden, stepped = [], cache
    for i in range(3):
        output = forward(
            params, window[:, i : i + 1], stepped, config=LLAMA, window_offset=jnp.int32(i)
        )
        hidden.append(output.hidden)
        stepped = output.cache
    np.testing.assert_allclose(jnp.concatenate(hidden, 1), expected.hidden, atol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), stepped.keys, expected.cache.keys
    )
    np.testing.assert_array_equal(stepped.length, cache.length)


def test_scanned_layers_equal_unrolled_layers():
    scanned = dataclasses.replace(LLAMA, scan_layers=True)
    params, tokens = random_weights(LLAMA), random_tokens(3, 12)
    stack = lambda *layers: jnp.stack(layers)
    stacked = {**params, "layers": {"0:2": jax.tree.map(stack, *params["layers"].values())}}
    np.testing.assert_allclose(
        whole(stacked, tokens, config=scanned), whole(params, tokens, config=LLAMA), atol=2e-5
    )
    outputs = []
    for p, config in ((params, LLAMA), (stacked, scanned)):
        cache = KVCache.create(config, 3, 15).commit(jnp.array([0, 2, 5]))
        output = forward(p, tokens[:, :6], cache, config=config)
        outputs.append((output.hidden, output.cache.snapshot()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *outputs)


@pytest.mark.exhaustive
def test_bfloat16_stays_near_float32_with_and_without_a_cache():
    half, tokens = random_weights(LLAMA, dtype="bfloat16"), random_tokens(3, 12)
    # The same (rounded) weights in float32: what is left is the arithmetic's rounding.
    single = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    expected = whole(single, tokens, config=LLAMA)
    cache = transformer.model(LLAMA).init_cache(half, 3, 15)
    assert {x.dtype for x in (*cache.keys, *cache.values)} == {jnp.dtype(jnp.bfloat16)}
    output = forward(half, tokens[:, :6], cache, config=LLAMA)
    assert output.hidden.dtype == output.cache.keys[0].dtype == jnp.bfloat16
    free, cached = whole(half, tokens, config=LLAMA), unembed(half, output.hidden)
    assert free.dtype == cached.dtype == jnp.float32
    scale = float(jnp.abs(expected).max())
    assert 1e-4 * scale < float(jnp.abs(free - expected).max()) < 0.05 * scale
    assert float(jnp.abs(cached - expected[:, :6]).max()) < 0.05 * scale


def test_each_output_depends_on_its_own_and_earlier_tokens_only():
    tokens = jnp.arange(7, dtype=jnp.int32)[None]  # distinct, so embedding rows are positions

    def outputs(embed):
        params = {**random_weights(LLAMA), "embed": embed}
        return transformer.forward(params, tokens, config=LLAMA).hidden[0, :, 0]

    jacobian = jax.jit(jax.jacrev(outputs))(random_weights(LLAMA)["embed"])[:, :7]
    depends = np.abs(np.asarray(jacobian)).max(axis=-1) > 1e-7  # [output, input]
    np.testing.assert_array_equal(depends, np.tri(7, dtype=bool))
    assert (np.asarray(jacobian)[~np.tri(7, dtype=bool)] == 0).all()


def test_rows_of_a_batch_do_not_see_each_other():
    params, tokens = random_weights(LLAMA), random_tokens(3, 12)
    before = np.asarray(whole(params, tokens, config=LLAMA))
    after = np.asarray(whole(params, tokens.at[1].set(5), config=LLAMA))
    np.testing.assert_array_equal(before[[0, 2]], after[[0, 2]])
    assert np.abs(before[1] - after[1]).max() > 0.1


def test_only_relative_positions_matter():
    params, tokens = random_weights(LLAMA), random_tokens(3, 12)
    positions = jnp.broadcast_to(jnp.arange(12), (3, 12))
    run = lambda p: forward(params, tokens, config=LLAMA, positions=p).hidden
    np.testing.assert_allclose(run(positions + 9), run(positions), atol=1e-4)
    assert float(jnp.abs(run(2 * positions) - run(positions)).max()) > 1e-2


def test_siblings_under_a_mask_equal_separate_chains():
    """Two candidates for one position, each blind to the other, as a tree needs them."""
    params, tokens = random_weights(QWEN3), random_tokens(1, 8)
    slots = 8
    cache = KVCache.create(QWEN3, 1, slots)
    cache = forward(params, tokens[:, :4], cache, config=QWEN3).cache.commit(jnp.array([4]))
    siblings = forward(
        params, tokens[:, 4:6], cache, config=QWEN3, window_mask=jnp.eye(2, dtype=bool)[None]
    ).hidden
    for i in range(2):
        alone = forward(params, tokens[:, 4 + i : 5 + i], cache, config=QWEN3).hidden
        np.testing.assert_allclose(siblings[:, i : i + 1], alone, atol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)
def test_a_block_whose_tokens_see_each_other_stands_at_the_positions_that_are_given(config):
    """With a cache and without; the order in which the block is fed does not matter."""
    params, tokens = random_weights(config), random_tokens(3, 8)
    lengths, order = np.array([5, 2, 3]), np.array([2, 0, 1])
    cache = KVCache.create(config, 3, 9)
    cache = forward(params, tokens[:, :5], cache, config=config).cache.commit(lengths)
    block, positions = tokens[:, 5:], lengths[:, None] + np.arange(3)
    block_mask = jnp.ones((1, 3, 3), bool)

    def run(block, **where):
        return forward(params, block, cache, config=config, window_mask=block_mask, **where).hidden

    hidden = np.asarray(run(block, positions=positions))
    for b, n in enumerate(lengths):
        mask = np.tril(np.ones((n + 3, n + 3), bool))
        mask[n:, n:] = True
        line = np.concatenate([tokens[b, :n], block[b]])[None]
        at = np.arange(n + 3)[None]
        alone = forward(params, line, config=config, window_mask=mask[None], positions=at).hidden
        np.testing.assert_allclose(hidden[b], alone[0, n:], atol=2e-5)
    turned = run(block[:, order], positions=positions[:, order])
    np.testing.assert_allclose(turned, hidden[:, order], atol=2e-5)
    assert np.abs(run(block) - hidden).max() > 1e-2  # what the mask alone would say


def numpy_frequencies(rope, head_dim):
    """The published formulas, one dimension at a time, in float64."""
    freq, factor = [], 1.0
    for j in range(head_dim // 2):
        w = rope.rope_theta ** (-2 * j / head_dim)
        turns = (rope.original_max_position_embeddings or 0) * w / (2 * np.pi)
        if rope.rope_type == "linear":
            w /= rope.factor
        elif rope.rope_type == "llama3":
            if turns < rope.low_freq_factor:
                w /= rope.factor
            elif turns < rope.high_freq_factor:
                share = (turns - rope.low_freq_factor) / (
                    rope.high_freq_factor - rope.low_freq_factor
                )
                w = w * share + w / rope.factor * (1 - share)
        elif rope.rope_type == "yarn":
            ends = []
            for rotations in (rope.beta_fast, rope.beta_slow):
                # Solves original * theta ** (-2 d / head_dim) = 2 pi rotations for d.
                ratio = rope.original_max_position_embeddings / (2 * np.pi * rotations)
                ends.append(head_dim / 2 * np.log(ratio) / np.log(rope.rope_theta))
            low, high = ends
            if rope.truncate:
                low, high = np.floor(low), np.ceil(high)
            low, high = max(low, 0), min(high, head_dim - 1)
            share = min(max((j - low) / (high - low), 0), 1)
            w = w * (1 - share) + w / rope.factor * share
        freq.append(w)
    if rope.rope_type == "yarn":
        scale = lambda m: 0.1 * m * np.log(max(rope.factor, 1)) + 1
        factor = scale(1)
        if rope.mscale and rope.mscale_all_dim:
            factor = scale(rope.mscale) / scale(rope.mscale_all_dim)
        factor = factor if rope.attention_factor is None else rope.attention_factor
    return np.array(freq), factor


LONG = dict(factor=8.0, original_max_position_embeddings=4096)


ROPES = [
    RopeConfig(),
    RopeConfig(rope_theta=5e5),
    RopeConfig("linear", factor=3.0),
    RopeConfig("llama3", rope_theta=5e5, **LONG),
    RopeConfig("llama3", low_freq_factor=2.0, high_freq_factor=32.0, **LONG),
    RopeConfig("yarn", **LONG),
    RopeConfig("yarn", rope_theta=1e6, beta_fast=16.0, beta_slow=2.0, **LONG),
    RopeConfig("yarn", truncate=False, **LONG),
    RopeConfig("yarn", attention_factor=0.7, **LONG),
    RopeConfig("yarn", mscale=0.8, mscale_all_dim=1.3, **LONG),
    RopeConfig("yarn", factor=1.0, original_max_position_embeddings=4096),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda r: r.rope_type)
def test_rotary_frequencies_equal_the_published_formulas(rope):
    freq, factor = rope_frequencies(rope, 32)
    expected, expected_factor = numpy_frequencies(rope, 32)
    np.testing.assert_allclose(freq, expected, rtol=3e-6)
    assert float(factor) == pytest.approx(expected_factor, rel=1e-6)
    plain = rope.rope_theta ** -(np.arange(16) / 16)
    is_plain = rope.rope_type == "default" or rope.factor == 1
    assert np.allclose(expected, plain) is is_plain  # the case tries what it names


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


INVALID_CONFIGS = [
    (dict(model_type="gpt2"), "gpt2"),
    (dict(num_key_value_heads=3), "num_key_value_heads 3"),
    (dict(num_key_value_heads=0), "num_key_value_heads is 0"),
    (dict(num_attention_heads=3, num_key_value_heads=3), "hidden_size 16"),
    (dict(head_dim=5), "head_dim 5"),
    (dict(vocab_size=0), "vocab_size is 0"),
    (dict(num_hidden_layers=1.5), "num_hidden_layers is 1.5"),
]


@pytest.mark.parametrize(
    ("wrong", "named"), INVALID_CONFIGS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_an_impossible_model_shape_is_an_error_that_names_the_field(wrong, named):
    with pytest.raises(ConfigError, match=named):
        ModelConfig(**{**TINY, "num_attention_heads": 4, **wrong})


@pytest.mark.parametrize("rope_type", ["llama3", "yarn"])
def test_scaled_rotary_embedding_needs_its_original_length(rope_type):
    with pytest.raises(ConfigError, match="original_max_position_embeddings"):
        RopeConfig(rope_type, factor=2.0)


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


def test_a_tap_that_the_model_does_not_have_is_an_error_that_names_it():
    with pytest.raises(ConfigError, match=r"taps \[-1, 4\].*0 to 3"):
        transformer.model(LLAMA, (0, -1, 3, 4))
