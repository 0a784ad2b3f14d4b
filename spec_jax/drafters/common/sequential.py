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

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, Drafter
from spec_jax.drafters.common.chain import Drafted
from spec_jax.drafters.common.head import HeadState, tokens_after
from spec_jax.errors import ConfigError
from spec_jax.models.chunks import over_chunks


class Modules(NamedTuple):
    """Modules as pure functions of ``params``; ``index`` counts modules from 0.

    Attributes:
      name: the name in messages and reports.
      vocab_size: V of the target.
      max_length: maximum tokens of a row; None means unbounded.
      taps: the target's states that the first of them reads, see ``transformer.forward``.
      width: D.
      num_modules: number of modules, and the maximum K.
      init_cache: ``(params, batch, slots) -> Cache``, with a layer a module.
      feed: ``(params, index, state dtype[B,T,D], tokens i32[B,T], cache) -> (dtype[B,T,D],
        cache)``, a pass over the next slots, in which slots before ``index`` are masked.
      recycle: ``(params, index, x dtype[...,D]) -> dtype[...,D]``, the input of the next module.
      unembed: ``(params, index, x dtype[...,D]) -> f32[...,V]``.
    """

    name: str
    vocab_size: int
    max_length: int | None
    taps: tuple[int, ...]
    width: int
    num_modules: int
    init_cache: Callable[..., Any]
    feed: Callable[..., tuple[jax.Array, Any]]
    recycle: Callable[..., jax.Array]
    unembed: Callable[..., jax.Array]


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


def sequential_drafter(modules: Modules) -> Drafter:
    """Returns the drafter of chains of at most as many tokens as there are modules.

    Each draft takes one pass, except the first: the refresh after a round has computed it.
    """
    num_modules = modules.num_modules
    num_kept = max(modules.num_modules - 1, 1)

    def feed(params, index, state, tokens, cache):
        with jax.named_scope("draft_pass"):
            x, cache = modules.feed(params, index, state, tokens, cache)
            return x.astype(state.dtype), cache

    def init(params, batch, slots):
        cache = modules.init_cache(params, batch, slots)
        dtype = jax.tree.leaves(cache)[0].dtype  # of the modules' weights
        # Only a draft reads the state of the last module, unless there is just one module.
        return HeadState(cache, jnp.zeros((batch, num_kept, modules.width), dtype))

    def refresh(params, state, tokens, n, features, path=None):
        """Feeds true tokens to every module and keeps the first n (i32[B]) slots."""
        x = features.astype(state.last.dtype)
        cache = state.cache
        kept = []
        at = jnp.maximum(n - 1, 0)[:, None, None]
        for index in range(num_modules):
            if index > 0:
                before = state.last[:, index - 1 : index]
                x = modules.recycle(params, index - 1, _delayed(before, x))
            x, cache = feed(params, index, x, tokens, cache)
            kept.append(jnp.take_along_axis(x, at, axis=1))
        last = jnp.concatenate(kept[:num_kept], axis=1)
        last = jnp.where((n > 0)[:, None, None], last, state.last)
        return HeadState(cache.commit(n), last)

    def prefill(params, state, tokens, lengths, pending, features, chunk=None):
        after = tokens_after(tokens, lengths, pending)

        def step(state, _, n, *pairs):
            return refresh(params, state, pairs[0], n, pairs[1])

        return over_chunks(step, state, (after, features), lengths, chunk)

    def propose(params, state, context: Context, num_draft: int):
        check_num_draft(num_draft, num_modules)
        drafted = Drafted.none(context, num_draft, modules.vocab_size)
        cache = state.cache
        own = state.last[:, :0]  # of the module at hand, in slots n and on
        x = state.last[:, 0]
        for index in range(num_draft):
            if index > 0:
                read = jnp.concatenate([state.last[:, index - 1 : index], own], axis=1)
                read = modules.recycle(params, index - 1, read)
                own, cache = feed(params, index, read, drafted.out["tokens"][:, :index], cache)
                x = own[:, -1]
            with jax.named_scope("unembed"):
                logits = modules.unembed(params, index, x)
            _, drafted = drafted.add(logits, context, index + 1)
        return drafted.proposal(), state.replace(cache=cache)

    return Drafter(
        name=modules.name,
        vocab_size=modules.vocab_size,
        max_length=modules.max_length,
        is_sampled=True,
        init=init,
        prefill=prefill,
        propose=propose,
        commit=refresh,
        insert_row=HeadState.insert_row,
        taps=modules.taps,
        has_chunks=True,
    )
