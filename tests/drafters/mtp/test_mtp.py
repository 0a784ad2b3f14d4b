"""MTP modules against an independent NumPy computation, a fresh prefill and plain decoding."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from support.mtp_modules import (
    CONFIGS,
    TARGET,
    D,
    modules_of,
    np_draft,
    of_target,
    prefill,
    propose,
    rows_of,
    run,
    system_of,
)
from support.numpy_layers import np_norm
from support.tiny_models import (
    DEEPSEEK,
    DEEPSEEK_TARGET,
    GLM4_MOE,
    QWEN3_NEXT,
    QWEN3_NEXT_TARGET,
    QWEN35,
    random_tensor,
)

from spec_jax.config import SpeculativeConfig
from spec_jax.drafters.mtp.model import MtpConfig, recycle
from spec_jax.engine.build import make_drafter
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedHead
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


def test_more_drafts_than_modules_are_refused_where_they_are_asked_for():
    config = CONFIGS["sequential"]
    message = "num_draft is 4, .* there are 3"
    system, params = system_of(config)
    state = prefill(system, params, 8)
    with pytest.raises(ConfigError, match=message):
        run(system._replace(num_draft=4), params, state, 1)

    def make(name, num_draft):
        head = LoadedHead("modules", CONFIGS[name], params["draft"]["head"])
        return make_drafter(SpeculativeConfig("mtp", num_draft), system.target, head)

    with pytest.raises(ConfigError, match=message):
        make("sequential", 4)
    make("sequential", 3)
    make("recycled", 9)


DEEPSEEK_LAYER = functools.partial(dataclasses.replace, DEEPSEEK)
NEXT_LAYER = functools.partial(dataclasses.replace, QWEN3_NEXT)
REFUSED = [
    (of_target, {"protocol": "parallel"}, "protocol is 'parallel'; expected one of recycled, seq"),
    (of_target, {"order": "both"}, "order is 'both'; expected one of embedding-first, hid"),
    (of_target, {"num_modules": 0}, "num_modules is 0"),
    (of_target, {"num_modules": 2}, "num_modules is 2, but recycled drafting uses one"),
    (of_target, {"layer": TARGET}, "2 layers; expected 1"),
    (of_target, {"taps": (1, 2)}, r"taps are \(1, 2\); expected a tuple of the one state"),
    (of_target, {"target_hidden_size": 24}, "width is 16; the target's is 24"),
    (of_target, {"target_vocab_size": 30}, "vocabulary has 31 ids; the target's has 30"),
    (DEEPSEEK_LAYER, {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
    (DEEPSEEK_LAYER, {"q_lora_rank": -1}, "q_lora_rank is -1"),
    (DEEPSEEK_LAYER, {"qk_rope_head_dim": 3}, "qk_rope_head_dim 3 is odd"),
    (DEEPSEEK_LAYER, {"topk_group": 5}, "of which topk_group 5 are kept"),
    (DEEPSEEK_LAYER, {"num_experts_per_tok": 5}, "is 5; the 2 groups kept have 4"),
    (DEEPSEEK_LAYER, {"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    (NEXT_LAYER, {"head_dim": 0}, "head_dim is 0"),
    (NEXT_LAYER, {"partial_rotary_factor": 0.4}, "turns 3 of 8 dimensions"),
    (NEXT_LAYER, {"partial_rotary_factor": 1.5}, "turns 12 of 8 dimensions"),
]


@pytest.mark.parametrize(("make", "changes", "words"), REFUSED, ids=[row[-1] for row in REFUSED])
def test_modules_and_layers_that_cannot_be_are_refused(make, changes, words):
    with pytest.raises(ConfigError, match=words):
        make(**changes)
