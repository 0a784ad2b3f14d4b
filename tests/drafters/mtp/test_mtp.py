"""MTP modules against an independent NumPy computation, a fresh prefill and plain decoding."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.mtp_modules import (
    CONFIGS,
    TARGET,
    D,
    modules_of,
    np_draft,
    prefill,
    propose,
    rows_of,
    system_of,
)
from support.numpy_layers import np_norm
from support.tiny_models import DEEPSEEK_TARGET, GLM4_MOE, QWEN3_NEXT_TARGET, QWEN35, random_tensor

from spec_jax.drafters.mtp.model import MtpConfig, recycle
from spec_jax.models.families import registry


@pytest.mark.representatives("recycled", "sequential", "zero-centred, own ends")
@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_are_the_published_architecture(name):
    config = CONFIGS[name]
    system, params = system_of(config)
    state = prefill(system, params, 8)
    proposal = propose(system, params, state)
    for row, tokens in enumerate(rows_of(state)):
        drafts, logits = np_draft(config, params, tokens)
        assert proposal.tokens[row].tolist() == drafts
        np.testing.assert_allclose(proposal.logits[row], logits, rtol=0, atol=1e-5)


OF_FAMILIES = (TARGET, DEEPSEEK_TARGET, GLM4_MOE, QWEN35, QWEN3_NEXT_TARGET)


def test_modules_of_every_family_recycle_the_state_after_their_norm():
    """With weights of norms other than one: the next step normalises what it reads again, so with
    ones it could not tell the two states apart.
    """
    have_modules = {kind for kind, family in registry._FAMILIES.items() if family.mtp_formats}
    ours = {kind for kind in have_modules if kind.__module__.startswith("spec_jax.")}
    assert ours == {type(target) for target in OF_FAMILIES}
    x = random_tensor("state", (3, D), 0).astype(np.float64)
    for target in OF_FAMILIES:
        config = MtpConfig.of_target(target)
        module = modules_of(config)["0"]
        found = recycle({"head": {"0": module}}, jnp.asarray(x, jnp.float32), config=config)
        one = float(config.has_zero_centred_norms)
        read = lambda state, module=module, one=one: np_norm(state, module["hidden_norm"] + one)
        expected = read(np_norm(x, module["norm"] + one))
        np.testing.assert_allclose(read(np.asarray(found, np.float64)), expected, atol=1e-5)
        assert np.abs(read(x) - expected).max() > 0.02
