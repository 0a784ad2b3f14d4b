"""GLM-4.5 as a target: loading, decoding with drafts and with its own module, refusals."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.accept_counts import check_every_count
from support.mtp_modules import write_with_modules
from support.published_configs import GLM_45_AIR
from support.tiny_models import GLM4_MOE, random_weights

import spec_jax
from spec_jax import SpeculativeConfig, SpeculativeDecoder
from spec_jax.drafters.mtp.formats import format_of
from spec_jax.drafters.mtp.model import MtpConfig, mtp_table
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.inspection import inspect
from spec_jax.models.families import layer_kinds
from spec_jax.models.families.glm4_moe import Glm4MoeConfig
from spec_jax.models.params import declared, num_params


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory as published, with its module, and the module's config and weights."""
    folder = tmp_path_factory.mktemp("glm")
    return folder, *write_with_modules(folder, GLM4_MOE, has_own_embed=True, has_own_head=True)


@pytest.mark.exhaustive
def test_a_directory_with_its_module_loads_decodes_and_is_inspected(published):
    directory, modules, weights = published
    target, prompt = spec_jax.load_model(directory), [3, 1, 4, 1, 5]
    assert target.config == GLM4_MOE
    jax.tree.map(np.testing.assert_array_equal, target.params, random_weights(GLM4_MOE))
    plain = check_every_count(target, prompt)
    module = spec_jax.load_draft(directory, target)
    assert module.config == modules and modules.recycles_normed
    jax.tree.map(np.testing.assert_array_equal, module.params, weights)
    greedy = SpeculativeConfig("mtp", 3, rejection_sampling_strategy="greedy")
    assert list(SpeculativeDecoder(target, module, greedy).generate(prompt, 64).tokens) == plain
    found = inspect(directory)
    assert found.kind == "model" and found.refused is None
    assert (found.facts["experts"], found.facts["MTP modules"]) == (6, 1)
    assert any("it holds MTP modules" in note for note in found.notes)
    assert not any("missing" in note for note in found.notes)


