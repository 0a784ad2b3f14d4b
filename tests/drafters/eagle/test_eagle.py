"""EAGLE heads against an independent NumPy computation, and in the loop against plain decoding."""

import numpy as np
import pytest
from support.eagle_heads import CONFIGS, PROMPTS, np_draft, prefill, propose, system_of


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
