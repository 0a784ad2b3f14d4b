"""Layers with a sliding window: what their caches hold, and that passes over them are exact."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.meshes import mesh
from support.tiny_models import LLAMA, MISTRAL, WINDOWED, loaded, random_weights

from spec_jax.config import SpeculativeConfig
from spec_jax.drafters.common.head import HeadState
from spec_jax.drafters.eagle.model import EagleConfig, eagle
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError, ShapeError
from spec_jax.loading import LoadedModel
from spec_jax.models import transformer
from spec_jax.models.caches.rolling import check_rewind

SLOTS = 64
NUM_TOKENS = 40  # more than four windows
SIZE = MISTRAL.sliding_window
LARGEST = MISTRAL.max_pass
TEXTS = np.random.RandomState(0).randint(0, MISTRAL.vocab_size, (2, NUM_TOKENS))
whole = jax.jit(transformer.logits, static_argnames="config")


@functools.partial(jax.jit, static_argnames="config")
def feed(params, tokens, cache, n, *, config, path=None, **window):
    output = transformer.forward(params, tokens, cache, config=config, **window)
    cache = output.cache.commit(n, path)
    return transformer.unembed(params, output.hidden), cache


def assert_equal(logits, expected):
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def begin(config, rows=2):
    return transformer.init_cache(config, rows, SLOTS)


@pytest.mark.representatives("mistral-12", "qwen3-5")
@pytest.mark.parametrize("chunk", range(1, LARGEST + 1))
@pytest.mark.parametrize("name", WINDOWED)
def test_a_prompt_in_chunks_has_the_logits_of_the_whole(name, chunk):
    config = WINDOWED[name]
    params = random_weights(config)
    expected = whole(params, TEXTS, config=config)
    cache = begin(config)
    text = np.pad(TEXTS, ((0, 0), (0, LARGEST)))
    for at in range(0, NUM_TOKENS, chunk):
        n = jnp.full(2, min(chunk, NUM_TOKENS - at))
        part = jnp.asarray(text[:, at : at + chunk])
        logits, cache = feed(params, part, cache, n, config=config)
        assert_equal(logits[:, : n[0]], expected[:, at : at + chunk])


def test_tokens_out_of_sight_change_nothing_and_the_last_in_sight_does():
    """Through all layers a token sees ``SIZE - 1`` tokens more by each."""
    config = dataclasses.replace(MISTRAL, num_hidden_layers=1)
    params = random_weights(config)
    changed = np.array(TEXTS)
    changed[:, 20] = (changed[:, 20] + 1) % config.vocab_size
    logits, others = (whole(params, text, config=config) for text in (TEXTS, changed))
    differs = np.abs(logits - others).max(axis=(0, 2)) > 1e-6
    np.testing.assert_array_equal(np.flatnonzero(differs), np.arange(20, 20 + SIZE))


# Of a pass of twelve: two paths, of which one skips a node and is longer than the window.
PARENTS = (-1, 0, 0, 2, 3, 4, 5, 6, 7, 8, 9, 10)
PATHS = np.zeros((12, 12), bool)
for node, parent in enumerate(PARENTS):
    PATHS[node] = PATHS[parent] if parent >= 0 else False
    PATHS[node, node] = True


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_what_rejected_drafts_wrote_is_never_seen(name):
    """Rows that keep a few tokens of each pass, of chains and of trees, at every length."""
    config = WINDOWED[name]
    params = random_weights(config)
    draw = np.random.RandomState(1)
    lengths = np.zeros(2, int)
    cache = begin(config)
    expected = np.asarray(whole(params, TEXTS, config=config))
    branch = [np.flatnonzero(PATHS[node]) for node in (1, 11)]
    while lengths.max() < NUM_TOKENS - LARGEST:
        is_tree = draw.rand() < 0.5
        part = draw.randint(0, config.vocab_size, (2, LARGEST))
        places = [branch[draw.randint(2)] if is_tree else np.arange(LARGEST) for _ in lengths]
        kept = np.array([draw.randint(1, min(len(at), 4) + 1) for at in places])
        for row, at in enumerate(places):
            part[row, at] = TEXTS[row, lengths[row] :][: len(at)]
        path = np.stack([np.pad(at, (0, LARGEST - len(at))) for at in places])
        tree = dict(window_mask=PATHS[None], path=jnp.asarray(path)) if is_tree else {}
        logits, cache = feed(
            params, jnp.asarray(part), cache, jnp.asarray(kept), config=config, **tree
        )
        for row, at in enumerate(places):
            assert_equal(logits[row, at], expected[row, lengths[row] :][: len(at)])
        lengths += kept
    np.testing.assert_array_equal(cache.length, lengths)


def test_a_window_that_several_passes_fill_is_seen_as_one():
    params = random_weights(MISTRAL)
    expected = whole(params, TEXTS, config=MISTRAL)
    cache = begin(MISTRAL)
    for at in range(0, 24, 12):
        for offset in range(0, 12, 3):
            part = jnp.asarray(TEXTS[:, at + offset :][:, :3])
            n = jnp.full(2, 12 if offset == 9 else 0)
            logits, cache = feed(
                params, part, cache, n, config=MISTRAL, window_offset=jnp.int32(offset)
            )
            assert_equal(logits, expected[:, at + offset :][:, :3])


def test_a_cache_holds_the_window_and_the_largest_pass_and_no_more():
    def sizes(config, slots):
        cache = jax.eval_shape(lambda: transformer.init_cache(config, 1, slots))
        floats = [x for x in jax.tree.leaves(cache) if x.dtype == jnp.float32]
        return sum(x.size for x in floats) // (2 * config.num_key_value_heads * config.head_dim)

    assert sizes(WINDOWED["mistral"], 1000) == 2 * (SIZE + LARGEST)
    assert sizes(WINDOWED["mistral"], 20) == 2 * 20  # all tokens are fewer
    assert sizes(WINDOWED["qwen3"], 1000) == 2 * (1000 + SIZE + LARGEST)


def test_a_pass_that_would_overwrite_what_it_sees_is_refused():
    params = random_weights(MISTRAL)
    tokens = jnp.zeros((1, LARGEST + 1), jnp.int32)
    with pytest.raises(ShapeError, match=f"13 tokens .* prefill_chunk={LARGEST}"):
        transformer.forward(params, tokens, begin(MISTRAL, 1), config=MISTRAL)
    one = jnp.zeros((1, 1), jnp.int32)
    for offset in (LARGEST, jnp.int32(LARGEST)):
        with pytest.raises(ShapeError, match="13 tokens are fed"):
            transformer.forward(
                params, one, begin(MISTRAL, 1), config=MISTRAL, window_offset=offset
            )
    for config in (MISTRAL, WINDOWED["qwen3"]):  # of passes whose offset is traced
        begin(config).open_window(LARGEST)
        with pytest.raises(ShapeError, match="13 tokens are fed"):
            begin(config).open_window(LARGEST + 1)


def test_a_cache_forgets_committed_tokens_up_to_its_bound():
    """After a pass of which one token is kept, at most ``LARGEST + 1`` of what was fed."""
    params = random_weights(MISTRAL)
    expected = np.asarray(whole(params, TEXTS, config=MISTRAL))
    cache = begin(MISTRAL)
    for at, kept in ((0, 12), (12, 12), (24, 1)):
        part = jnp.asarray(TEXTS[:, at:][:, :LARGEST])
        _, cache = feed(params, part, cache, jnp.full(2, kept), config=MISTRAL)

    def error(n):
        part = jnp.asarray(TEXTS[:, 25 - n :][:, :LARGEST])
        logits, _ = feed(params, part, cache.rewind(jnp.full(2, n)), 0, config=MISTRAL)
        return np.abs(logits - expected[:, 25 - n :][:, :LARGEST]).max()

    unkept = LARGEST - 1
    assert error(LARGEST + 1 - unkept) < 1e-4 < 1e-2 < error(LARGEST + 2 - unkept)
    check_rewind({"draft": cache}, LARGEST + 1)
    with pytest.raises(ConfigError, match="forgets up to 14 tokens"):
        check_rewind({"draft": cache}, LARGEST + 2)


ROUNDS = [
    (MISTRAL, "ngram", dict(num_speculative_tokens=LARGEST), "feed target 13 tokens"),
    (LLAMA, "standalone", dict(num_speculative_tokens=LARGEST), "feed draft 13 tokens"),
    (LLAMA, "standalone", dict(num_speculative_tokens=3, is_adaptive=True), "leave is_adaptive"),
]


@pytest.mark.parametrize(("config", "method", "changes", "words"), ROUNDS)
def test_rounds_that_feed_too_much_are_refused_when_a_decoder_is_built(
    config, method, changes, words
):
    target = loaded(config, "target")
    draft = loaded(MISTRAL, "draft") if config is LLAMA else None
    with pytest.raises(ConfigError, match=words):
        SpeculativeDecoder(target, draft, SpeculativeConfig(method, **changes))


def test_mistral_has_its_window_in_every_layer_whatever_other_keys_say():
    keys = dict(layer_types=["full_attention", "sliding_attention"], use_sliding_window=False)
    assert type(MISTRAL).from_hf(MISTRAL.to_hf() | keys).windows == (SIZE, SIZE)


def test_a_head_opens_a_window_for_all_that_it_drafts():
    layer = dataclasses.replace(MISTRAL, num_hidden_layers=1)
    config = EagleConfig.of_target(LLAMA, 3, layer=layer)
    drafter = eagle(config, transformer.model(LLAMA, config.taps))
    state = HeadState(begin(layer), last=None)
    with pytest.raises(ShapeError, match="13 tokens are fed"):
        drafter.propose(None, state, None, LARGEST + 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("scan_layers", [False, True], ids=["unrolled", "scanned"])
def test_decoding_on_a_mesh_emits_the_plain_tokens(scan_layers):
    """Of prompts in chunks, over several windows; a tensor axis splits the heads of the caches."""
    config = dataclasses.replace(MISTRAL, scan_layers=scan_layers)
    target = LoadedModel("tiny", transformer.model(config), random_weights(config), config=config)
    prompts = [[1, 2, 3], [*range(30)]]
    ngram = SpeculativeConfig("ngram", rejection_sampling_strategy="greedy")
    plain = SpeculativeDecoder(target).generate(prompts, 20)
    split = SpeculativeDecoder(target, config=ngram, prefill_chunk=7, mesh=mesh("data:2,tensor:2"))
    for one, other in zip(split.generate(prompts, 20), plain):
        assert list(one.tokens) == list(other.tokens)
