"""Prompts in chunks: a pass then needs memory for a chunk, however long the prompt is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

CHUNK = 512  # tokens of a row: a chip computes longer than it waits for the weights


def over_chunks(
    step: Callable[..., Any],
    carry: Any,
    arrays: tuple[jax.Array | None, ...],
    lengths: jax.Array,
    chunk: int | None,
) -> Any:
    """Runs a step over chunks of the tokens of a batch, from the first to the last that counts.

    Tokens of one chunk at most are one step, without a loop. What is left after whole chunks is a
    shorter step of its own, so that no window reaches beyond the tokens: slots after them may not
    exist. It is compiled beside the others; a chunk that divides the tokens needs none.

    Args:
      step: ``(carry, begin, n i32[B], *arrays) -> carry``, where the arrays are those of the chunk
        from token ``begin`` on, and the first n tokens of each row count.
      carry: before the first step; a loop needs every step to keep its structure and shapes.
      arrays: dtype[B,T,...], by token; the first one is there, others may be None.
      lengths: i32[B], how many tokens of each row count.
      chunk: tokens of a row in a step, 1 or more; None: all of them.

    Returns:
      The last carry.
    """
    T = arrays[0].shape[1]
    if chunk is None or T <= chunk:
        return step(carry, 0, lengths, *arrays)

    def one(carry, begin, width):
        def cut(x):
            return jax.lax.dynamic_slice_in_dim(x, begin, width, axis=1)

        return step(carry, begin, jnp.clip(lengths - begin, 0, width), *jax.tree.map(cut, arrays))

    count, rest = divmod(T, chunk)
    used = jnp.minimum(count, -(-lengths.max() // chunk))
    carry = jax.lax.fori_loop(0, used, lambda i, carry: one(carry, i * chunk, chunk), carry)
    return one(carry, count * chunk, rest) if rest else carry
