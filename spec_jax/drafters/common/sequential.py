"""Drafts with a row of modules, each of which predicts one token further than the last.

Row t of module m (1, 2, ...) joins row t of module m - 1 (of the target, where m is 1) with
token t + m and predicts token t + m + 1. When n tokens are fed and token n is pending, draft j
comes from row n - 1 of module j.

Invariant: module m holds the rows t = 0..n - m, whose inputs are all true. Row t lies in its slot
t + m - 1, so that

  - slot s of every module takes token s + 1, and every module holds n slots: all of them have
    one length and one rollback;
  - slot s of module m reads slot s - 1 of module m - 1. A window's first slot reads the last
    slot before the window, whose state is kept, so module m's refresh begins m - 1 rows before
    the target's new ones;
  - the first m - 1 slots of module m have no row and are masked.

Draft j takes slots n..n + j - 2 of module j, with drafts 1..j - 1; these entries are provisional
and never committed. Rotary positions are the slots, since a shift of a whole module does not
change relative positions.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, Drafter, Head
from spec_jax.drafters.common.chain import Drafted
from spec_jax.drafters.common.head import HeadState, feed_pairs, head_drafter, prefill_by
from spec_jax.errors import ConfigError


def check_num_draft(num_draft: int, num_modules: int) -> None:
    """Raises a ConfigError if there are fewer modules than drafts."""
    if num_draft > num_modules:
        raise ConfigError(
            f"num_draft is {num_draft}, but sequential drafting takes one module a token and "
            f"there are {num_modules}: draft {num_modules} or fewer, or use protocol 'recycled'"
        )


def _delayed(last: jax.Array, x: jax.Array) -> jax.Array:
    """The states that a window's slots read, one slot back: ``last`` dtype[B,1,D], then ``x``."""
    return jnp.concatenate([last, x[:, :-1]], axis=1)


def sequential_drafter(modules: Sequence[Head]) -> Drafter:
    """Returns the drafter of chains of at most as many tokens as there are modules.

    Each draft takes one pass, except the first: the refresh after a round has computed it.

    Args:
      modules: the functions of each. They share the cache that the first of them makes, and
        module i, from 0, feeds its layer i, in which it sees no slot before i.
    """
    first = modules[0]
    num_kept = max(len(modules) - 1, 1)

    def init(params, batch, slots):
        cache = first.init_cache(params, batch, slots)
        dtype = jax.tree.leaves(cache)[0].dtype  # of the modules' weights
        # Only a draft reads the state of the last module, unless there is just one module.
        return HeadState(cache, jnp.zeros((batch, num_kept, first.width), dtype))

    def refresh(params, state, tokens, n, features, path=None):
        """Feeds true tokens to every module and keeps the first n (i32[B]) slots."""
        x = features.astype(state.last.dtype)
        cache = state.cache
        kept = []
        at = jnp.maximum(n - 1, 0)[:, None, None]
        for index, module in enumerate(modules):
            if index > 0:
                before = state.last[:, index - 1 : index]
                x = modules[index - 1].recycle(params, _delayed(before, x))
            x, cache = feed_pairs(module, params, x, tokens, cache)
            kept.append(jnp.take_along_axis(x, at, axis=1))
        last = jnp.concatenate(kept[:num_kept], axis=1)
        last = jnp.where((n > 0)[:, None, None], last, state.last)
        return HeadState(cache.commit(n), last)

    def propose(params, state, context: Context, num_draft: int):
        check_num_draft(num_draft, len(modules))
        drafted = Drafted.none(context, num_draft, first.vocab_size)
        cache = state.cache
        own = state.last[:, :0]  # of the module at hand, in slots n and on
        x = state.last[:, 0]
        for index, module in enumerate(modules[:num_draft]):
            if index > 0:
                read = jnp.concatenate([state.last[:, index - 1 : index], own], axis=1)
                read = modules[index - 1].recycle(params, read)
                tokens = drafted.out["tokens"][:, :index]
                own, cache = feed_pairs(module, params, read, tokens, cache)
                x = own[:, -1]
            with jax.named_scope("unembed"):
                logits = module.unembed(params, x)
            _, drafted = drafted.add(logits, context, index + 1)
        return drafted.proposal(), state.replace(cache=cache)

    return head_drafter(first)._replace(
        init=init, prefill=prefill_by(refresh), propose=propose, commit=refresh
    )
