"""Prompt lookup: copy what followed the same tokens before."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, Drafter, Proposal


def lookup(
    tokens: jax.Array, length: jax.Array, num_draft: int, ngram_max: int, ngram_min: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the last tokens of a row earlier in it and returns their continuation.

    The longest suffix of ``ngram_max .. ngram_min`` tokens that occurred before wins, and
    of its occurrences the latest.
    Source: prompt lookup decoding (A. Saxena, 2023).

    Args:
      tokens: i32[M], of which the first ``length + 1`` count.
      length: i32[], index of the last one.
      num_draft: K.
      ngram_max: longest suffix tried.
      ngram_min: shortest suffix tried.

    Returns:
      i32[K] copied tokens and i32[], how many of them there are (0 where nothing matched,
      fewer than K where the copy runs into the end of the row).
    """
    M = tokens.shape[0]
    index = jnp.arange(M)  # of the token that follows a match
    matched = jnp.ones((M,), bool)
    size = jnp.zeros((M,), jnp.int32)  # tokens before ``index`` that equal the suffix
    for n in range(1, ngram_max + 1):
        last = jnp.take(tokens, length + 1 - n, mode="clip")
        before = jnp.where(index >= n, jnp.roll(tokens, n), -1)
        matched &= (before == last) & (length + 1 >= n)
        size = jnp.where(matched, n, size)
    score = jnp.where((size >= ngram_min) & (index <= length), size * M + index, -1)
    best = jnp.argmax(score)
    n_draft = jnp.where(score[best] >= 0, jnp.minimum(num_draft, length + 1 - best), 0)
    copied = jnp.take(tokens, best + jnp.arange(num_draft), mode="clip")
    return jnp.where(jnp.arange(num_draft) < n_draft, copied, 0), n_draft.astype(jnp.int32)


@functools.cache
def ngram(ngram_max: int = 3, ngram_min: int = 1) -> Drafter:
    """A drafter without a model. Its proposals are deterministic, its state is empty."""

    def propose(params, state, context: Context, num_draft: int):
        del params
        find = lambda tokens, length: lookup(tokens, length, num_draft, ngram_max, ngram_min)
        tokens, n_draft = jax.vmap(find)(context.tokens, context.length)
        return Proposal(tokens, n_draft), state

    return Drafter(
        name="ngram",
        vocab_size=None,
        max_length=None,
        is_sampled=False,
        init=lambda params, batch, slots: (),
        prefill=lambda params, state, tokens, lengths, pending, features: state,
        propose=propose,
        commit=lambda params, state, tokens, n, features, path: state,
        insert_row=lambda state, row, other: state,
        catch_up=lambda params, state, tokens, length, width: state,
        rewind=lambda state, n: state,
    )


def _nothing(params, state, context: Context, num_draft: int):
    del params
    B = context.length.shape[0]
    return Proposal(jnp.zeros((B, num_draft), jnp.int32), jnp.zeros((B,), jnp.int32)), state


NO_DRAFT = ngram()._replace(name="plain", propose=_nothing)
"""Proposes nothing: with it a round of K = 0 is a step of plain decoding."""


@functools.cache
def resting(drafter: Drafter) -> Drafter:
    """The drafter in rounds of K = 0, over the same state: it proposes nothing.

    One with ``catch_up`` does no work either and falls behind; any other is still told what is
    committed.
    """
    if drafter.catch_up is None:
        return drafter
    return drafter._replace(propose=_nothing, commit=NO_DRAFT.commit)
