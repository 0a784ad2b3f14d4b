"""Heads for targets that are none of the package's families: custom models, wrapped functions."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.nnx_model import LENGTH, VOCABULARY, as_target, texts, trained

import spec_jax
from docs.examples import my_loop, my_model
from spec_jax.data.batches import Corpus
from spec_jax.errors import ConfigError, ShapeError
from spec_jax.train.objective import target_view

PROMPT = [3, 1, 4]


def states(params, tokens):
    """``my_model`` without a cache, in parts."""
    T = tokens.shape[1]
    x = params["embed"][tokens] + params["position"][:T]
    found = [x]
    for i in range(my_model.LAYERS):
        seen = jnp.tri(T, dtype=bool)
        x = my_model.layer(params, i, x, lambda q, k, v: my_model.attention(q, k, v, seen))
        found.append(x)
    return [*found, x]


def wrapped():
    parts = spec_jax.Tappable(states, my_model.unembed, lambda params: params["embed"])
    own = my_model.make()
    return spec_jax.wrap(parts, own.params, vocab_size=48, max_length=my_model.MAX_LENGTH)


@functools.cache
def plain():
    return spec_jax.SpeculativeDecoder(my_model.make()).generate(PROMPT, 16).tokens


OBJECTIVES = ("eagle3", "peagle", "mtp", "dspark")  # one of each way to read a target
SMALL = {"dspark": {"markov_rank": 4}}


@pytest.mark.parametrize("name", [*OBJECTIVES, "wrapped eagle3"])
@pytest.mark.representatives("eagle3")
def test_a_head_drafts_for_a_custom_target_and_changes_no_token(name):
    target = wrapped() if "wrapped" in name else my_model.make()
    name = name.removeprefix("wrapped ")
    head = spec_jax.new_head(target, name, **SMALL.get(name, {}))
    config = spec_jax.SpeculativeConfig(head.method, 2)
    decoder = spec_jax.SpeculativeDecoder(target, head, config)
    assert decoder.generate(PROMPT, 16).tokens == plain()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.representatives("eagle3")
def test_a_head_for_a_custom_target_is_saved_and_loaded(name, tmp_path):
    target = my_model.make()
    head = spec_jax.new_head(target, name, **SMALL.get(name, {}))
    head.save(tmp_path, target)
    loaded = spec_jax.load_draft(tmp_path, target)
    assert loaded.config == head.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, head.params)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_head_is_trained_on_a_custom_target(name):
    target = my_model.make()
    head = spec_jax.new_head(target, name, **SMALL.get(name, {}))
    text = np.random.default_rng(0).integers(0, 48, (4, 24))
    fitted = spec_jax.fit_head(target, head, text, steps=2, batch=2, length=24)
    assert np.isfinite(fitted.log[-1]["loss"])


def test_states_with_a_cache_are_those_without():
    tokens = jnp.asarray([[3, 1, 4, 1, 5]])
    views = [
        target_view(one.params, tokens, model=one.model, taps=(0, 1, 3))
        for one in (my_model.make(), wrapped())
    ]
    for ours, theirs in zip(*map(jax.tree.leaves, views)):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_fresh_head_begins_with_embedding_and_output_head():
    target = my_model.make()
    head = spec_jax.new_head(target, "eagle3", np.arange(48), draft_vocab_size=20)
    np.testing.assert_allclose(head.params["head"], target.params["embed"].T[:, :20], atol=1e-6)
    own = spec_jax.new_head(target, "peagle", num_layers=2)
    np.testing.assert_array_equal(own.params["embed"], target.params["embed"])


def test_what_cannot_be_tapped_is_refused_in_one_line():
    own = my_model.make()
    head = spec_jax.new_head(own, "eagle3")
    closed = spec_jax.wrap(my_model.logits, own.params, vocab_size=48, max_length=64)
    with pytest.raises(ConfigError, match="has no embedding, num_layers; a function"):
        spec_jax.new_head(closed, "eagle3")
    with pytest.raises(ConfigError, match="has no embedding"):
        spec_jax.SpeculativeDecoder(closed, head)
    with pytest.raises(ConfigError, match=r"taps \[4\] do not exist: a model of 2 layers has 0 to"):
        spec_jax.SpeculativeDecoder(own, spec_jax.new_head(own, "eagle3", taps=(0, 1, 4)))

    def forward(params, tokens, cache, *, taps=()):
        return my_model.forward(params, tokens, cache)

    bare = dataclasses.replace(own, model=own.model._replace(forward=forward))
    with pytest.raises(ShapeError, match=r"returned features None for taps .*\[B,T,48\]"):
        spec_jax.SpeculativeDecoder(bare, head).generate(PROMPT, 4)


def test_texts_to_train_on_are_arrays_or_iterators_of_them():
    rows = np.arange(12).reshape(3, 4)

    def forever():
        while True:
            yield jnp.asarray(rows[0])

    corpora = [
        Corpus.of_tokens("text", x) for x in (rows.ravel(), rows, iter([rows[:1], rows[1:]]))
    ]
    for corpus in corpora:
        np.testing.assert_array_equal(corpus.tokens, rows.ravel())
    assert corpora[0].starts is None and corpora[2].starts.tolist() == [0, 4, 8, 12]
    assert len(Corpus.of_tokens("text", forever(), 10).tokens) == 12
    for wrong in ("def f(x):", rows.astype(float), 3, [1, 2]):
        with pytest.raises(ConfigError, match=r"text is a .*expected a Corpus, an array i32\[T\]"):
            Corpus.of_tokens("text", wrong)


@pytest.mark.exhaustive
def test_a_loop_of_ones_own_gives_the_same_head_on_a_mesh_and_without():
    target = my_model.make()
    head = spec_jax.new_head(target, "eagle3")
    text = np.random.default_rng(0).integers(0, 48, (2, 4, 16), np.int32)
    heads = [
        my_loop.train(target, head, text, mesh) for mesh in (None, spec_jax.make_mesh("data:2"))
    ]
    for ours, theirs in zip(*(jax.tree.leaves(one.params) for one in heads)):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert not np.allclose(heads[0].params["q"], head.params["q"])
    decoder = spec_jax.SpeculativeDecoder(target, heads[0], spec_jax.SpeculativeConfig("eagle", 2))
    assert decoder.generate(PROMPT, 16).tokens == plain()


@pytest.mark.exhaustive
def test_a_head_that_is_trained_on_an_nnx_model_drafts_better_and_changes_no_token():
    target = as_target(trained(steps=300))
    head = spec_jax.new_head(target, "eagle3")
    prompts = [row[:8].tolist() for row in texts(seed=7, rows=8)]
    expected = [row.tokens for row in spec_jax.SpeculativeDecoder(target).generate(prompts, 24)]

    def tau(head):
        config = spec_jax.SpeculativeConfig("eagle", 3)
        decoder = spec_jax.SpeculativeDecoder(target, head, config)
        assert [row.tokens for row in decoder.generate(prompts, 24)] == expected
        return decoder.stats.tau

    before = tau(head)
    fitted = spec_jax.fit_head(target, head, texts(seed=1, rows=600), 300, batch=16, length=LENGTH)
    after = tau(fitted.head)
    print(f"tau {before:.2f} before training, {after:.2f} after it; {VOCABULARY} ids")
    assert after > before + 0.5


def test_a_tappable_of_too_few_states_is_refused():
    parts = spec_jax.Tappable(
        lambda params, tokens: (params["embed"][tokens],),
        my_model.unembed,
        lambda params: params["embed"],
    )
    with pytest.raises(ConfigError, match="returned 1; expected L . 2 of L layers, 3 or more"):
        spec_jax.wrap(parts, my_model.make().params, vocab_size=48, max_length=64)
