"""Prompt lookup: copies what followed the same tokens before."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, Drafter, Proposal
from spec_jax.drafters.model_free import model_free
from spec_jax.drafters.registry import DrafterKind, Drafting


def lookup(
    tokens: jax.Array, length: jax.Array, num_draft: int, ngram_max: int, ngram_min: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the last tokens of a row earlier in the row and returns what followed them there.

    The longest suffix of ``ngram_max .. ngram_min`` tokens that occurred before is chosen, and the
    latest of its occurrences.
    Source: prompt lookup decoding (A. Saxena, 2023).

    Args:
      tokens: i32[M], of which the first ``length + 1`` count.
      length: i32[], index of the last one.
      num_draft: K.
      ngram_max: longest suffix tried.
      ngram_min: shortest suffix tried.

    Returns:
      The copied tokens i32[K] and their number i32[]: 0 if nothing matched, fewer than K if the
      copy runs into the end of the row.
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
    """Returns a drafter that copies what ``lookup`` finds in the row's own text."""

    def propose(params, state, context: Context, num_draft: int):
        del params

        def find(tokens, length):
            return lookup(tokens, length, num_draft, ngram_max, ngram_min)

        tokens, n_draft = jax.vmap(find)(context.tokens, context.length)
        return Proposal(tokens, n_draft), state

    return model_free("ngram", propose)


NGRAM = DrafterKind(
    name="ngram",
    drafting=Drafting(
        draft="none",
        drafter=lambda draft, target, config: ngram(config.ngram.max, config.ngram.min),
    ),
)
