"""Randomness by name.

Every draw is keyed by what it is for, never by how many were made before it, by the row's
slot or by the batch: by (request, purpose, position) for the match rule and plain decoding,
by (request, purpose, start of the round, node) for every other rule. A request is its seed.
Keys are threefry keys, whose draws do not depend on how they are batched.

A list of samplers that serves more requests than it has entries is used in turns, and each turn
after the first has seeds of its own, see ``turn_seed``.

Drafts are keyed by the request too. If they were keyed by the draft sampler's seed alone, many
requests would share them, and over these requests the output would not have the target's
distribution. So ``draft_seeds`` folds that seed into the request's.

Where drafts, or K, depend on earlier outputs, the noise of the acceptance rule must be independent
of the noise that produced those outputs, even if two requests have the same seed. So everything
that learns counts its updates, and the counts that a row has read so far enter its keys. A round
that reads the state after c updates depends only on rounds that had read fewer than c updates, and
those had other keys. As long as nothing has been learned, the keys are those without learning.
"""

from __future__ import annotations

import enum

import jax
import jax.numpy as jnp


class Purpose(enum.IntEnum):
    """What a draw is for; two purposes never share a key. At most 8: see ``pack``."""

    TARGET = 0  # tokens of plain decoding and of the match rule, by position
    DRAFT = 1
    ACCEPT = 2
    REPLACE = 3  # the token after the accepted drafts, residual or bonus


def pack(purpose: Purpose, node: jax.Array | int | None) -> jax.Array:
    """Returns a distinct word u32[...] for each purpose and node (None, or below 2**28)."""
    number = jnp.uint32(0) if node is None else jnp.asarray(node).astype(jnp.uint32) + 1
    return number * 8 + jnp.uint32(purpose)


def keys(
    seed: jax.Array,
    purpose: Purpose,
    position: jax.Array,
    node: jax.Array | int | None = None,
    update_counts: jax.Array | None = None,
) -> jax.Array:
    """Returns one key a row, by one block of threefry.

    Seed, purpose and node are the words of the block's key and the position its counter, so no
    two names meet in one block.

    Args:
      seed: u32[B], the request.
      purpose: what the draw is for.
      position: i32[B], of the token, or where the round starts.
      node: i32[B] or i32[], of a draw that the round makes for each node; None: there is one.
      update_counts: u32[B,C], updates that the row has read, of each source (see ``Sampler``);
        None if nothing learns.

    Returns:
      key[B].
    """
    words = jnp.stack(jnp.broadcast_arrays(seed, pack(purpose, node)), axis=-1)
    named = jax.random.wrap_key_data(words, impl="threefry2x32")
    row_keys = jax.vmap(jax.random.fold_in)(named, jnp.broadcast_to(position, seed.shape))
    if update_counts is None:
        return row_keys
    return jax.vmap(_fold_in_counts)(row_keys, update_counts)


def _fold_in_counts(key: jax.Array, counts: jax.Array) -> jax.Array:
    """Folds counts u32[C] into a key; counts of zero leave the key unchanged."""
    for source in range(len(counts)):
        number = counts[source] * len(counts) + source  # no two sources share a number
        key = jnp.where(counts[source] > 0, jax.random.fold_in(key, number), key)
    return key


def turn_seed(seed: int, turn: int) -> int:
    """Returns a sampler's seed, in [0, 2**32), with the number of its turn folded in.

    Turns of one seed never meet. Nor do those of several seeds that are less than 1,900,000 apart,
    for 1,000 turns, or 11,000 apart, for 100,000.

    Args:
      seed: the sampler's, in [0, 2**32).
      turn: how often the sampler has been used before; 0 leaves the seed as it is.
    """
    return (seed + turn * 0x9E3779B9) % 2**32  # the golden ratio's: its multiples stay far apart


def draft_seeds(request: jax.Array, draft_seed: jax.Array) -> jax.Array:
    """Returns the seed of each row's drafts, whose sampler may have a seed of its own.

    No two requests with one draft sampler share it. A sampler with the request's own seed does not
    change it.

    Args:
      request: u32[B], the target's seed.
      draft_seed: u32[B], the draft sampler's.

    Returns:
      u32[B].
    """
    # Odd, so that this is one to one in the request for every ``draft_seed``. Also for samplers
    # that differ no two seeds below 30,000 meet, as they may with other odd numbers.
    return draft_seed + (request - draft_seed) * jnp.uint32(0x27D4EB2F)


def gumbel(row_keys: jax.Array, size: int) -> jax.Array:
    """Draws standard Gumbel noise f32[B,size] from key[B]."""
    return jax.vmap(lambda k: jax.random.gumbel(k, (size,), jnp.float32))(row_keys)


def uniform(row_keys: jax.Array, size: int) -> jax.Array:
    """Draws uniforms f32[B,size] in [0, 1) from key[B]."""
    return jax.vmap(lambda k: jax.random.uniform(k, (size,), jnp.float32))(row_keys)
