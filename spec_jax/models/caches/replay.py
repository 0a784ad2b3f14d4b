"""Brings a cache up to date by feeding it the tokens that it has missed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.compilation import bounded_jit
from spec_jax.contracts import Cache, Model
from spec_jax.errors import ShapeError
from spec_jax.shapes import check_shapes


@functools.partial(bounded_jit, static_argnames="model")
def _feed(params, tokens, cache, n, *, model: Model):
    return model.forward(params, tokens, cache).cache.commit(n)


def replay(
    model: Model, params: Any, cache: Cache, tokens: jax.Array, n: jax.Array, *, chunk: int = 64
) -> Cache:
    """Feeds each row the tokens that its cache has missed, in passes of ``chunk`` tokens.

    Restoring a snapshot and replaying the tokens since then leaves the state of a fresh prefill.
    So a model can follow a text that another one wrote. The caller ensures that
    ``cache.length + T`` tokens fit into the cache.

    Args:
      model: the model of the cache.
      params: its weights.
      cache: holds ``length`` tokens in each row.
      tokens: i32[B,T], the tokens that follow; any valid id as padding.
      n: i32[B], how many of them count in each row, 0..T.
      chunk: number of tokens in a pass, which bounds the memory of the window.

    Returns:
      The cache with ``length + n`` tokens.

    Raises:
      ShapeError: the number of rows differs, or ``chunk`` is smaller than 1.
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
