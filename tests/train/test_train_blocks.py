"""Objectives of block drafters: they score what is drafted, from the tokens before it alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_heads import BLOCKS, CONFIG, SIZE, TARGET, random_params

from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context, Prompt
from spec_jax.drafters.block import config as block
from spec_jax.drafters.block import objective
from spec_jax.drafters.block.model import block_drafter
from spec_jax.drafters.block.objective import block_loss
from spec_jax.drafters.block.steps import confidence_logits, pair_scores
from spec_jax.errors import ConfigError
from spec_jax.sampling import make_sampler
from spec_jax.train import blocks
from spec_jax.train.blocks import Blocks
from spec_jax.train.objective import Batch, View, target_view

W = 20
LOSS = {
    "dspark": dict(text_weight=0.1, l1_weight=0.9, confidence_weight=1.0),
    "dflash2": dict(base_weight=1.0),
}
TEXT = jnp.asarray(np.random.default_rng(5).integers(0, 31, (2, W)), jnp.int32)


def head_of(name):
    return random_params(BLOCKS[name], name)


@functools.cache
def view(name):
    return target_view(TARGET.params, TEXT, model=TARGET.model, taps=BLOCKS[name].taps)


def batch_of(name, mask=None, key=0):
    mask = jnp.ones(TEXT.shape, bool) if mask is None else mask
    return Batch(TEXT, mask, jax.random.key(key), view(name))


def loss_of(name, **options):
    config = BLOCKS[name]
    return functools.partial(
        block_loss, config=config, model=TARGET.model, **{**LOSS.get(name, {}), **options}
    )


@pytest.mark.representatives("dspark")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_scored_as_it_is_drafted(name):
    """Logits at an anchor, teacher-forced, against ``propose`` after a prefill of the tokens before
    it, whose drafts are forced to be the text's."""
    config, head = BLOCKS[name], head_of(name)
    K, params = config.max_draft, {"head": head, "target": TARGET.params}
    features, anchors = view(name).features[:1], np.asarray([1, 2, 5, 6, 11, W - 1 - K])
    B, tokens = len(anchors), jnp.tile(TEXT[:1], (len(anchors), 1))

    @jax.jit
    def proposed():
        drafter = block_drafter(config, TARGET.model)
        state = drafter.init(params, B, W + config.block_size)
        n, every = jnp.asarray(anchors), jnp.repeat(features, B, axis=0)
        state = drafter.prefill(params, state, Prompt(tokens, n, tokens[:, 0], every))
        sampler = make_sampler(SamplerConfig(temperature=1.0), B, CONFIG.vocab_size)
        text = jnp.take_along_axis(tokens, n[:, None] + 1 + jnp.arange(K), axis=1)
        forced = 1e6 * jax.nn.one_hot(text, CONFIG.vocab_size)
        context = Context(
            tokens, n, sampler, jnp.zeros(B, jnp.uint32), False, True, True, gumbel=forced
        )
        return drafter.propose(params, state, context, K)[0].logits

    @jax.jit
    def scored():
        places = jnp.asarray(anchors)[None]
        context = objective.context_keys(head, features, config)
        x = objective.states_at(params, TEXT[:1], places, context, config, TARGET.model)
        before = TEXT[0][places.T + jnp.arange(K)][None]
        return objective.scores_at(params, x, before, config, TARGET.model)[1][0]

    expected = proposed()
    assert np.ptp(expected) > 1
    np.testing.assert_allclose(scored(), expected, atol=2e-5)


def test_dflash2_has_no_cross_entropy_of_the_whole_distribution():
    loss = loss_of("dflash2", target_weight=0.5)
    with pytest.raises(ConfigError, match="target_weight is 0.5; expected 0"):
        loss(head_of("dflash2"), batch_of("dflash2"), TARGET.params)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [None, 3, 6])
