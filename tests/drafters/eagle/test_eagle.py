"""EAGLE heads against an independent NumPy computation, and in the loop against plain decoding."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.eagle_heads import (
    CONFIGS,
    LAYER,
    PROMPTS,
    TARGET,
    D,
    V,
    head_of,
    np_draft,
    prefill,
    propose,
    system_of,
)
from support.tiny_models import random_weights

from spec_jax.drafters.eagle.model import eagle_head, head_table, init_head
from spec_jax.errors import ConfigError
from spec_jax.models import transformer

# ---------------------------------------------- the target's distribution, by enumeration


# --------------------------------------------------------------------------- the drafter


@pytest.mark.representatives(
    "eagle-1",
    "eagle-3",
    "fc_norm",
    "norm_before_fc",
    "norm_before_residual",
    "norm_output",
    "narrow",
)
@pytest.mark.parametrize("name", CONFIGS)
def test_two_recycled_steps_are_the_published_architecture(name):
    config = CONFIGS[name]
    system, params = system_of(config)
    state = prefill(system, params, PROMPTS, 8)
    proposal = propose(system, params, state)
    for row, prompt in enumerate(PROMPTS):
        pending = int(state.tokens[row, len(prompt)])
        drafts, logits = np_draft(config, params, prompt, pending, 3)
        assert proposal.tokens[row].tolist() == drafts
        np.testing.assert_allclose(proposal.logits[row], logits, rtol=0, atol=1e-5)


CHANGES = [
    ({"version": 2}, "version is 2"),
    ({"fc_norm": True, "norm_before_fc": True}, "both on; expected one of them"),
    ({"taps": ()}, "taps are empty"),
    ({"target_hidden_size": 24}, "width is 16; the embedding .* has 24"),
    (
        {"version": 1, "taps": (3,), "layer": LAYER, "target_hidden_size": 24, "own_embed": True},
        "width is 16; the target's head .* has 24",
    ),
    ({"target_vocab_size": 12}, "draft vocabulary 20 is larger than the target's 12"),
    ({"layer": TARGET}, "2 layers; expected 1"),
    ({"version": 1}, "reads one state"),
    ({"version": 1, "taps": (3,)}, "31 ids, not 20"),
    ({"version": 1, "taps": (3,), "norm_output": True}, "options of version 3"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=str)
def test_a_head_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CONFIGS["eagle-3"], **change)


def test_ids_that_pad_the_targets_embedding_are_not_drafted():
    config = CONFIGS["eagle-3 whole vocabulary"]
    padded = transformer.model(TARGET, config.taps, num_tokens=27)
    params = {"head": head_of(config), "target": random_weights(TARGET)}
    logits = eagle_head(config, padded).unembed(params, jnp.ones((1, D)))
    assert np.isneginf(logits[0, 27:]).all() and np.isfinite(logits[0, :27]).all()


def test_random_heads_have_the_declared_shapes():
    for config in CONFIGS.values():
        head = jax.eval_shape(functools.partial(init_head, config), jax.random.key(0))
        assert {k for k in head if k != "d2t"} == set(head_table(config))
        assert ("d2t" in head) is (config.layer.vocab_size < V)
