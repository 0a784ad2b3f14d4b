"""DeepSeek-V3 as a target: loading, decoding with drafts and with its own module, refusals."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.accept_counts import check_every_count
from support.mtp_modules import write_with_modules
from support.published_configs import DEEPSEEK_V3, KIMI_K2
from support.tiny_models import DEEPSEEK_TARGET, random_tokens, random_weights

import spec_jax
from spec_jax import SpeculativeConfig, SpeculativeDecoder
from spec_jax.drafters.mtp.model import MtpConfig, mtp_table
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.inspection import inspect
from spec_jax.models import transformer
from spec_jax.models.caches.latent import LatentCache
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.models.config import RopeConfig
from spec_jax.models.families.deepseek import DeepseekConfig
from spec_jax.models.params import declared, num_params

YARN = dict(factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.2)
TARGET = dataclasses.replace(
    DEEPSEEK_TARGET, num_attention_heads=4, rope=RopeConfig("yarn", **YARN)
)
K, PROMPT = 3, [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory as published: the model, and its module as the layer after the last one."""
    at = tmp_path_factory.mktemp("deepseek")
    write_with_modules(at, TARGET)
    return at


def test_a_directory_with_its_module_loads_and_is_inspected(published, tmp_path):
    target = spec_jax.load_model(published)
    assert target.config == TARGET
    jax.tree.map(np.testing.assert_array_equal, target.params, random_weights(TARGET))
    half = spec_jax.load_model(published, dtype="bfloat16").params["layers"]["1"]
    assert (half["router_bias"].dtype, half["router"].dtype) == (jnp.float32, jnp.bfloat16)
    found = inspect(published)
    assert found.kind == "model" and found.facts["MTP modules"] == 1 and found.refused is None
    assert any("it holds MTP modules" in note for note in found.notes)
    assert not any("missing" in note for note in found.notes)
    save_pretrained(tmp_path, target.params, target.config)  # the model alone
    assert spec_jax.load_model(tmp_path).config == TARGET
    with pytest.raises(WeightsError, match="has no MTP module"):
        spec_jax.load_mtp(tmp_path, target)


