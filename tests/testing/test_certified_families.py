"""The certificate of rules over other families: delta nets beside attention, experts, latents."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import rule
from support.tiny_models import DEEPSEEK_TARGET, GLM4_MOE, QWEN35, random_weights

from spec_jax.config import SamplerConfig
from spec_jax.drafters.standalone.model import standalone
from spec_jax.models import transformer
from spec_jax.testing import Row, certify_rule, toy_model, toy_params
from spec_jax.tree import Tree

V = 3
TARGETS = {"hybrid": QWEN35, "experts": GLM4_MOE, "latent": DEEPSEEK_TARGET}
TREES = {"chain": None, "tree": Tree((0, 0, 1))}


@pytest.mark.exhaustive
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", TARGETS)
def test_certificate_by_enumeration(family, tree):
    """Against passes over whole sequences: a state that a tree or a rejected draft has spoiled
    would change the distribution of what follows.
    """
    config = dataclasses.replace(TARGETS[family], vocab_size=V)
    params = {"target": random_weights(config), "draft": toy_params(V, 1)}
    whole = jax.jit(transformer.logits, static_argnames="config")

    def logits_of(_, tokens):
        padded = jnp.asarray([[*tokens, *[0] * (12 - len(tokens))]])
        return np.asarray(whole(params["target"], padded, config=config))[0, len(tokens) - 1]

    cold, warm = SamplerConfig(temperature=0.7, top_k=2), SamplerConfig(temperature=1.0)
    error = certify_rule(
        rule("residual"),
        rows=[Row((0, 1), warm, warm), Row((2, 1, 0), cold, warm)],
        vocab_size=V,
        num_draft=2,
        num_tokens=3,
        drafter=standalone(toy_model(V), TREES[tree]),
        params=params,
        target=transformer.model(config),
        batch=16,
        logits_of=logits_of,
        tolerance=1e-5,  # of the two passes' logits, which round in different orders
    )
    assert error <= 1e-6
