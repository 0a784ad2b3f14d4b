"""A model with a key-value cache of its own: two layers of attention, learned positions."""

import operator

import flax.struct
import jax
import jax.numpy as jnp

import spec_jax
from spec_jax.contracts import ForwardOutput, Model

VOCABULARY = 48
MAX_LENGTH = 64
LAYERS = 2
WIDTH = 16


def init_params(key):
    sizes = {
        "qkv": (WIDTH, 3 * WIDTH),
        "out": (WIDTH, WIDTH),
        "up": (WIDTH, 64),
        "down": (64, WIDTH),
    }
    sizes = {name: (LAYERS, *size) for name, size in sizes.items()}
    sizes |= {"embed": (VOCABULARY, WIDTH), "position": (MAX_LENGTH, WIDTH)}
    keys = dict(zip(sizes, jax.random.split(key, len(sizes))))
    return {n: jax.random.normal(keys[n], s) / s[-1] ** 0.5 for n, s in sizes.items()}


def layer(params, i, x, attend):
    """One layer; ``attend(q, k, v)`` is what differs with and without a cache."""
    q, k, v = jnp.split(x @ params["qkv"][i], 3, axis=-1)
    x = x + attend(q, k, v) @ params["out"][i]
    return x + jnp.tanh(x @ params["up"][i]) @ params["down"][i]


def attention(q, k, v, sees):
    scores = jnp.einsum("btd,bsd->bts", q, k) / WIDTH**0.5
    weights = jax.nn.softmax(jnp.where(sees, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bts,bsd->btd", weights, v)


def logits(params, tokens):
    """The model as a plain function, f32[B,T,V]; ``spec_jax.wrap`` decodes with no more."""
    T = tokens.shape[1]
    x = params["embed"][tokens] + params["position"][:T]
    for i in range(LAYERS):
        x = layer(params, i, x, lambda q, k, v: attention(q, k, v, jnp.tri(T, dtype=bool)))
    return x @ params["embed"].T


@flax.struct.dataclass
class Cache:
    keys: jax.Array  # f32[L,B,S,D]
    values: jax.Array  # f32[L,B,S,D]
    length: jax.Array  # i32[B], committed tokens: each row has its own

    def commit(self, n, path=None):
        """Keeps n (i32[B]) tokens of the window: the first ones, or those of a tree's path."""
        cache = self
        if path is not None:
            rows = jnp.arange(len(n))[:, None]
            source = self.length[:, None] + path
            front = self.length[:, None] + jnp.arange(path.shape[1], dtype=jnp.int32)

            def move(x):
                return x.at[:, rows, front].set(x[:, rows, source])

            cache = self.replace(keys=move(self.keys), values=move(self.values))
        return cache.replace(length=self.length + n)

    def rewind(self, n):
        return self.replace(length=self.length - n)

    def insert_row(self, row, other):
        return Cache(
            self.keys.at[:, row].set(other.keys[:, 0]),
            self.values.at[:, row].set(other.values[:, 0]),
            self.length.at[row].set(other.length[0]),
        )

    def take_rows(self, rows):  # the batch is not the first axis of every array
        return Cache(self.keys[:, rows], self.values[:, rows], self.length[rows])


def init_cache(params, batch, slots):
    zeros = jnp.zeros((LAYERS, batch, slots, WIDTH))
    return Cache(zeros, zeros, jnp.zeros((batch,), jnp.int32))


def forward(params, tokens, cache, *, window_offset=0, window_mask=None, positions=None, taps=()):
    """Writes T tokens after the committed ones, and does not move ``length``."""
    B, T = tokens.shape
    slots = (cache.length + window_offset)[:, None] + jnp.arange(T, dtype=jnp.int32)
    every = jnp.arange(cache.keys.shape[2], dtype=jnp.int32)
    if window_mask is None:
        sees = every <= slots[:, :, None]  # bool[B,T,S]
    else:  # a tree: all committed slots, of the window those on the path, and its own
        place = every - cache.length[:, None]
        inner = jnp.clip(place, 0, window_mask.shape[2] - 1)[:, None]
        sees = jnp.take_along_axis(window_mask, jnp.broadcast_to(inner, (B, T, len(every))), axis=2)
        sees = sees & (place < window_mask.shape[2])[:, None] | (place < 0)[:, None]
        sees = sees | (every == slots[:, :, None])
    if positions is None:
        positions = sees.sum(axis=2, dtype=jnp.int32) - 1  # in a tree, not the slot
    rows = jnp.arange(B)[:, None]
    keys, values = cache.keys, cache.values
    x = params["embed"][tokens] + params["position"][positions]
    states = []  # that heads may tap
    for i in range(LAYERS):
        states.append(x)

        def attend(q, k, v):
            nonlocal keys, values
            keys = keys.at[i, rows, slots].set(k)
            values = values.at[i, rows, slots].set(v)
            return attention(q, keys[i], values[i], sees)

        x = layer(params, i, x, attend)
    states += [x, x]  # after the last layer, and what unembed reads
    features = jnp.concatenate([states[i] for i in taps], axis=-1) if taps else None
    return ForwardOutput(x, cache.replace(keys=keys, values=values), features)


def unembed(params, hidden):
    return hidden @ params["embed"].T


def make(seed=0):
    model = Model(VOCABULARY, MAX_LENGTH, init_cache, forward, unembed)
    model = model._replace(embedding=operator.itemgetter("embed"), num_layers=LAYERS)  # for heads
    return spec_jax.LoadedModel("my_model", model, init_params(jax.random.key(seed)))
