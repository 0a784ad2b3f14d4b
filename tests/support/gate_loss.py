"""How the heads of ``gate_kind`` are trained: to draft the text's own tokens."""

import jax.numpy as jnp
from support import gate_kind

from spec_jax.train.losses import cross_entropy
from spec_jax.train.means import Mean, loss_of
from spec_jax.train.objective import Objective, chain_figures
from spec_jax.train.unroll import shifted, unroll


def gate_loss(params, batch, target, *, config, model, num_steps=2, counts=None):
    head, params = gate_kind.head(config, model), {"head": params, "target": target}
    T = batch.tokens.shape[1] - 2
    terms, drafts, weights = {}, [], []
    for step, x in enumerate(unroll(head, params, batch.view.features, batch.tokens, num_steps)):
        logits = head.unembed(params, x)
        weights.append(shifted(batch.mask, 2 + step, T))
        loss = cross_entropy(logits, shifted(batch.tokens, 2 + step, T))
        terms[f"step {step}"] = Mean.of(loss, weights[-1])
        drafts.append(jnp.argmax(logits, axis=-1))
    return loss_of(terms, counts), {"terms": terms} | chain_figures(drafts, batch, weights)


GATE = Objective("gate", gate_loss)
