"""Bringing a cache up to date: the tokens that were committed since it was last true."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.contracts import Cache, Model
from spec_jax.errors import ShapeError
from spec_jax.shapes import check_shapes


@functools.partial(jax.jit, static_argnames="model")
def _feed(params, tokens, cache, n, *, model: Model):
    return model.forward(params, tokens, cache).cache.commit(n)


def replay(
    model: Model, params: Any, cache: Cache, tokens: jax.Array, n: jax.Array, *, chunk: int = 64
) -> Cache:
    """Feeds each row the tokens that its cache has missed, in passes of ``chunk``.

    A snapshot restored and the tokens since replayed leave the state of a fresh prefill: so a
    draft or a target follows a text that another one has written. The caller keeps
    ``cache.length + T`` within the cache's slots.

    Args:
      model: whose cache it is.
      params: its weights.
      cache: of ``length`` tokens a row.
      tokens: i32[B,T], what stands behind them; any valid id past a row's own.
      n: i32[B], how many count in each row, 0..T.
      chunk: tokens a pass, which bounds the memory of their window.

    Raises:
      ShapeError: another number of rows, or a chunk of no token.
    """
    tokens, n = jnp.asarray(tokens, jnp.int32), jnp.asarray(n, jnp.int32)
    T = check_shapes(length=(cache.length, "B"), tokens=(tokens, "B T"), n=(n, "B"))["T"]
    if chunk < 1:
        raise ShapeError(f"chunk is {chunk}; expected 1 or more tokens a pass")
    for begin in range(0, T, chunk):
        width = min(chunk, T - begin)
        kept = jnp.clip(n - begin, 0, width)
        cache = _feed(params, tokens[:, begin : begin + width], cache, kept, model=model)
    return cache
