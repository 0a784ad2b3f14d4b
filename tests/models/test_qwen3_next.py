"""Qwen3-Next as a target: loading, decoding with drafts and with its own module, refusals."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from support.accept_counts import check_every_count
from support.mtp_modules import write_with_modules
from support.published_configs import QWEN_NEXT_80B
from support.tiny_models import QWEN3_NEXT_TARGET, random_weights

import spec_jax
from spec_jax import SpeculativeConfig, SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.inspection import inspect
from spec_jax.models.families.qwen3_next import Qwen3NextConfig
from spec_jax.models.params import num_params


@pytest.mark.exhaustive
def test_a_directory_with_its_module_loads_decodes_and_is_inspected(tmp_path):
    config, prompt = QWEN3_NEXT_TARGET, [3, 1, 4, 1, 5]
    modules, weights = write_with_modules(tmp_path, config)
    target = spec_jax.load_model(tmp_path)
    assert target.config == config
    jax.tree.map(np.testing.assert_array_equal, target.params, random_weights(config))
    plain = check_every_count(target, prompt)
    module = spec_jax.load_draft(tmp_path, target)
    assert module.config == modules and modules.has_zero_centred_norms
    jax.tree.map(np.testing.assert_array_equal, module.params, weights)
    greedy = SpeculativeConfig("mtp", 3, rejection_sampling_strategy="greedy")
    assert list(SpeculativeDecoder(target, module, greedy).generate(prompt, 64).tokens) == plain
    found = inspect(tmp_path)
    assert found.kind == "model" and any("MTP modules" in note for note in found.notes)


def test_the_published_80b_has_its_layers_and_its_size():
    config = Qwen3NextConfig.from_hf(QWEN_NEXT_80B)
    assert config.layer_types == (("linear_attention",) * 3 + ("full_attention",)) * 12
    D, F, X = 2048, 512, 512
    experts = X * 3 * D * F + X * D + 3 * D * F + D
    delta = D * (2 * 2048 + 2 * 4096) + D * 64 + 8192 * 4 + 2 * 32 + 128 + 4096 * D
    full = D * 2 * 4096 + 2 * D * 512 + 4096 * D + 2 * 256
    layers = 48 * (experts + 2 * D) + 36 * delta + 12 * full
    assert num_params(config) == layers + 2 * 151936 * D + D


REFUSED = [
    (dict(linear_num_value_heads=3), "linear_num_value_heads 3 is not a multiple of .*heads 2"),
    (dict(linear_key_head_dim=None), "linear_key_head_dim is None; expected a positive integer"),
    (dict(layer_types=["linear_attention"]), "layer_types is .*for each of 2 layers"),
    (dict(decoder_sparse_step=2), "decoder_sparse_step 2 is not supported"),
    (dict(num_experts_per_tok=9), "num_experts_per_tok is 9 of 4 experts"),
    (dict(layer_types=None, full_attention_interval=3), "full_attention_interval is 3 without"),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_a_config_that_is_not_read_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        Qwen3NextConfig.from_hf(QWEN3_NEXT_TARGET.to_hf() | changes)
