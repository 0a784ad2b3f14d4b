"""Drafters that read the target's states, in rounds of K = 0: told of them later, all at once."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, Drafter


@flax.struct.dataclass
class DeferredState:
    """A drafter's state, and what it has not been told.

    Attributes:
      state: the drafter's.
      features: dtype[B,W,E], the target's states at the last tokens that it was fed, the oldest
        first.
      count: i32[B], how many of them count.
    """

    state: Any
    features: jax.Array | None = None
    count: jax.Array | None = None


@functools.cache
def with_deferred_commits(drafter: Drafter, width: int) -> Drafter:
    """The drafter, at rest in rounds of K = 0; what these commit is kept for ``catch_up``.

    Args:
      drafter: of chains. Its ``commit`` is then given up to ``width`` tokens.
      width: W, tokens that it can be behind.
    """

    def prefill(params, backlog, tokens, lengths, pending, features):
        B, _, E = features.shape
        state = drafter.prefill(params, backlog.state, tokens, lengths, pending, features)
        kept = jnp.zeros((B, width, E), features.dtype)
        return DeferredState(state, kept, jnp.zeros((B,), jnp.int32))

    def propose(params, backlog, context: Context, num_draft: int):
        proposal, state = drafter.propose(params, backlog.state, context, num_draft)
        return proposal, backlog.replace(state=state)

    def commit(params, backlog, tokens, n, features, path):
        state = drafter.commit(params, backlog.state, tokens, n, features, path)
        return backlog.replace(state=state)

    def defer_commit(params, backlog, tokens, n, features, path):
        at = jnp.where(n > 0, backlog.count, width)  # width is out of range: dropped
        held = backlog.features.at[jnp.arange(len(n)), at].set(features[:, 0], mode="drop")
        return backlog.replace(features=held, count=backlog.count + n)

    def catch_up(params, backlog, tokens, length, at_most):
        del at_most  # one pass is enough
        after = (length - backlog.count + 1)[:, None] + jnp.arange(width)
        after = jnp.take_along_axis(tokens, after, axis=1, mode="clip")
        told = commit(params, backlog, after, backlog.count, backlog.features, None)
        return told.replace(count=jnp.zeros_like(backlog.count))

    def insert_row(backlog, row, other):
        return DeferredState(
            drafter.insert_row(backlog.state, row, other.state),
            backlog.features.at[row].set(other.features[0]),
            backlog.count.at[row].set(other.count[0]),
        )

    return drafter._replace(
        init=lambda params, batch, slots: DeferredState(drafter.init(params, batch, slots)),
        prefill=prefill,
        propose=propose,
        commit=commit,
        insert_row=insert_row,
        window=max(drafter.window, width),
        catch_up=catch_up,
        defer_commit=defer_commit,
        max_lag=width,
        rewind=None,
    )
