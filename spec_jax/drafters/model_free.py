"""Drafters without a model: they copy from the text, and keep no state."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp

from spec_jax.contracts import CatchUp, Context, Drafter, Proposal


def model_free(name: str, propose: Callable, vocab_size: int | None = None) -> Drafter:
    """A drafter of deterministic proposals whose state is empty.

    Args:
      name: in messages and reports.
      propose: ``(params, state, context, num_draft) -> (Proposal, state)``; what it reads of the
        text it reads from the context.
      vocab_size: of the ids that it drafts; None: whatever the text has.
    """
    return Drafter(
        name=name,
        vocab_size=vocab_size,
        max_length=None,
        is_sampled=False,
        init=lambda params, batch, slots: (),
        prefill=lambda params, state, tokens, lengths, pending, features: state,
        propose=propose,
        commit=lambda params, state, tokens, n, features, path: state,
        insert_row=lambda state, row, other: state,
        catch_up=CatchUp(lambda params, state, tokens, length, width: state),
        rewind=lambda state, n: state,
    )


def _nothing(params, state, context: Context, num_draft: int):
    del params
    B = context.length.shape[0]
    return Proposal(jnp.zeros((B, num_draft), jnp.int32), jnp.zeros((B,), jnp.int32)), state


NO_DRAFT = model_free("plain", _nothing)
"""Proposes nothing: with it a round of K = 0 is a step of plain decoding."""


@functools.cache
def without_drafts(drafter: Drafter) -> Drafter:
    """The drafter in rounds of K = 0, over the same state: it proposes nothing.

    A drafter with ``catch_up`` skips these rounds; any other takes part in them.
    """
    if drafter.catch_up is None:
        return drafter
    commit = drafter.catch_up.defer_commit or NO_DRAFT.commit
    return drafter._replace(propose=_nothing, commit=commit)
