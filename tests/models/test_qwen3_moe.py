"""Qwen3-MoE: loading, decoding, the published sizes, refusals."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.accept_counts import check_every_count
from support.published_configs import QWEN_30B_A3B
from support.tiny_models import QWEN3_MOE, random_weights

import spec_jax
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.inspection import inspect
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.models.families.qwen3_moe import Qwen3MoeConfig
from spec_jax.models.params import declared, num_params


@pytest.mark.exhaustive
def test_a_directory_loads_decodes_and_is_inspected(tmp_path):
    """In several files; text is plain text for every accept count."""
    save_pretrained(tmp_path, random_weights(QWEN3_MOE), QWEN3_MOE, max_shard_bytes=2000)
    target = spec_jax.load_model(tmp_path)
    assert target.config == QWEN3_MOE
    jax.tree.map(np.testing.assert_array_equal, target.params, random_weights(QWEN3_MOE))
    check_every_count(target, [3, 1, 4, 1, 5])
    found = inspect(tmp_path)
    assert found.facts["family"] == "qwen3_moe" and found.facts["experts"] == 6
    assert not found.notes[1:] and found.num_params == num_params(QWEN3_MOE)


def test_a_damaged_expert_is_named(tmp_path):
    save_pretrained(tmp_path, random_weights(QWEN3_MOE), QWEN3_MOE)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    save_file(tensors | {name: tensors[name][:2]}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"{name} has shape \[2, 16\].*asks for \[4, 16\]"):
        spec_jax.load_model(tmp_path)
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{name} is missing"):
        spec_jax.load_model(tmp_path)
    assert any(f"missing, 1: {name}" in note for note in inspect(tmp_path).notes)


def test_every_tensor_of_the_published_30b_is_accounted_for():
    D, F, layer = 2048, 768, "model.layers.{i}."
    each = {"input_layernorm": (D,), "post_attention_layernorm": (D,), "mlp.gate": (128, D)}
    each |= {"self_attn.q_proj": (4096, D), "self_attn.o_proj": (D, 4096)}
    each |= {f"self_attn.{x}_proj": (512, D) for x in "kv"}
    each |= {f"self_attn.{x}_norm": (128,) for x in "qk"}
    for e in range(128):
        gate = {f"mlp.experts.{e}.{x}_proj": (F, D) for x in ("gate", "up")}
        each |= gate | {f"mlp.experts.{e}.down_proj": (D, F)}
    expected = {"model.embed_tokens.weight": (151936, D), "lm_head.weight": (151936, D)}
    expected["model.norm.weight"] = (D,)
    for i in range(48):
        expected |= {f"{layer}{name}.weight".format(i=i): shape for name, shape in each.items()}
    config, found = Qwen3MoeConfig.from_hf(QWEN_30B_A3B), {}
    for _, spec, i in declared(config):
        is_split = "{e}" in spec.hf_name
        shape = spec.shape[1:] if is_split else spec.shape
        shape = shape[::-1] if spec.is_linear else shape
        names = {spec.hf_name.format(i=i, e=e) for e in range(128 if is_split else 1)}
        found |= dict.fromkeys(names, shape)
    assert found == expected
    assert num_params(config) == 30_532_122_624


REFUSED = [
    (dict(decoder_sparse_step=2), "decoder_sparse_step 2 is not supported; expected 1"),
    (dict(mlp_only_layers=[0]), r"mlp_only_layers \[0\] is not supported"),
    (dict(num_experts=None), "num_experts is 0; expected a positive integer"),
    (dict(num_experts=1), "num_experts_per_tok is 2 of 1 experts"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_a_config_that_is_not_read_is_refused_by_name(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_MOE.to_hf() | changes))
    with pytest.raises(ConfigError, match=message):
        spec_jax.load_model(tmp_path)