def test_ends_that_are_copies_of_the_targets_are_shared(published, tmp_path):
    """As in the published files; and a layer that config.json does not announce is an error."""
    directory, _, _ = published
    tensors = load_file(directory / "model.safetensors")
    own = ("embed_tokens", "shared_head.head"), ("model.embed_tokens", "lm_head")
    for name, original in zip(*own):
        tensors[f"model.layers.2.{name}.weight"] = tensors[f"{original}.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    target = spec_jax.load_model(tmp_path)
    config = spec_jax.load_mtp(tmp_path, target).config
    assert not config.has_own_embed and not config.has_own_head
    hf = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(WeightsError, match="unexpected tensors model.layers.2"):
        spec_jax.load_model(tmp_path)


_D, _F, _X = 4096, 1408, 128
_GATED = lambda at, width: (
    {f"{at}.{x}_proj": (width, _D) for x in ("gate", "up")} | {f"{at}.down_proj": (_D, width)}
)
_BOTH = {"input_layernorm.weight": (_D,), "post_attention_layernorm.weight": (_D,)}
_BOTH |= {"self_attn.q_proj.weight": (96 * 128, _D), "self_attn.q_proj.bias": (96 * 128,)}
for _x in "kv":
    _BOTH |= {f"self_attn.{_x}_proj.weight": (1024, _D), f"self_attn.{_x}_proj.bias": (1024,)}
_BOTH["self_attn.o_proj.weight"] = (_D, 96 * 128)
_DENSE = {f"{name}.weight": shape for name, shape in _GATED("mlp", 10944).items()}
_EXPERTS = _GATED("mlp.shared_experts", _F) | {"mlp.gate": (_X, _D)}
for _e in range(_X):
    _EXPERTS |= _GATED(f"mlp.experts.{_e}", _F)
_SPARSE = {f"{name}.weight": shape for name, shape in _EXPERTS.items()}
_SPARSE["mlp.gate.e_score_correction_bias"] = (_X,)
_MODULE = {f"{x}.weight": (_D,) for x in ("enorm", "hnorm", "shared_head.norm")}
_MODULE |= {f"{x}.weight": (151552, _D) for x in ("embed_tokens", "shared_head.head")}
_MODULE["eh_proj.weight"] = (_D, 2 * _D)


def spelled(spec, name_of):
    """Names and shapes in a checkpoint of one declared weight."""
    is_split = "{e}" in spec.hf_name
    shape = spec.shape[1:] if is_split else spec.shape
    names = {name_of(e) for e in range(spec.shape[0] if is_split else 1)}
    return dict.fromkeys(names, shape[::-1] if spec.is_linear else shape)


def test_every_tensor_of_the_published_air_is_accounted_for():
    """The model's, and those of its module in layer 46."""
    expected = {"model.embed_tokens.weight": (151552, _D), "lm_head.weight": (151552, _D)}
    expected["model.norm.weight"] = (_D,)
    for i in range(46):
        each = _BOTH | (_SPARSE if i >= 1 else _DENSE)
        expected |= {f"model.layers.{i}.{name}": shape for name, shape in each.items()}
    config, found = Glm4MoeConfig.from_hf(GLM_45_AIR), {}
    for _, spec, i in declared(config):
        found |= spelled(spec, lambda e, spec=spec, i=i: spec.hf_name.format(i=i, e=e))
    assert found == expected
    assert num_params(config) == 106_852_251_264
    assert config.rotary_dim == 64 and config.eos_token_id == (151329, 151336, 151338)
    module = MtpConfig.of_target(config, has_own_embed=True, has_own_head=True)
    fmt, found = format_of("DeepSeek", 46), {}
    for name, spec in mtp_table(module).items():
        found |= spelled(spec, lambda e, name=name, spec=spec: fmt.tensor(name, spec, 0, e))
    each = _BOTH | _SPARSE | _MODULE
    assert found == {f"model.layers.46.{name}": shape for name, shape in each.items()}


def test_layers_are_dense_up_to_the_stated_one_and_the_modules_layer_is_not():
    config = dataclasses.replace(GLM4_MOE, num_hidden_layers=4, first_k_dense_replace=3)
    dense, *_, sparse = layer_kinds(config)
    assert layer_kinds(config) == (dense, dense, dense, sparse) and dense != sparse
    module = MtpConfig.of_target(config)
    assert layer_kinds(module.layer) == (sparse,)
    assert Glm4MoeConfig.from_hf(config.to_hf()) == config


REFUSED = [
    (dict(n_group=4), "n_routed_experts 6 cannot be split into n_group 4"),
    (dict(topk_group=1, num_experts_per_tok=3), "num_experts_per_tok is 3; the 1 groups kept"),
    (dict(scoring_func="softmax"), "scoring_func 'softmax' is not supported; expected 'sigmoid'"),
    (dict(n_shared_experts=0), "n_shared_experts is 0; expected a positive integer"),
    (dict(first_k_dense_replace=-1), "first_k_dense_replace is -1"),
    (dict(num_key_value_heads=3), "4 is not a multiple of num_key_value_heads 3"),
    (dict(head_dim=None, hidden_size=18), "18 is not a multiple of num_attention_heads 4"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_a_config_that_is_not_read_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        Glm4MoeConfig.from_hf(GLM4_MOE.to_hf() | changes)


def test_modules_that_config_json_announces_and_are_absent_are_named(published, tmp_path):
    directory, _, _ = published
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if not name.startswith("model.layers.2.")}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    assert json.loads((tmp_path / "config.json").read_text())["num_nextn_predict_layers"] == 1
    target = spec_jax.load_model(tmp_path)
    with pytest.raises(WeightsError, match=r"no MTP module: no tensor begins.*model.layers.2\."):
        spec_jax.load_mtp(tmp_path, target)
