"""Families with experts, states or latents: directories as published, and sizes."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.mtp_modules import fused, write_with_modules
from support.tiny_models import (
    BAMBA,
    DEEPSEEK_TARGET,
    GLM4_MOE,
    MAMBA2,
    QWEN3_MOE,
    QWEN3_NEXT_TARGET,
    QWEN35,
    QWEN35_MOE,
    random_weights,
)

import spec_jax
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import WeightsError
from spec_jax.inspection import inspect
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.models.config import RopeConfig
from spec_jax.models.families import family_of, layer_kinds, module_layer
from spec_jax.models.params import num_params

SINGLE = "model.safetensors"
YARN = dict(factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.2)
FAMILIES = {
    "deepseek": dataclasses.replace(
        DEEPSEEK_TARGET, num_attention_heads=4, rope=RopeConfig("yarn", **YARN)
    ),
    "glm": GLM4_MOE,
    "qwen3 experts": QWEN3_MOE,
    "qwen3-next": QWEN3_NEXT_TARGET,
    "qwen3.5": QWEN35,
    "qwen3.5 experts": QWEN35_MOE,
    "mamba2": MAMBA2,
    "bamba": BAMBA,
}


def write_beside_a_tower(at, config):
    """As Qwen3.5 is published: text and images in one, experts fused, and the module beside."""
    modules = write_with_modules(at, config)
    rename = lambda name: name.replace("model.", "model.language_model.", 1)
    tensors = fused({rename(name): x for name, x in load_file(at / SINGLE).items()})
    tower = {"model.visual.patch_embed.proj.weight": np.ones((3, 2), np.float32)}
    save_file(tensors | tower, at / SINGLE)
    text = json.loads((at / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    hf = dict(model_type="qwen3_5_moe" if config.is_sparse else "qwen3_5", text_config=text)
    hf |= dict(vision_config=dict(model_type="qwen3_5", depth=1), tie_word_embeddings=False)
    (at / "config.json").write_text(json.dumps(hf))
    return modules


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request, tmp_path_factory):
    """A directory as published, its config, and the config and weights of its module, if any."""
    at, config = tmp_path_factory.mktemp("family"), FAMILIES[request.param]
    if config in (QWEN3_MOE, MAMBA2, BAMBA):
        save_pretrained(at, random_weights(config), config, max_shard_bytes=2000)
        return at, config, None, None
    if config in (QWEN35, QWEN35_MOE):
        return at, config, *write_beside_a_tower(at, config)
    own_ends = dict(has_own_embed=True, has_own_head=True) if config is GLM4_MOE else {}
    return at, config, *write_with_modules(at, config, **own_ends)


def test_a_directory_as_published_loads_with_its_module_and_is_inspected(directory, tmp_path):
    at, config, modules, weights = directory
    target = spec_jax.load_model(at)
    assert target.config == config
    jax.tree.map(np.testing.assert_array_equal, target.params, random_weights(config))
    found = inspect(at)
    assert found.kind == "model" and found.refused is None
    assert not any("missing" in note or "visual" in note for note in found.notes)
    assert target.num_params == num_params(config) <= found.num_params
    assert any("it holds MTP modules" in note for note in found.notes) is (modules is not None)
    if modules is not None:
        assert found.facts["MTP modules"] == 1
        module = spec_jax.load_draft(os.path.relpath(at), target)  # the same directory
        assert module.method == "mtp" and module.config == modules
        jax.tree.map(np.testing.assert_array_equal, module.params, weights)
    save_pretrained(tmp_path, target.params, target.config)  # the model alone
    assert spec_jax.load_model(tmp_path).config == config
    with pytest.raises(WeightsError, match="no MTP module"):
        spec_jax.load_mtp(tmp_path, target)


def test_weights_that_routing_reads_stay_in_float32(tmp_path):
    save_pretrained(tmp_path, random_weights(DEEPSEEK_TARGET), DEEPSEEK_TARGET)
    half = spec_jax.load_model(tmp_path, dtype="bfloat16").params["layers"]["1"]
    assert (half["router_bias"].dtype, half["router"].dtype) == (jnp.float32, jnp.bfloat16)


def test_a_module_that_config_json_does_not_announce_is_unexpected(tmp_path):
    write_with_modules(tmp_path, GLM4_MOE)
    hf = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(WeightsError, match=r"unexpected tensors model\.layers\.2\."):
        spec_jax.load_model(tmp_path)


def test_the_layer_of_a_module_is_of_the_kind_that_drafts():
    """Sparse where the target's first layers are dense; attention whatever the target ends with."""
    config = dataclasses.replace(GLM4_MOE, num_hidden_layers=4, first_k_dense_replace=3)
    dense, *_, sparse = layer_kinds(config)
    assert layer_kinds(config) == (dense, dense, dense, sparse) and dense != sparse
    assert layer_kinds(MtpConfig.of_target(config).layer) == (sparse,)
    config = dataclasses.replace(QWEN35, layer_types=("full_attention", "linear_attention"))
    assert MtpConfig.of_target(config).layer == module_layer(QWEN35)
    assert family_of(config).mtp_formats == ("Qwen3-Next",)
