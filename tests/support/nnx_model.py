"""A flax.nnx model of another architecture than the package's, and a language that it learns.

Each layer has attention and a feed-forward network side by side, after one LayerNorm; positions are
learned, and the output head has a bias.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import spec_jax

VOCABULARY = 96
LENGTH = 48
WIDTH = 64


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        return x + self.attention(h, mask=mask) + self.down(nnx.gelu(self.up(h)))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.position = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def states(self, tokens):
        x = self.embed(tokens) + self.position(jnp.arange(tokens.shape[1]))
        found = [x]
        for layer in self.layers:
            x = layer(x)
            found.append(x)
        return [*found, self.norm(x)]

    def __call__(self, tokens):
        return self.head(self.states(tokens)[-1])


def as_target(model) -> spec_jax.LoadedModel:
    graph, params = nnx.split(model)

    def of(params):
        return nnx.merge(graph, params)

    parts = spec_jax.Tappable(
        lambda params, tokens: of(params).states(tokens),
        lambda params, hidden: of(params).head(hidden),
        lambda params: of(params).embed.embedding[...],
    )
    return spec_jax.wrap(parts, params, vocab_size=VOCABULARY, max_length=LENGTH, name="nnx")


def texts(seed: int, rows: int) -> np.ndarray:
    """i32[rows,LENGTH]: counting in steps of one of four sizes, now and then from elsewhere."""
    rng = np.random.default_rng(seed)
    steps = np.repeat(rng.choice([1, 5, 7, 11], (rows, LENGTH // 12)), 12, axis=1)
    jumps = rng.integers(0, VOCABULARY, (rows, LENGTH)) * (np.arange(LENGTH) % 12 == 0)
    return (np.cumsum(steps + jumps, axis=1) % VOCABULARY).astype(np.int32)


@functools.cache
def trained(steps: int):
    model = Model(nnx.Rngs(0))
    graph, params = nnx.split(model)
    optimizer = optax.adam(3e-3)

    @jax.jit
    def step(params, state, tokens):
        def loss(params):
            logits = nnx.merge(graph, params)(tokens)[:, :-1]
            found = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return found.mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for number in range(steps):
        params, state = step(params, state, jnp.asarray(texts(number, 32)))
    return nnx.merge(graph, params)
