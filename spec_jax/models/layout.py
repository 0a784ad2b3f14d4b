"""Linear maps cut into panels of columns, for products of few rows on a CPU.

A CPU multiplies a few rows by ``[in, out]`` in tiles a few columns wide, so it walks down the
matrix at a stride of a whole row. Cut into panels ``[P, in, out / P]`` as narrow as a tile, the
same product reads memory in order: up to twice as fast for 2 to 16 rows, which is what a verify
pass feeds. The price is a copy of the rows for each panel, rows / width of the matrix's own size.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

_LARGE = 1 << 18  # elements; a larger matrix is read from memory, a smaller one from a cache
MAX_ROWS = 16  # with more, the copies of the rows outgrow the matrix: leave it whole


def cut(w: jax.Array) -> jax.Array:
    """dtype[in,out], or its panels, as panels dtype[P,in,out/P]; whole where they gain nothing.

    Nothing is gained in bfloat16, nor by large matrices before jax 0.12.
    """
    if w.ndim == 3:
        return w
    is_large = w.size >= _LARGE
    width = next((n for n in ((16,) if is_large else (32, 16)) if w.shape[1] % n == 0), None)
    has_gain = w.dtype == jnp.float32 and (not is_large or jax.__version_info__ >= (0, 12))
    if width is None or not has_gain:
        return w
    return jnp.array(w.reshape(w.shape[0], -1, width).transpose(1, 0, 2))


def join(w: jax.Array) -> jax.Array:
    """The matrix dtype[in,out] of what ``cut`` returned."""
    return w if w.ndim == 2 else w.transpose(1, 0, 2).reshape(w.shape[1], -1)


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """``x @ w``.

    Args:
      x: dtype[...,in].
      w: dtype[in,out], or its panels dtype[P,in,out/P]; with more than ``MAX_ROWS`` rows
        they are put together first, so give such passes the whole matrix.

    Returns:
      dtype[...,out].
    """
    num_rows = math.prod(x.shape[:-1])
    if w.ndim == 2 or num_rows > MAX_ROWS:
        return x @ join(w)
    rows = x.reshape(num_rows, -1)
    if num_rows == 1 and w.size >= _LARGE:
        rows = jnp.repeat(rows, 2, axis=0)  # a product of one row runs on one thread only
    y = jnp.einsum("pti,pio->pto", jnp.broadcast_to(rows, (w.shape[0], *rows.shape)), w)
    y = y.transpose(1, 0, 2).reshape(len(rows), -1)[:num_rows]
    return y.reshape(*x.shape[:-1], -1)
