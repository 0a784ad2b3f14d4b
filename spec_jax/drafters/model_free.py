"""Drafters without a model and without a state."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax.numpy as jnp

from spec_jax.contracts import Context, Drafter, Proposal, Sync


def model_free(name: str, propose: Callable, vocab_size: int | None = None) -> Drafter:
    """Returns a drafter of deterministic proposals whose state is empty.

    Args:
      name: the name in messages and reports.
      propose: ``(params, state, context, num_draft) -> (Proposal, state)``, which reads the text
        from the context.
      vocab_size: V; None for a drafter that copies ids of the text.
    """
    return Drafter(
        name=name,
        vocab_size=vocab_size,
        max_length=None,
        is_sampled=False,
        init=lambda params, batch, slots: (),
        prefill=lambda params, state, prompt: state,
        propose=propose,
        commit=lambda params, state, tokens, n, features, path: state,
        insert_row=lambda state, row, other: state,
        sync=Sync(
            catch_up=lambda params, state, tokens, length, width: state,
            rewind=lambda state, n: state,
        ),
    )


def _nothing(params, state, context: Context, num_draft: int):
    del params
    B = context.length.shape[0]
    return Proposal(jnp.zeros((B, num_draft), jnp.int32), jnp.zeros((B,), jnp.int32)), state


NO_DRAFT = model_free("plain", _nothing)
"""Proposes nothing: with it a round of K = 0 is a step of plain decoding."""


@functools.cache
def without_drafts(drafter: Drafter) -> Drafter:
    """Returns the drafter for rounds of K = 0, which proposes nothing, over the same state.

    A drafter with ``catch_up`` skips these rounds; any other takes part in them.
    """
    if drafter.sync.catch_up is None:
        return drafter
    commit = drafter.sync.defer_commit or NO_DRAFT.commit
    return drafter._replace(propose=_nothing, commit=commit)