def test_attention_is_that_of_one_explicit_mask(size, is_causal):
    """Values and gradients, of blocks that overlap, over the keys of the window and all blocks."""
    S, anchors = 4, np.asarray([[1, 3, 4, 9], [0, 2, 8, 9]])
    (B, A), G, H, T = anchors.shape, 2, 4, 10
    config = block.DFlashConfig.of_target(
        CONFIG, 1, windows=(size,), is_causal=(is_causal,), **SIZE
    )
    arrays = jax.random.normal(jax.random.key(0), (6, B, 2 * G, A * S + T, H))
    q, by_out = arrays[0][:, :, : A * S].transpose(0, 2, 1, 3), arrays[1][:, :, : A * S]
    k, v = (x[:, :G, : A * S] for x in arrays[2:4])
    context = tuple(x[:, :G, :T] for x in arrays[4:])
    inside = (anchors[:, :, None] + np.arange(S)).reshape(B, -1)
    position = np.concatenate([np.tile(np.arange(T), (B, 1)), inside], axis=1)
    owner = np.concatenate([np.full(T, -1), np.repeat(np.arange(A), S)])
    mask = np.zeros((B, A * S, T + A * S), bool)
    for b, i, j in np.ndindex(mask.shape):
        mine, at, key = owner[T + i], position[b, T + i], position[b, j]
        is_before = owner[j] < 0 and key < anchors[b, mine]
        mask[b, i, j] = is_before or (owner[j] == mine and (key <= at or not is_causal))
        mask[b, i, j] &= size is None or abs(at - key) < size

    def ours(q, k, v, context):
        return Blocks((context,), jnp.asarray(anchors), config).attend(q, k, v, 0, None)[0]

    def defined(q, k, v, context):
        keys, values = (jnp.concatenate([c, x], 2).repeat(2, 1) for c, x in zip(context, (k, v)))
        scores = jnp.einsum("btnh,bnsh->bnts", q, keys) / H**0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf))
        return jnp.einsum("bnts,bnsh->btnh", weights, values).reshape(B, A * S, -1)

    @functools.partial(jax.jit, static_argnums=0)
    def both(attend):
        pull = lambda *x: (attend(*x) * by_out.transpose(0, 2, 1, 3).reshape(B, A * S, -1)).sum()
        return attend(q, k, v, context), jax.grad(pull, argnums=(0, 1, 2, 3))(q, k, v, context)

    close = functools.partial(np.testing.assert_allclose, atol=1e-5)
    jax.tree.map(close, both(ours), both(defined))


@pytest.mark.exhaustive
def test_chunks_of_blocks_are_one_sum(monkeypatch):
    """Losses, figures and gradients, whatever is computed together or again."""
    name = "dspark"
    mask = jnp.asarray(np.random.default_rng(1).random(TEXT.shape) < 0.8)

    def run(num_scores, **options):
        monkeypatch.setattr(blocks, "_SCORES", num_scores)
        loss = loss_of(name, num_anchors=7, **options)
        graded = jax.value_and_grad(loss, has_aux=True)
        return jax.jit(graded)(head_of(name), batch_of(name, mask), TARGET.params)

    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    of_a_block = 2 * 4 * CONFIG.num_attention_heads * (W + 4)
    jax.tree.map(close, run(3 * of_a_block), run(1 << 26, is_remat=True))


