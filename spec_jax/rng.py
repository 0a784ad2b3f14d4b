"""Randomness by name.

Every draw is keyed by what it is for, never by how many were made before it, by the
row's slot or by the batch: (request, stream, position) for the match rule and plain
decoding, (request, stream, the round's start position, node) for every other rule.
A request is its seed. Keys are threefry, the implementation whose draws do not depend
on how they are batched.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp


class Stream(enum.IntEnum):
    """What a draw is for; streams never share a key."""

    TARGET = 0  # tokens of plain decoding and of the match rule, by position
    DRAFT = 1
    ACCEPT = 2
    REPLACE = 3  # the token after the accepted drafts, residual or bonus


def keys(seed: jax.Array, stream: Stream, *indices: jax.Array) -> jax.Array:
    """One key a row.

    Args:
      seed: u32[B], the request.
      stream: what the draw is for.
      *indices: i32[B] each: position, or round start and node.

    Returns:
      key[B].
    """

    def one(seed, *indices):
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), stream)
        for index in indices:
            key = jax.random.fold_in(key, index)
        return key

    return jax.vmap(one)(seed, *(jnp.broadcast_to(i, seed.shape) for i in indices))


def gumbel(row_keys: jax.Array, size: int) -> jax.Array:
    """Standard Gumbel noise f32[B,size] from key[B], one draw a key."""
    return jax.vmap(lambda k: jax.random.gumbel(k, (size,), jnp.float32))(row_keys)


def uniform(row_keys: jax.Array, size: int) -> jax.Array:
    """Uniforms f32[B,size] in [0, 1) from key[B]."""
    return jax.vmap(lambda k: jax.random.uniform(k, (size,), jnp.float32))(row_keys)
