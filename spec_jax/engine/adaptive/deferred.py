"""Lets a drafter that reads the target's states skip rounds of K = 0.

The states of the skipped tokens are stored, and the drafter is fed all of them in one pass when it
catches up.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, Drafter, DraftShape, Prompt, Sync


@flax.struct.dataclass
class DeferredState:
    """A drafter's state, and the tokens that it has not been fed yet."""

    state: Any
    features: jax.Array | None = None  # dtype[B,W,E], by skipped token, the oldest first
    count: jax.Array | None = None  # i32[B], how many of them count


def with_room(shape: DraftShape, width: int) -> DraftShape:
    """Returns the shape with room for passes of ``width`` tokens."""
    return shape._replace(scratch_slots=max(shape.scratch_slots, width))


@functools.cache
def with_deferred_commits(drafter: Drafter, width: int) -> Drafter:
    """Returns the drafter with a ``catch_up`` that needs no help of its own.

    Args:
      drafter: a drafter of chains that reads features. Its ``commit`` is then called with up to
        ``width`` tokens.
      width: W, how many tokens may be skipped before it must catch up.
    """

    def prefill(params, deferred, prompt: Prompt):
        B, _, E = prompt.features.shape
        state = drafter.prefill(params, deferred.state, prompt)
        kept = jnp.zeros((B, width, E), prompt.features.dtype)
        return DeferredState(state, kept, jnp.zeros((B,), jnp.int32))

    def propose(params, deferred, context: Context, num_draft: int):
        proposal, state = drafter.propose(params, deferred.state, context, num_draft)
        return proposal, deferred.replace(state=state)

    def commit(params, deferred, tokens, n, features, path):
        state = drafter.commit(params, deferred.state, tokens, n, features, path)
        return deferred.replace(state=state)

    def defer_commit(params, deferred, tokens, n, features, path):
        at = jnp.where(n > 0, deferred.count, width)  # width is out of range: dropped
        kept = deferred.features.at[jnp.arange(len(n)), at].set(features[:, 0], mode="drop")
        return deferred.replace(features=kept, count=deferred.count + n)

    def catch_up(params, deferred, tokens, length, max_width):
        del max_width  # one pass is enough
        after = (length - deferred.count + 1)[:, None] + jnp.arange(width)
        after = jnp.take_along_axis(tokens, after, axis=1, mode="clip")
        state = commit(params, deferred, after, deferred.count, deferred.features, None)
        return state.replace(count=jnp.zeros_like(deferred.count))

    def insert_row(deferred, row, other):
        return DeferredState(
            drafter.insert_row(deferred.state, row, other.state),
            deferred.features.at[row].set(other.features[0]),
            deferred.count.at[row].set(other.count[0]),
        )

    return drafter._replace(
        init=lambda params, batch, slots: DeferredState(drafter.init(params, batch, slots)),
        prefill=prefill,
        propose=propose,
        commit=commit,
        insert_row=insert_row,
        shape=with_room(drafter.shape, width),
        sync=Sync(catch_up, defer_commit, max_lag=width),
    )