def test_latents_attend_as_expanded_keys_and_values_do():
    """A prompt in two passes, then a tree, against whole sequences, which are never absorbed."""
    weights, tokens = random_weights(TARGET), random_tokens(2, 9, seed=3)
    model = transformer.model(TARGET)
    sees = jnp.asarray([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool)

    @jax.jit
    def decode():
        cache, hidden = model.init_cache(weights, 2, 16), []
        for part in (tokens[:, :5], tokens[:, 5:6]):
            output = model.forward(weights, part, cache)
            cache = output.cache.commit(jnp.full((2,), part.shape[1]))
            hidden.append(output.hidden)
        assert isinstance(cache, LatentCache) and cache.keys[0].shape == (2, 16, 6 + 2)
        hidden.append(model.forward(weights, tokens[:, 6:], cache, window_mask=sees).hidden)
        return model.unembed(weights, jnp.concatenate(hidden, axis=1))

    found = decode()
    whole = jax.jit(lambda tokens: transformer.logits(weights, tokens, config=TARGET))
    chain = jnp.concatenate([tokens[:, :7], tokens[:, 8:]], axis=1)  # the other child of node 6
    assert np.abs(found).max() > 1
    np.testing.assert_allclose(found[:, :8], whole(tokens[:, :8]), atol=2e-5)
    np.testing.assert_allclose(found[:, 8], whole(chain)[:, 7], atol=2e-5)


def test_layers_after_the_last_one_that_no_config_announces_are_an_error(published, tmp_path):
    hf = json.loads((published / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    (tmp_path / "model.safetensors").symlink_to(published / "model.safetensors")
    with pytest.raises(WeightsError, match=r"unexpected tensors model\.layers\.2\."):
        spec_jax.load_model(tmp_path)


@pytest.mark.exhaustive
def test_text_is_plain_text_for_every_accept_count_and_with_its_own_module(published):
    target = spec_jax.load_model(published)
    plain = check_every_count(target, PROMPT)
    module = spec_jax.load_draft(published, target)
    assert module.method == "mtp" and module.config.recycles_normed
    greedy = SpeculativeConfig("mtp", K, rejection_sampling_strategy="greedy")
    drafted = SpeculativeDecoder(target, module, greedy)
    assert list(drafted.generate(PROMPT, 64).tokens) == plain
    assert drafted.stats.drafted > 0


REFUSED = [
    (dict(scoring_func="softmax"), "scoring_func 'softmax' is not supported"),
    (dict(topk_method="greedy"), "topk_method 'greedy' is not supported"),
    (dict(moe_layer_freq=2), "moe_layer_freq 2 is not supported"),
    (dict(first_k_dense_replace=-1), "first_k_dense_replace is -1; expected 0 or more"),
    (dict(intermediate_size=None), "intermediate_size is None; expected a positive integer"),
    (dict(mlp_layer_types=["sparse", "dense"]), "expected dense layers, then sparse ones"),
    (dict(num_hidden_layers=2**31, mlp_layer_types=["dense"]), r"types is \['dense'\]; expected"),
    (dict(n_group=4), "n_routed_experts 6 cannot be split into n_group 4"),
    (dict(routed_scaling_factor=None), "routed_scaling_factor is null; expected a finite number"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not supported; expected 1"),
    (
        dict(model_type="glm4_moe_lite", rope_interleave=None),
        "rope_interleave is null; expected true or false",
    ),
    (dict(kv_lora_rank=0), "kv_lora_rank is 0; expected a positive integer"),
    (dict(eos_token_id=31), "eos_token_id is .*31.*expected an id from 0 to 30"),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_a_config_that_is_not_read_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        DeepseekConfig.from_hf(TARGET.to_hf() | changes)


def test_null_is_false_and_an_absent_key_is_what_the_family_assumes():
    """The values of absent keys are compared with transformers' classes in the parity tests."""
    hf = TARGET.to_hf()
    flags = ("norm_topk_prob", "rope_interleave")
    read = DeepseekConfig.from_hf(hf | dict.fromkeys(flags))
    assert (read.norm_topk_prob, read.rope_interleave) == (False, False)
    hf = {name: value for name, value in hf.items() if name not in flags}
    assert DeepseekConfig.from_hf(hf) == TARGET
    del hf["routed_scaling_factor"], hf["n_shared_experts"]
    read = DeepseekConfig.from_hf(hf)
    assert (read.routed_scaling_factor, read.n_shared_experts) == (2.5, 1)
    assert DeepseekConfig.from_hf(hf | {"n_shared_experts": None}).n_shared_experts is None


RELATIVES = {
    "deepseek_v32": dict(index_topk=2048),
    "glm_moe_dsa": dict(index_topk=2048),
    "deepseek_v4": {},
    "kimi_k3": dict(linear_attn_config={"kda_layers": [1]}),
}


@pytest.mark.parametrize("kind", RELATIVES)
def test_a_relative_is_refused_by_its_name(kind, tmp_path):
    hf = TARGET.to_hf() | {"model_type": kind} | RELATIVES[kind]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    lacks = "an indexer that chooses" if "index_topk" in hf else ""
    with pytest.raises(ConfigError, match=f"'{kind}' is not supported.*{lacks}"):
        spec_jax.load_model(tmp_path)


def test_float8_blocks_are_multiplied_by_their_scales(published, tmp_path):
    """Blocks that divide no size, in the model and in its module, beside plain tensors."""
    block, tensors, expected = (5, 7), load_file(published / "model.safetensors"), {}
    kept = ("embed", "lm_head", "eh_proj", "mlp.gate.")
    for name, tensor in [*tensors.items()]:
        expected[name] = tensor
        if tensor.ndim < 2 or any(part in name for part in kept):
            continue
        tensors[name] = np.asarray(jnp.asarray(64 * tensor, jnp.float8_e4m3fn))
        blocks = [-(-n // b) for n, b in zip(tensor.shape, block)]
        scales = np.random.RandomState(len(name)).rand(*blocks).astype(np.float32) / 32
        tensors[f"{name}_scale_inv"] = scales
        grid = np.ix_(*(np.arange(n) // b for n, b in zip(tensor.shape, block)))
        expected[name] = tensors[name].astype(np.float32) * scales[grid]
    said = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic")
    said |= dict(weight_block_size=[*block])
    hf = json.loads((published / "config.json").read_text())
    (tmp_path / "quantised").mkdir()
    (tmp_path / "plain").mkdir()
    for at, content, more in (
        ("quantised", tensors, {"quantization_config": said}),
        ("plain", expected, {}),
    ):
        (tmp_path / at / "config.json").write_text(json.dumps(hf | more))
        save_file(content, tmp_path / at / "model.safetensors")
    load = lambda at, **options: spec_jax.load_model(tmp_path / at, **options)
    target, plain = load("quantised"), load("plain")
    assert len(tensors) - len(expected) > 40
    jax.tree.map(np.testing.assert_array_equal, target.params, plain.params)
    on_mesh = load("quantised", mesh="data:2,tensor:2")
    jax.tree.map(np.testing.assert_array_equal, on_mesh.params, plain.params)
    module = lambda at: spec_jax.load_mtp(tmp_path / at, target).params
    jax.tree.map(np.testing.assert_array_equal, module("quantised"), module("plain"))
    found = inspect(tmp_path / "quantised")
    assert found.refused is None and found.num_params == inspect(tmp_path / "plain").num_params
    assert not any("scale_inv" in note for note in found.notes)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    save_file(tensors | {name: expected[name]}, tmp_path / "quantised" / "model.safetensors")
    with pytest.raises(WeightsError, match=f"but {name} is stored as float32; only 8-bit"):
        load("quantised")
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, tmp_path / "quantised" / "model.safetensors")
    with pytest.raises(WeightsError, match=f"{name}_scale_inv is missing, of float8_e4m3fn"):
        load("quantised")


_D, _N = 7168, 128
_EXPERT = 3 * _D * 2048
_ATTENTION = _D * 1536 + 1536 + 1536 * _N * 192 + _D * 576 + 512 + 512 * _N * 256 + _N * 128 * _D
_SPARSE = _ATTENTION + 2 * _D + 257 * _EXPERT + 256 * _D + 256
_DENSE = _ATTENTION + 2 * _D + 3 * _D * 18432


def test_the_published_sizes_have_their_numbers_of_parameters():
    config = DeepseekConfig.from_hf(DEEPSEEK_V3)
    count = 3 * _DENSE + 58 * _SPARSE + 2 * 129280 * _D + _D
    assert num_params(config) == count and round(count, -9) == 671e9
    module = MtpConfig.of_target(config)
    specs = mtp_table(module).values()
    assert sum(np.prod(s.shape) for s in specs) == _SPARSE + 2 * _D * _D + 3 * _D
    assert round(_SPARSE + 2 * _D * _D, -8) == 11.6e9
    assert config.attention_scale == 192**-0.5 * (0.1 * np.log(40) + 1) ** 2
    kimi = DeepseekConfig.from_hf(KIMI_K2)
    assert kimi.attention_scale == 192**-0.5 * (0.1 * np.log(32) + 1) ** 2
    assert (kimi.n_group, kimi.rope.rope_theta, kimi.rope.beta_fast) == (1, 50000, 1)
    assert kimi.num_dense_layers == 1 and round(num_params(kimi), -9) == 1026e9
    names = {s.hf_name for _, s, _ in declared(kimi)}
    assert names == {s.hf_name for _, s, _ in declared(config)}
