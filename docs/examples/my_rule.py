"""A lossless rule that never asks which distribution a draft was drawn from."""

import jax.numpy as jnp

from spec_jax.contracts import Rule, Verdict
from spec_jax.rules import batched
from spec_jax.sampling import sample


def accept_row(target, proposal, noise):
    """Accepts a draft with the probability that the target gives it: one row of the batch."""
    p, drafts, index = target.probs, proposal.tokens, jnp.arange(len(target.probs))
    coins = jnp.where(proposal.is_offered, p[index[:-1], drafts], 0.0)
    n_accept = jnp.cumprod((noise.uniforms < coins).astype(jnp.int32)).sum()
    padded = jnp.append(drafts, 0)
    is_refused = (jnp.arange(p.shape[1]) == padded[n_accept]) & (n_accept < proposal.n_draft)
    left = jnp.where(is_refused, 0.0, p[n_accept])  # the refused draft is not drawn again
    replacement = left / left.sum()
    own = sample(jnp.log(replacement), noise.gumbel[0])
    tokens = jnp.where(index < n_accept, padded, jnp.where(index == n_accept, own, 0))
    return Verdict(n_accept, tokens, accept_probs=coins, replacement=replacement)


def expected(p, q, token):
    """The chance that a draft from q, or this very token, is accepted; for reports."""
    return p[token] if q is None else (p * q).sum()


rule = Rule("coin", batched(accept_row), is_lossless=True, expected_acceptance=expected)
