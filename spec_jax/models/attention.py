"""Grouped-query attention, over a cache or within whole sequences."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

# ``attend_prefix`` reads one or two eighths of a cache, or all of it: the copy of a longer prefix
# takes more time than its products save. A cache of fewer slots is always read whole.
PREFIXES = (1, 2)
NUM_PARTS = 8
MIN_SLOTS = 512


def attend(
    q_BTNH: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask_BTS: jax.Array,
    *,
    scale: float | None = None,
) -> jax.Array:
    """Attends from T queries over S slots. The softmax is computed in float32.

    Args:
      q_BTNH: dtype[B,T,N,H], queries.
      k: dtype[B,G,S,H] or dtype[B*G,S,H], keys.
      v: values, shaped as ``k`` but of any width. Masked slots must be finite too.
      mask_BTS: bool[B|1,T,S], True where a query sees a slot.
      scale: multiplies the scores; by default 1/sqrt(H).

    Returns:
      dtype[B,T,N*H], where H is the width of the values.
    """
    B, T, N, H = q_BTNH.shape
    *lead, S, _ = k.shape
    G = math.prod(lead) // B
    q = q_BTNH.reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4).reshape(*lead, -1, H)
    scores = jnp.einsum("...mh,...sh->...ms", q, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(B, G, N // G, T, S) * (H**-0.5 if scale is None else scale)
    scores = jnp.where(mask_BTS[:, None, None], scores, -1e30)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype).reshape(*lead, -1, S)
    out = jnp.einsum("...ms,...sh->...mh", weights, v)
    return out.reshape(B, G, N // G, T, -1).transpose(0, 3, 1, 2, 4).reshape(B, T, -1)


def attend_prefix(
    q_BTNH: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask_BTS: jax.Array,
    *,
    scale: float | None = None,
) -> jax.Array:
    """Attends as ``attend`` does, but on a CPU reads only a prefix of the slots.

    The prefix is the shortest of a few that contains every slot seen. It costs a copy of its
    slots, which does not pay for a layer of a stack, which has been copied already, nor on a mesh,
    where a choice by all rows would have to cross it. On other platforms all slots are read and
    nothing is chosen.

    Args and Returns are those of ``attend``.
    """
    S = mask_BTS.shape[2]

    def over(n):
        k_n, v_n, mask = k[..., :n, :], v[..., :n, :], mask_BTS[..., :n]
        return attend(q_BTNH, k_n, v_n, mask, scale=scale)

    if S < MIN_SLOTS or k.ndim == 4:
        return over(S)
    step = -(-S // NUM_PARTS)
    prefixes = [functools.partial(over, n) for n in (*(i * step for i in PREFIXES), S)]
    last = jnp.where(mask_BTS.any(axis=(0, 1)), jnp.arange(S), 0).max()
    choose = lambda: jax.lax.switch(last // step, prefixes)  # beyond the last: the last
    return jax.lax.platform_dependent(cpu=choose, default=prefixes[-1])


def block_size(num_rows: int) -> int:
    """Returns the block size of ``causal_attention``: a quarter of the rows, between 64 and 256.

    Every block is compiled separately. Smaller blocks skip more of the masked scores, but more
    than about four of them cost more seconds of compilation than they save in a step.
    """
    return 64 * min(max(round(num_rows / 256), 1), 4)


def causal_attention(
    q_BTNH: jax.Array,
    k_BGTH: jax.Array,
    v_BGTH: jax.Array,
    *,
    block: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """Attends within whole sequences: every token sees itself and the tokens before it.

    Each block of ``block`` queries is scored against the keys up to the block's end. So half of
    the scores are never computed, and the scores of a block stay in a CPU's caches.

    Args:
      q_BTNH: dtype[B,T,N,H], queries.
      k_BGTH: dtype[B,G,T,H], keys.
      v_BGTH: dtype[B,G,T,H], values, of any width.
      block: number of queries in a block, by default ``block_size``; the last may be shorter.
      scale: multiplies the scores; by default 1/sqrt(H).

    Returns:
      dtype[B,T,N*H], where H is the width of the values.
    """
    T = q_BTNH.shape[1]
    block = block or block_size(T)
    outs = []
    for begin in range(0, T, block):
        end = min(begin + block, T)
        mask = jnp.arange(end) <= jnp.arange(begin, end)[:, None]
        k, v = k_BGTH[:, :, :end], v_BGTH[:, :, :end]
        outs.append(attend(q_BTNH[:, begin:end], k, v, mask[None], scale=scale))
    return jnp.concatenate(outs, axis=1)
