"""EAGLE heads against an independent NumPy computation, and in the loop against plain decoding."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from support.eagle_heads import (
    CONFIGS,
    LAYER,
    PROMPTS,
    TARGET,
    np_draft,
    prefill,
    propose,
    system_of,
)

from spec_jax.errors import ConfigError

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
