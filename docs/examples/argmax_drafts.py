"""Drafts that are the argmax of q, accepted as if they had been drawn from q: not lossless.

The rule of KerasHub's ``SpeculativeSampler``, restated; see docs/peers.md. The certificate refuses
``rule`` with the drafter of ``make``, and accepts "residual" with it:

    python -m spec_jax certify --rule docs.examples.argmax_drafts:rule \\
        --drafter docs.examples.argmax_drafts:make
    python -m spec_jax certify --rule residual --drafter docs.examples.argmax_drafts:make
"""

import jax
import jax.numpy as jnp

from spec_jax.contracts import Rule
from spec_jax.drafters.standalone.model import standalone
from spec_jax.rules import batched, chain


def make(target):
    """Returns a drafter of argmax tokens, which tells q in its logits; for the certificate."""
    model = standalone(target.model)

    def propose(params, state, context, num_draft):
        # Without noise the draw from q is its argmax.
        silent = jnp.zeros((len(context.length), num_draft, target.model.vocab_size))
        proposal, state = model.propose(
            params, state, context._replace(gumbel=silent, has_probs=True), num_draft
        )
        return proposal.replace(probs=None, logits=jnp.log(proposal.probs)), state

    return model._replace(name="argmax drafts", propose=propose, is_sampled=False)


def accept_row(target, proposal, noise):
    """Accepts d with probability min(1, p(d)/q(d)), else draws from max(p - q, 0): one row."""
    return chain.residual(target, proposal.replace(probs=jax.nn.softmax(proposal.logits)), noise)


rule = Rule("as if drawn from q", batched(accept_row), is_lossless=False, needs_logits=True)
