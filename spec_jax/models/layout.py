"""Layouts of the weights that make decoding faster on a CPU; an accelerator uses none of them.

``by_rows`` is the way in. It keeps two copies of the weights beside the ones that were loaded:

* A tied output head as an array of its own, since a CPU takes twice the time for a product with
  the transposed embedding.
* Linear maps in panels of columns, for passes over few tokens. A CPU multiplies a few rows by
  ``[in, out]`` in tiles a few columns wide, and so walks down the matrix at a stride of a whole
  row. In panels ``[P, in, out / P]`` as narrow as a tile, the same product reads memory in order:
  up to twice as fast for 2 to 16 rows, which is what a verify pass feeds. The price is a copy of
  the rows for each panel, rows / width of the matrix's own size.

``matmul`` takes a matrix in either form, and ``attend_prefix`` reads no more of a cache than a CPU
has to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.models.attention import attend

MAX_ROWS = 16  # with more, the copies of the rows outgrow the matrix: leave it whole
_LARGE = 1 << 18  # elements; a larger matrix is read from memory, a smaller one from a cache
NUM_PREFIXES = 8  # of a cache, among which ``attend_prefix`` chooses
MIN_SLOTS = 512  # a smaller cache is read whole


def by_rows(
    params: dict[str, Any], *, is_tied: bool = False, has_panels: bool = False
) -> Callable[[int | None], dict[str, Any]]:
    """Returns a function from the size of a pass to the parameters in the layout that suits it.

    If the parameters do not lie on one CPU device, that function returns ``params`` itself.
    Otherwise each layout is made when it is first asked for, and kept.

    Args:
      params: nested dict of weights, of a model or of a head.
      is_tied: the output head is the embedding, ``params["embed"]``.
      has_panels: every matrix but the embedding is applied by ``matmul``, so that it may be stored
        in panels.

    Returns:
      ``(num_rows) -> params`` for passes over ``num_rows`` tokens, all rows of the batch
      together. None stands for any number, as in prefill.
    """
    if not _is_on_one_cpu(params):
        return lambda num_rows: params
    whole = functools.cache(lambda: with_own_head(params) if is_tied else params)
    panels = functools.cache(lambda: in_panels(whole()) if has_panels else whole())
    return lambda num_rows: whole() if num_rows is None or num_rows > MAX_ROWS else panels()


def _is_on_one_cpu(params) -> bool:
    arrays = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
    devices = set().union(*(x.devices() for x in arrays))
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)


def with_own_head(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the same weights with a tied head as a separate array, ``[in, out]``.

    Not for training, which would untie it.
    """
    return params if "head" in params else {**params, "head": jnp.array(params["embed"].T)}


def in_panels(params: dict[str, Any]) -> dict[str, Any]:
    """Returns the same weights with every matrix in panels, but embeddings and stacked layers."""

    def panels(path, w):
        is_stacked = path[0].key == "layers" and len(path) == 2
        return w if w.ndim != 2 or is_stacked or path[-1].key == "embed" else to_panels(w)

    return jax.tree.map_with_path(panels, params)


def to_panels(w: jax.Array) -> jax.Array:
    """Returns a matrix dtype[in,out] as panels dtype[P,in,out/P], or whole if they gain nothing.

    They gain nothing in bfloat16, nor for large matrices before jax 0.12.
    """
    if w.ndim == 3:
        return w
    is_large = w.size >= _LARGE
    width = next((n for n in ((16,) if is_large else (32, 16)) if w.shape[1] % n == 0), None)
    has_gain = w.dtype == jnp.float32 and (not is_large or jax.__version_info__ >= (0, 12))
    if width is None or not has_gain:
        return w
    return jnp.array(w.reshape(w.shape[0], -1, width).transpose(1, 0, 2))


def from_panels(w: jax.Array) -> jax.Array:
    """Returns the matrix dtype[in,out] of what ``to_panels`` returned."""
    return w if w.ndim == 2 else w.transpose(1, 0, 2).reshape(w.shape[1], -1)


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """Returns ``x @ w``, whichever layout ``w`` is in.

    Args:
      x: dtype[...,in].
      w: dtype[in,out], or its panels dtype[P,in,out/P]; with more than ``MAX_ROWS`` rows
        they are put together first, so pass the whole matrix there.

    Returns:
      dtype[...,out].
    """
    num_rows = math.prod(x.shape[:-1])
    if w.ndim == 2 or num_rows > MAX_ROWS:
        return x @ from_panels(w)
    rows = x.reshape(num_rows, -1)
    if num_rows == 1 and w.size >= _LARGE:
        rows = jnp.repeat(rows, 2, axis=0)  # a product of one row runs on one thread only
    y = jnp.einsum("pti,pio->pto", jnp.broadcast_to(rows, (w.shape[0], *rows.shape)), w)
    y = y.transpose(1, 0, 2).reshape(len(rows), -1)[:num_rows]
    return y.reshape(*x.shape[:-1], -1)


def attend_prefix(
    q_BTNH: jax.Array, k: jax.Array, v: jax.Array, mask_BTS: jax.Array, *,
    scale: float | None = None,
) -> jax.Array:
    """Attends as ``attend`` does, but on a CPU reads only a prefix of the slots.

    The prefix is the shortest of a few that contains every slot seen. It costs a copy of its
    slots, which pays for several queries but not for one, nor for a layer of a stack, which has
    been copied already, nor on a mesh, where a choice by all rows would have to cross it. On other
    platforms all slots are read and nothing is chosen.

    Args and Returns are those of ``attend``.
    """  # fmt: skip
    T, S = mask_BTS.shape[1:]

    def over(n):
        k_n, v_n, mask = k[..., :n, :], v[..., :n, :], mask_BTS[..., :n]
        return attend(q_BTNH, k_n, v_n, mask, scale=scale)

    if T == 1 or S < MIN_SLOTS or k.ndim == 4:
        return over(S)
    step = -(-S // NUM_PREFIXES)
    prefixes = [functools.partial(over, n) for n in (*range(step, S, step), S)]
    last = jnp.where(mask_BTS.any(axis=(0, 1)), jnp.arange(S), 0).max()
    choose = lambda: jax.lax.switch(last // step, prefixes)
    return jax.lax.platform_dependent(cpu=choose, default=prefixes[-1])