def test_a_loss_is_the_weighted_mean_over_drafts_that_count():
    """With its figures, by loops: of two turns, of blocks past the end, of a row without any."""
    name, K = "dspark", 4
    config, head, mask = BLOCKS[name], head_of(name), np.zeros(TEXT.shape, bool)
    mask[0, 3:8] = mask[0, 11:] = True
    batch, params = batch_of(name, jnp.asarray(mask)), {"head": head, "target": TARGET.params}
    run = jax.jit(
        loss_of(name, has_every_anchor=True, decay=0.7, base_weight=0.5, target_weight=0.3)
    )
    loss, figures = run(head, batch, TARGET.params)
    places = [5, 13, 17]  # every fourth, where the answer goes on

    @jax.jit
    def distributions():
        anchors = jnp.asarray([places] * 2)
        context = objective.context_keys(head, batch.view.features, config)
        x = objective.states_at(params, TEXT, anchors, context, config, TARGET.model)
        before = TEXT[:, jnp.asarray(places)[:, None] + jnp.arange(K)]
        base, q = map(jax.nn.softmax, objective.scores_at(params, x, before, config, TARGET.model))
        p = jax.nn.softmax(TARGET.model.unembed(TARGET.params, batch.view.hidden))
        return base, q, p, jax.nn.sigmoid(confidence_logits(head, x, before, config))

    base, q, p, c = (np.asarray(x, np.float64)[0] for x in distributions())
    total = weight = 0.0
    seen = {what: np.zeros(K) for what in ("count", "nats", "hits", "reached", "bias")}
    for j, a in enumerate(places):
        is_chain = True
        for k in range(min(K, W - 1 - a)):
            if not mask[0, a + 1 : a + 2 + k].all():
                break
            token, was = int(TEXT[0, a + 1 + k]), is_chain
            nats, gap = -np.log(q[j, k, token]), np.abs(q[j, k] - p[a + k]).sum()
            accept, belief = 1 - gap / 2, c[j, k]
            entropy = -accept * np.log(belief) - (1 - accept) * np.log(1 - belief)
            crossed = -0.5 * np.log(base[j, k, token]) - 0.3 * (p[a + k] @ np.log(q[j, k]))
            total += 0.7**k * (0.1 * nats + 0.9 * gap + entropy + crossed)
            weight += 0.7**k
            is_chain &= int(q[j, k].argmax()) == token
            for what, value in zip(seen, (1, nats, is_chain, was, belief - accept)):
                seen[what][k] += value
    assert seen["count"].tolist() == [3, 3, 1, 1]
    means = {what: seen[what] / np.maximum(seen["count"], 1) for what in seen}
    np.testing.assert_allclose(loss, total / weight, rtol=1e-5)
    np.testing.assert_allclose(figures["loss_by_step"].value, means["nats"], rtol=1e-5)
    np.testing.assert_allclose(figures["confidence_bias"].value, means["bias"], atol=1e-6)
    np.testing.assert_array_equal(figures["teacher_forced_accept"].total, seen["hits"])
    np.testing.assert_array_equal(figures["teacher_forced_accept"].count, seen["reached"])
    nothing, _ = run(head, batch.replace(mask=jnp.zeros(TEXT.shape, bool)), TARGET.params)
    assert float(nothing) == 0.0


def test_a_label_that_is_no_candidate_takes_the_place_of_the_least_likely_one():
    """Nats among as many tokens as are drafted from, by sorting."""
    config, head = BLOCKS["dflash2"], head_of("dflash2")
    rng, C = np.random.default_rng(4), config.selector_top_k
    base = rng.normal(size=(2, 9, CONFIG.vocab_size)).astype(np.float32)
    x = rng.normal(size=(2, 9, CONFIG.hidden_size)).astype(np.float32)
    before, labels = rng.integers(0, CONFIG.vocab_size, (2, 2, 9))
    nats, is_candidate = objective.candidate_loss(head, base, x, before, labels, config)
    rest = np.arange(CONFIG.vocab_size)[None, None]
    added = pair_scores(head, x, before, np.broadcast_to(rest, base.shape), config)
    assert 0 < is_candidate.sum() < is_candidate.size and np.abs(added).max() > 0.1
    for place in np.ndindex(2, 9):
        likely, label = np.argsort(-base[place])[:C].tolist(), labels[place]
        assert is_candidate[place] == (label in likely)
        chosen = likely if label in likely else [*likely[:-1], label]
        scores = base[place] + np.asarray(added[place])
        expected = np.log(np.exp(scores[chosen]).sum()) - scores[label]
        np.testing.assert_allclose(nats[place], expected, rtol=1e-5)


def test_the_program_of_a_step_grows_neither_with_the_window_nor_with_the_anchors():
    def size(width, num_anchors):
        shape = lambda *dims: jnp.zeros(dims, jnp.float32)
        states = View(shape(1, width, 2 * CONFIG.hidden_size), shape(1, width, CONFIG.hidden_size))
        tokens = jnp.zeros((1, width), jnp.int32)
        batch = Batch(tokens, tokens == 0, jax.random.key(0), states)
        loss = loss_of("dspark", num_anchors=num_anchors)
        graded = jax.grad(lambda p: loss(p, batch, TARGET.params)[0])
        return str(jax.make_jaxpr(graded)(head_of("dspark"))).count(" = ")

    small = size(130, 16)
    assert small == size(4098, 16)
    assert size(4098, 2048) < 1.01 * small  # one loop more
