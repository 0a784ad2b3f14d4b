"""MTP modules against an independent NumPy computation, a fresh prefill and plain decoding."""

from __future__ import annotations

import dataclasses

import jax
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

from spec_jax.drafters.mtp.model import MtpConfig, init_mtp, mtp_table, recycle
from spec_jax.errors import ConfigError
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


def test_prompts_shorter_than_the_modules_leave_the_first_slots_unseen():
    """A row of two tokens in all, beside long ones: modules 2 and 3 have fewer rows than slots."""
    system, params = system_of(CONFIGS["sequential"])
    state = prefill(system, params, 8, prompts=[[5], [5, 6], [7, 8, 9]])
    proposal = propose(system, params, state)
    for row, tokens in enumerate(rows_of(state)):
        options = dict(rtol=0, atol=1e-5)
        np.testing.assert_allclose(
            proposal.logits[row], np_draft(CONFIGS["sequential"], params, tokens)[1], **options
        )


# ------------------------------------------------------------------------------- mutations


# ----------------------------------------------------------------------------- bad configs


def test_more_drafts_than_modules_are_refused_where_they_are_asked_for():
    config = CONFIGS["sequential"]
    message = "num_draft is 4, .* there are 3"
    system, params = system_of(config)
    state = prefill(system, params, 8)
    with pytest.raises(ConfigError, match=message):
        propose(system._replace(num_draft=4), params, state)
    with pytest.raises(ConfigError, match=message):
        run(system._replace(num_draft=4), params, state, 1)
    with pytest.raises(ConfigError, match=message):
        config.check_num_draft(4)
    config.check_num_draft(3)
    CONFIGS["recycled"].check_num_draft(9)


CHANGES = [
    ({"protocol": "parallel"}, "protocol is 'parallel'; known: recycled, sequential"),
    ({"order": "both"}, "order is 'both'; known: embedding-first, hidden-first"),
    ({"num_modules": 0}, "num_modules is 0"),
    ({"num_modules": 2}, "num_modules is 2, but recycled drafting uses one"),
    ({"layer": TARGET}, "2 layers; expected 1"),
    ({"taps": (1, 2)}, r"taps are \(1, 2\); expected a tuple of the one state"),
    ({"taps": ()}, "expected a tuple of the one state"),
    ({"target_hidden_size": 24}, "width is 16; the target's is 24"),
    ({"target_vocab_size": 30}, "vocabulary has 31 ids; the target's has 30"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=str)
def test_modules_that_cannot_be_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        of_target(**change)


INVALID_CHANGES = [
    ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
    ({"q_lora_rank": -1}, "q_lora_rank is -1"),
    ({"qk_rope_head_dim": 3}, "qk_rope_head_dim 3 is odd"),
    ({"n_group": 4}, "n_routed_experts 6 cannot be split into n_group 4"),
    ({"topk_group": 5}, "of which topk_group 5 are kept"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5; the 2 groups kept have 4"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size is None"),
    ({"n_routed_experts": None}, "intermediate_size is None"),
]


@pytest.mark.parametrize(("change", "message"), INVALID_CHANGES, ids=str)
def test_deepseek_layers_that_cannot_be_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(DEEPSEEK, **change)


REFUSED = [
    ({"head_dim": 0}, "head_dim is 0"),
    ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads 3"),
    ({"num_experts_per_tok": 5}, "num_experts_per_tok is 5 of 4"),
    ({"partial_rotary_factor": 0.4}, "turns 3 of 8 dimensions"),
    ({"partial_rotary_factor": 1.5}, "turns 12 of 8 dimensions"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=str)
def test_qwen3_next_layers_that_cannot_be_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(QWEN3_NEXT, **change)


def test_random_modules_have_the_declared_shapes():
    for config in CONFIGS.values():
        modules = init_mtp(config, jax.random.key(0))
        table = mtp_table(config)
        assert len(modules) == config.num_modules
        for module in modules.values():
            assert {k: w.shape for k, w in module.items()} == {k: s.shape for k, s in table.items()}
            is_zero = not module["norm"].any()
            assert is_zero is config.has_zero_centred_norms
    assert (modules["0"]["q"] != modules["1"]["q"]).all()
