"""EAGLE heads that begin with a map of least squares, against NumPy's, row by row."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.tiny_heads import CONFIG, TARGET, UNROLLED

from spec_jax.drafters.eagle import model as eagle
from spec_jax.drafters.eagle.start import start_of
from spec_jax.loading import random_head
from spec_jax.models import transformer
from spec_jax.train.objective import Batch, target_view
from spec_jax.train.optimizer import make_optimizer, with_input_scales

W, D = 12, CONFIG.hidden_size
BEGINS = np.minimum(np.arange(W), 5 * (np.arange(W) >= 5))[None].repeat(8, 0)  # documents 0-4, 5-11


@functools.cache
def view_fn(taps):
    return jax.jit(functools.partial(target_view, model=transformer.model(CONFIG), taps=taps))


def batch_of(config, seed):
    tokens = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (8, W)).astype(np.int32)
    begins = jnp.asarray(BEGINS, jnp.int32)
    view = view_fn(config.taps)(TARGET.params, tokens, begins)
    return Batch(tokens, jnp.ones(tokens.shape, bool), jax.random.key(0), view, begins)


@functools.cache
def fitted(config):
    """The head that begins with four batches, these, and the map, from NumPy."""
    params, start = random_head(config, jax.random.key(1)).params, start_of(config)
    params |= {"norm": jnp.linspace(0.5, 2.0, D)} if config.version == 3 else {}
    batches = [batch_of(config, seed) for seed in range(4)]
    add = jax.jit(functools.partial(start.sums, config=config, model=TARGET.model))
    sums = [add(params, batch, TARGET.params) for batch in batches]
    weights = jax.jit(functools.partial(start.weights, config=config))
    head = weights(params, jax.tree.map(lambda *x: sum(x), *sums))
    norm = np.asarray(params.get("norm", 1.0), float)
    embed = np.asarray(TARGET.params["embed"], float)
    X, Y = [], []
    for batch in batches:
        for row in range(8):
            for t in (0, 1, 2, 5, 6, 7, 8, 9):  # with the two tokens after it in its document
                e = embed[batch.tokens[row, t + 1]]
                x = np.asarray(batch.view.features[row, t], float)
                if config.version == 1:
                    X.append(np.concatenate([e, x]))
                else:
                    unit = np.sqrt(np.mean(e**2) + config.layer.rms_norm_eps)
                    X.append(np.concatenate([x, e / unit]))
                Y.append(np.asarray(batch.view.hidden[row, t + 1], float) / norm)
    X, Y = np.array(X), np.array(Y)
    ridge = np.diag(np.sqrt(0.01 * (X**2).sum(0)))
    known = np.concatenate([X, ridge]), np.concatenate([Y, np.zeros((len(ridge), D))])
    assert int(sum(one.count for one in sums)) == len(X)
    return params, head, batches, sums, X, np.linalg.lstsq(*known)[0]


@functools.partial(jax.jit, static_argnames=("config", "is_alone"))
def states(head, features, tokens, config, is_alone=True):
    """dtype[B,T,D], what a head computes of pairs, each by itself or with those before it."""
    T = W - 2
    state = eagle.join_features(head, features[:, :T], config)
    tokens = tokens[:, 1 : 1 + T]
    if is_alone:
        state, tokens = state.reshape(-1, 1, D), tokens.reshape(-1, 1)
    x, _ = eagle.forward(head, TARGET.params["embed"], state, tokens, None, config=config)
    return x.reshape(-1, T, D)


def pairs(batches, config, head):
    kept = [0, 1, 2, 5, 6, 7, 8, 9]
    found = [states(head, b.view.features, b.tokens, config) for b in batches]
    return np.concatenate(found)[:, kept].reshape(-1, D)


def test_a_head_of_version_1_begins_as_the_best_linear_map():
    config = UNROLLED["eagle-1"]
    _, head, batches, _, X, best = fitted(config)
    np.testing.assert_allclose(pairs(batches, config, head), X @ best, atol=2e-4)


def wide():
    """A head with as many values as the embedding has channels: nothing of the map is lost."""
    config = UNROLLED["eagle-3"]
    H = D // config.layer.num_key_value_heads
    layer = dataclasses.replace(config.layer, head_dim=H)
    return dataclasses.replace(config, layer=layer)


def test_a_head_of_version_3_begins_as_the_best_linear_map():
    config = wide()
    params, head, batches, sums, X, best = fitted(config)
    np.testing.assert_allclose(pairs(batches, config, head), X @ best, atol=2e-4)
    size = np.sqrt(np.mean((X @ best) ** 2))
    np.testing.assert_allclose(head["norm"], params["norm"] * size, rtol=1e-4)
    sizes = start_of(config).scales(sums[0], config=config)["fc"]
    means = np.abs(X[:64, :-D]).mean(0).reshape(-1, D).mean(1)
    np.testing.assert_allclose(sizes[:, 0], np.repeat(means, D), rtol=1e-5)


def test_fewer_values_hold_the_part_of_the_embedding_that_varies_most():
    layer = dataclasses.replace(wide().layer, head_dim=2)
    config = dataclasses.replace(wide(), layer=layer)
    rank = layer.num_key_value_heads * 2
    _, head, batches, _, X, best = fitted(config)
    part = X[:, -D:] @ best[-D:]
    U, S, V = np.linalg.svd(part)
    kept = (U[:, :rank] * S[:rank]) @ V[:rank]  # the best of this rank, Eckart and Young 1936
    found = pairs(batches, config, head) - X[:, :-D] @ best[:-D]
    np.testing.assert_allclose(found, kept, atol=1e-3)


def test_a_pair_attends_to_itself():
    config = wide()
    _, head, batches, *_ = fitted(config)
    given = batches[0].view.features, batches[0].tokens, config
    alone = states(head, *given)

    def error(head):
        return np.mean((states(head, *given, is_alone=False) - alone) ** 2)

    assert error(head) < 0.3 * error(head | {"q": jnp.zeros_like(head["q"])})


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_updates_with_input_scales_are_those_of_divided_inputs(name):
    """Oracle: the map of inputs that are divided, trained by the optimizer alone."""
    rates = dict(steps=9, warmup=2, decay_share=0.5, lr=0.03, matrix_lr=0.1)
    inner = make_optimizer(name, **rates, weight_decay=0.1, clip=0.5)
    optimizer = with_input_scales(inner, ["fc"])
    x = jax.random.normal(jax.random.key(0), (32, 6)) * jnp.array([1.0, 900, 3, 0.1, 1, 20])
    y = jax.random.normal(jax.random.key(1), (32, 4))
    scale = jnp.abs(x).mean(axis=0)[:, None]
    params = {"fc": jax.random.normal(jax.random.key(2), (6, 4)) / scale, "other": jnp.ones(4)}

    def loss(params, x):
        return jnp.mean((x @ params["fc"] * params["other"] - y) ** 2)

    divided = params | {"fc": params["fc"] * scale}
    state = optimizer.init(params)._replace(input_scales={"fc": scale})

    @functools.partial(jax.jit, static_argnames="update")
    def step(params, state, x, update):
        updates, state = update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    known = inner.init(divided)
    for _ in range(9):
        params, state = step(params, state, x, optimizer.update)
        divided, known = step(divided, known, x / scale.T, inner.update)
    np.testing.assert_allclose(params["fc"] * scale, divided["fc"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(params["other"], divided["other"], rtol=1e-4)
