"""P-EAGLE's objective: it scores what is drafted, and is learned by decoding's own head."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import parallel_heads
from support.parallel_heads import HEADS, IDS, head_of, tensors_of
from support.tiny_models import LLAMA, large_weights

from spec_jax.drafters.eagle.objective import PEAGLE
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.evaluation import teacher_forced
from spec_jax.loading import LoadedHead
from spec_jax.train.objective import Batch, target_view
from spec_jax.train.step import TrainState, train_step

CONFIG = dataclasses.replace(LLAMA, max_position_embeddings=128)
TARGET = large_weights("tiny", CONFIG, 2)
W, K = 20, 4
TEXT = jnp.asarray(np.random.default_rng(5).integers(0, 31, (2, W)), jnp.int32)


def config_of(name):
    return dataclasses.replace(HEADS[name], max_draft=K)


def batch_of(config, tokens, mask, key=0):
    view = target_view(TARGET.params, tokens, config=CONFIG, taps=config.taps)
    return Batch(tokens, mask, jax.random.key(key), view)


def loss_of(config, **options):
    return functools.partial(PEAGLE.loss, config=config, model=TARGET.model, **options)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.representatives("p-eagle")
@pytest.mark.parametrize("name", ["p-eagle", "norm of each state", "norm over all states"])
def test_a_loss_is_the_weighted_mean_over_drafts_of_whole_passes(name):
    """By loops over passes of independent arithmetic, each of true pairs and masks: of two turns,
    of drafts past the end, of a row without any, and of tokens that cannot be drafted."""
    config, mask = config_of(name), np.zeros(TEXT.shape, bool)
    mask[0, 3:8] = mask[0, 11:] = True
    batch = batch_of(config, TEXT, jnp.asarray(mask))
    params, decay, floor = head_of(config).params, 0.6, 0.3
    run = jax.jit(loss_of(config, has_every_anchor=True, decay=decay, floor=floor))
    loss, figures = run(params, batch, TARGET.params)
    exact = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
    tensors, embed, features = exact(
        (tensors_of(config), TARGET.params["embed"], batch.view.features[0])
    )
    ids = np.arange(31) if config.layer.vocab_size == 31 else IDS
    p = softmax(exact(TARGET.model.unembed(TARGET.params, batch.view.hidden[0])))
    text = np.asarray(TEXT[0])
    sums, count = np.zeros(K), np.zeros(K)
    reached, hits = np.zeros(K), np.zeros(K)
    for a in range(1, W - 1):  # the pending token
        q = softmax(parallel_heads.scores(tensors, config, features[:a], text[1 : a + 1], embed, K))
        is_anchor, is_chain = a % K == 1 and mask[0, a] and mask[0, a + 1], True
        for k in range(min(K, W - 1 - a)):
            label, of_target = text[a + 1 + k], p[a + k]
            if not mask[0, a + 1 : a + 2 + k].all() or k and not is_anchor:
                break
            known, rest = of_target.argmax() in ids, of_target[ids] / of_target[ids].sum()
            sums[k] += (rest * np.log(rest / q[k])).sum() if known else 0.0
            count[k] += 1
            if is_anchor:
                reached[k] += is_chain
                is_chain &= ids[q[k].argmax()] == label
                hits[k] += is_chain
    assert count.min() > 0 and count[0] > count[1] >= count[3]
    shares = np.maximum(decay ** np.arange(K), floor)
    np.testing.assert_allclose(figures["loss_by_step"], sums / count, rtol=1e-4)
    np.testing.assert_allclose(loss, (shares * sums / count).sum() / shares.sum(), rtol=1e-4)
    np.testing.assert_array_equal(figures["reached"], reached)
    np.testing.assert_array_equal(figures["hits"], hits)
    nothing, _ = run(params, batch.replace(mask=jnp.zeros(TEXT.shape, bool)), TARGET.params)
    assert float(nothing) == 0.0


PROMPTS = [np.random.default_rng(n).integers(0, 31, n).tolist() for n in (3, 9, 5, 12)]


@functools.cache
def trained(steps):
    """A head after some steps on what the target writes itself, and the losses."""
    config = config_of("one layer")
    rows = SpeculativeDecoder(TARGET).generate(PROMPTS, 40)
    text = jnp.asarray([[*prompt, *row.tokens][:43] for prompt, row in zip(PROMPTS, rows)])
    head, optimizer = head_of(config).params, optax.adam(1e-2)
    params, constants = PEAGLE.split(head)
    loss = PEAGLE.bind(config, TARGET.model, {"num_anchors": 16}, constants)
    step = jax.jit(functools.partial(train_step, objective=loss, optimizer=optimizer))
    state, losses = TrainState.create(params, optimizer), []
    for i in range(steps):
        state, metrics = step(state, batch_of(config, text, text >= 0, i), TARGET.params)
        losses.append(float(metrics["loss"]))
    return LoadedHead("trained", config, {**state.params, **constants}), losses


@pytest.mark.exhaustive
def test_teacher_forced_rounds_of_a_trained_head_are_the_decoders():
    """Drafts reached and accepted, by position, though one side never decodes and the other never
    reads a true token after a round's start; every count of accepted drafts occurs."""
    head, losses = trained(150)
    assert losses[-1] < 0.5 * losses[0] and teacher_forced.has_drafts(TARGET, head)
    rows, stats = teacher_forced.decode(
        TARGET, head, PROMPTS, num_draft=K, max_new_tokens=40, batch=4
    )
    plain = SpeculativeDecoder(TARGET).generate(PROMPTS, 40)
    assert [row.tokens for row in rows] == [row.tokens for row in plain]
    assert min(stats.lengths) > 0
    reached, accepted = teacher_forced.unrolled(TARGET, head, PROMPTS, rows, num_draft=K)
    assert tuple(reached) == stats.reached_at and tuple(accepted) == stats.accepted_at
