"""Drafts with a head that reads the target's states, by EAGLE's protocol.

Pair t joins the target's state at token t with token t + 1; from it the head predicts token
t + 2. Later drafts continue from the head's own states, and the cache entries that they write
are provisional: after every round the pairs of the accepted tokens are fed again with the target's
true states, and the last of these pairs predicts the next round's first draft.

Source: EAGLE, arXiv 2401.15077, section 4; DeepSeek-V3, arXiv 2412.19437, section 2.2, with
one module for every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, Drafter, DraftShape, Head, Prompt
from spec_jax.drafters.common.chain import draft_chain
from spec_jax.drafters.common.tree import draft_tree
from spec_jax.models.chunks import over_chunks
from spec_jax.tree import AnyTree, DynamicTree


@flax.struct.dataclass
class NoCache:
    """The cache of a head without attention, which keeps nothing."""

    empty: jax.Array  # dtype[B,0], of the head's weights' dtype

    def commit(self, n: jax.Array, path: jax.Array | None = None) -> NoCache:
        del n, path
        return self

    def insert_row(self, row: Any, other: NoCache) -> NoCache:
        del row, other
        return self


@flax.struct.dataclass
class HeadState:
    """The cache, with as many pairs as the target has tokens, and the last states."""

    cache: Any
    last: jax.Array  # dtype[B,D], the pair of the pending token; dtype[B,M,D] by module

    def insert_row(self, row, other: HeadState) -> HeadState:
        """Returns the state with row ``row`` replaced by the only row of ``other``."""
        return HeadState(
            self.cache.insert_row(row, other.cache), self.last.at[row].set(other.last[0])
        )


def feed_pairs(
    head: Head,
    params: Any,
    state: jax.Array,
    tokens: jax.Array,
    cache: Any,
    window_offset: int | jax.Array = 0,
    window_mask: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """Runs ``Head.feed``; the states that it returns have the dtype of those that it is given.

    Args:
      head: the functions of the head.
      params: of its drafter.
      state: dtype[B,T,D], of the pairs.
      tokens: i32[B,T], of the pairs.
      cache: the head's.
      window_offset: slots of the window that earlier passes of the round have filled.
      window_mask: bool[B|1,T,W], what of the window each pair sees; None: itself and those before.
    """
    with jax.named_scope("draft_pass"):
        x, cache = head.feed(params, state, tokens, cache, window_offset, window_mask)
        return x.astype(state.dtype), cache


def prefill_by(refresh: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the ``Drafter.prefill`` that feeds a prompt's pairs as its ``commit`` does.

    Args:
      refresh: the drafter's ``commit``.
    """

    def prefill(params, state, prompt: Prompt):
        def put(row, n, token):
            return row.at[n - 1].set(token)

        after = jnp.roll(prompt.tokens, -1, axis=1)
        after = jax.vmap(put)(after, prompt.lengths, prompt.pending)

        def step(state, _, n, *pairs):
            return refresh(params, state, pairs[0], n, pairs[1])

        pairs = (after, prompt.features)
        return over_chunks(step, state, pairs, prompt.lengths, prompt.chunk)

    return prefill


def head_drafter(head: Head, tree: AnyTree | None = None) -> Drafter:
    """Returns the drafter of a head, which runs one pass a level.

    The first level needs no pass: the refresh at the end of the last round has computed it.

    Args:
      head: the functions of the head.
      tree: the tree that is drafted; None means a chain.
    """

    def unembed(params, x):
        with jax.named_scope("unembed"):
            return head.unembed(params, x)

    def init(params, batch, slots):
        cache = head.init_cache(params, batch, slots)
        dtype = jax.tree.leaves(cache)[0].dtype  # of the head's weights
        return HeadState(cache, jnp.zeros((batch, head.width), dtype))

    def refresh(params, state, tokens, n, features, path=None):
        """Feeds true pairs and commits the first n (i32[B]) of them."""
        del path  # the features are those of the path; what drafting wrote is overwritten
        g = head.join(params, features).astype(state.last.dtype)
        x, cache = feed_pairs(head, params, g, tokens, state.cache)
        at = jnp.maximum(n - 1, 0)[:, None, None]
        last = jnp.take_along_axis(x, at, axis=1)[:, 0]
        last = jnp.where((n > 0)[:, None], last, state.last)
        return HeadState(cache.commit(n), last)

    def propose(params, state, context: Context, num_draft: int):
        opened = state.cache
        if num_draft > 1 and hasattr(opened, "open_window"):
            opened = opened.open_window(num_draft - 1 if tree is None else tree.num_fed)

        def advance(carry, token, node):
            x, cache = carry
            g = head.recycle(params, x)[:, None]
            x, cache = feed_pairs(head, params, g, token[:, None], cache, node - 2)
            return unembed(params, x[:, 0]), (x[:, 0], cache)

        def advance_tree(carry, tokens, parent, seen):
            x, cache = carry
            g = head.recycle(params, jnp.take_along_axis(x, parent[:, :, None], axis=1))
            W, X = seen.shape[1:]
            x, cache = feed_pairs(head, params, g, tokens, cache, X - W, seen)
            return unembed(params, x), (x, cache)

        logits = unembed(params, state.last)
        if tree is None or num_draft == 0:
            carry = (state.last, opened)
            proposal, (_, cache) = draft_chain(logits, carry, advance, context, num_draft)
        else:
            carry = (state.last[:, None], opened)
            proposal, (_, cache), _ = draft_tree(
                logits, carry, advance_tree, context, num_draft, tree
            )
        return proposal, state.replace(cache=cache)

    return Drafter(
        name=head.name,
        vocab_size=head.vocab_size,
        max_length=head.max_length,
        is_sampled=not isinstance(tree, DynamicTree),
        init=init,
        prefill=prefill_by(refresh),
        propose=propose,
        commit=refresh,
        insert_row=HeadState.insert_row,
        shape=DraftShape(head.taps, tree, 0 if tree is None else tree.num_fed),
    )
