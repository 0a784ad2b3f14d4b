"""A sampled drafter: draws from what followed each token in the row's own text so far."""

import jax
import jax.numpy as jnp

from spec_jax.drafters.common.chain import draft_chain
from spec_jax.drafters.model_free import model_free


def make(target):
    """Returns the drafter for a target; ``--config.drafter=docs.examples.my_drafter:make``."""
    V = target.model.vocab_size
    is_token = jnp.arange(V) <= target.model.last_id  # ids after it only pad the embedding

    def logits_after(text, length, token):
        """f32[V] of one row, whose ``text[length]`` is the pending token: log-counts, smoothed."""
        is_match = (text[:-1] == token) & (jnp.arange(len(text) - 1) < length)
        counts = jnp.zeros(V).at[text[1:]].add(is_match.astype(jnp.float32))
        return jnp.where(is_token, jnp.log(counts + 0.1 / V), -jnp.inf)

    def propose(params, state, context, num_draft):
        text, length = context.tokens, context.length
        after = lambda token: jax.vmap(logits_after)(text, length, token)
        pending = jnp.take_along_axis(text, length[:, None], axis=1)[:, 0]
        advance = lambda carry, token, node: (after(token), carry)
        # draft_chain draws, from context.gumbel where it is given, and states each distribution.
        proposal, _ = draft_chain(after(pending), None, advance, context, num_draft)
        return proposal, state

    return model_free("bigrams", propose, V)._replace(is_sampled=True)
