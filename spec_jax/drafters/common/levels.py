"""Drafts a chain or a tree with the passes of a language model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, ForwardOutput, Proposal
from spec_jax.drafters.common.chain import draft_chain
from spec_jax.drafters.common.tree import draft_tree
from spec_jax.tree import AnyTree


def draft_with(
    forward: Callable[..., ForwardOutput],
    unembed: Callable[[jax.Array], jax.Array],
    cache: Any,
    num_fed: int,
    context: Context,
    num_draft: int,
    tree: AnyTree | None,
) -> tuple[Proposal, Any, jax.Array | None]:
    """Feeds the last tokens of the text, and draws drafts after them: one pass a level.

    Args:
      forward: ``Model.forward`` of some parameters.
      unembed: ``Model.unembed`` of them.
      cache: of all tokens but the last ``num_fed``; room for the window is open.
      num_fed: tokens of the text that the first pass feeds, the pending one included.
      context: what the drafter may read.
      num_draft: K.
      tree: the tree that is drafted; None means a chain.

    Returns:
      The proposal, the cache with all that was fed in its window, and for a tree i32[B,K], see
      ``draft_tree``.
    """

    def feed(tokens, cache, window_offset, **kwargs):
        with jax.named_scope("draft_pass"):
            output = forward(tokens, cache, window_offset=window_offset, **kwargs)
            return output.hidden, output.cache

    def advance(cache, token, node):
        hidden, cache = feed(token[:, None], cache, node + (num_fed - 2))
        return unembed(hidden[:, 0]), cache

    def advance_tree(cache, tokens, parent, seen):
        del parent
        B, W, X = seen.shape
        mask = jnp.concatenate([jnp.ones((B, W, num_fed), bool), seen], axis=2)
        hidden, cache = feed(tokens, cache, num_fed + X - W, window_mask=mask)
        return unembed(hidden), cache

    last = context.length[:, None] + jnp.arange(1 - num_fed, 1)
    hidden, cache = feed(jnp.take_along_axis(context.tokens, last, axis=1), cache, 0)
    logits = unembed(hidden[:, -1])
    if tree is None or num_draft == 0:
        return *draft_chain(logits, cache, advance, context, num_draft), None
    return draft_tree(logits, cache, advance_tree, context, num_draft, tree)
