"""A smaller language model of the same vocabulary as the draft."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spec_jax.contracts import Context, Drafter, Model
from spec_jax.draft.chain import draft_chain


@functools.cache
def small_lm(model: Model) -> Drafter:
    """Drafts by decoding ``model``, K passes a round.

    Its cache stays one token behind the target's: the first pass of a round feeds the last
    two tokens, so the slot that a fully accepted round leaves empty (its last draft was
    never fed) is filled at no extra pass, and the tokens fed are the same for every row.
    """

    def prefill(params, cache, tokens, lengths, pending, features):
        del pending, features
        return model.forward(params, tokens, cache).cache.commit(lengths - 1)

    def propose(params, cache, context: Context, num_draft: int):
        rows = jnp.arange(context.length.shape[0])
        fed = jnp.stack([context.tokens[rows, context.length + i] for i in (-1, 0)], axis=1)

        def feed(tokens, cache, window_offset):
            with jax.named_scope("draft_pass"):
                output = model.forward(params, tokens, cache, window_offset=window_offset)
                return model.unembed(params, output.hidden[:, -1]), output.cache

        def advance(cache, token, node):
            return feed(token[:, None], cache, node)

        # What rounds without drafts commit is fed all the same, so no backlog arises.
        logits, cache = feed(fed, cache, 0)
        return draft_chain(logits, cache, advance, context, num_draft)

    return Drafter(
        name="standalone",
        vocab_size=model.vocab_size,
        max_length=model.max_length,
        is_sampled=True,
        init=model.init_cache,
        prefill=prefill,
        propose=propose,
        commit=lambda params, cache, tokens, n, features: cache.commit(n),
        insert_row=lambda cache, row, other: cache.insert_row(row, other),
    )
