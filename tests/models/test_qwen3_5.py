"""Qwen3.5: its delta nets, its directories, and decoding with drafts and with its own module."""

from __future__ import annotations

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.state_space import run_delta_net
from safetensors.numpy import load_file, save_file
from support.accept_counts import check_every_count
from support.mtp_modules import fused
from support.published_configs import QWEN_27B
from support.tiny_models import QWEN35, QWEN35_MOE, random_tensor, random_weights

import spec_jax
from spec_jax import SpeculativeConfig, SpeculativeDecoder
from spec_jax.drafters.mtp.checkpoint import write_mtp
from spec_jax.drafters.mtp.model import MtpConfig, mtp_table
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.inspection import inspect
from spec_jax.models.caches.state import StateCache
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.models.delta import delta_net, invert_unit_lower
from spec_jax.models.families import family_of, module_layer
from spec_jax.models.families.qwen3_5 import Qwen35Config
from spec_jax.models.layers import Window
from spec_jax.models.params import declared
from spec_jax.models.ssm import CHUNK

K = 3
GREEDY = SpeculativeConfig("mtp", K, rejection_sampling_strategy="greedy")


def test_a_delta_net_equals_its_recurrence():
    """Over chunks, keys that repeat among them, and the state that ragged rows leave."""
    config, T = QWEN35.mixer, CHUNK + 21
    layer = dict(random_weights(QWEN35)["layers"]["0"], decay=jnp.asarray([-6.0, -1.0, 1.0, 5.0]))
    x = random_tensor("inputs", (2, T, QWEN35.hidden_size), 0)
    x[:, 9:40] = x[:, 8:9]
    lengths = np.array([T, CHUNK + 2])

    @jax.jit
    def run(x):
        cache = StateCache.create(config, 1, 2)
        window = Window.after(QWEN35, cache, 2, T)
        out, cache = delta_net(layer, x, cache, 0, window, config)
        return out, cache.commit(jnp.asarray(lengths))

    out, cache = run(x)
    as_64 = {name: np.asarray(w, np.float64) for name, w in layer.items()}
    for b, length in enumerate(lengths):
        expected, state, last = run_delta_net(as_64, x[b, :length].astype(np.float64), config)
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(out[b, :length], expected, atol=2e-5)
        np.testing.assert_allclose(cache.layers[0].ssm[b], state, atol=2e-5)
        np.testing.assert_allclose(cache.layers[0].conv[b], last, atol=1e-6)


@pytest.mark.parametrize("size", [9, 16, CHUNK])
def test_inverses_of_triangular_matrices(size):
    """Random ones, and those of keys that repeat, where a series of powers loses all digits."""
    lower = np.tril(np.random.default_rng(size).normal(size=(2, size, size)) / 3, -1)
    lower[1] = np.tril(np.full((size, size), 0.9), -1)
    spoiled = lower + np.triu(np.full((size, size), np.nan))  # is not read
    found = jax.jit(invert_unit_lower)(spoiled.astype(np.float32))
    np.testing.assert_allclose(found, np.linalg.inv(lower + np.eye(size)), atol=2e-5)


VISION = dict(model_type="qwen3_5", depth=1)
TOWER = {"model.visual.patch_embed.proj.weight": np.ones((3, 2), np.float32)}


TARGETS = {"dense": QWEN35, "experts": QWEN35_MOE}


@pytest.fixture(scope="module", params=TARGETS)
def published(request, tmp_path_factory):
    """A directory as published, of text and images in one and with the module, and its config."""
    return write(tmp_path_factory.mktemp("qwen3.5"), TARGETS[request.param])


def write(at, config):
    modules = MtpConfig.of_target(config)
    weights = {n: jnp.asarray(random_tensor(n, s.shape, 0)) for n, s in mtp_table(modules).items()}
    write_mtp(at, modules, {"0": weights}, target_config=config)
    tensors = load_file(at / "model.safetensors")
    save_pretrained(at, random_weights(config), config)
    for name, tensor in load_file(at / "model.safetensors").items():
        tensors[name.replace("model.", "model.language_model.", 1)] = tensor
    save_file(fused(tensors) | TOWER, at / "model.safetensors")
    text = json.loads((at / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    text["rope_parameters"] |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    hf = dict(model_type="qwen3_5_moe" if config.is_sparse else "qwen3_5", text_config=text)
    hf |= dict(vision_config=VISION, tie_word_embeddings=False)
    (at / "config.json").write_text(json.dumps(hf))
    return at, config


def test_a_published_directory_loads_without_its_tower(published, tmp_path):
    directory, config = published
    target = spec_jax.load_model(directory)
    assert target.config == config
    jax.tree.map(np.testing.assert_array_equal, target.params, random_weights(config))
    found = inspect(directory)
    assert found.kind == "model" and found.facts["MTP modules"] == 1 and found.refused is None
    assert any("it holds MTP modules" in note for note in found.notes)
    assert not any("missing" in note or "visual" in note for note in found.notes)
    save_pretrained(tmp_path, target.params, target.config)  # the language model alone
    assert spec_jax.load_model(tmp_path).config == config
    with pytest.raises(WeightsError, match="has no MTP module"):
        spec_jax.load_mtp(tmp_path, target)


@pytest.mark.exhaustive
def test_text_is_plain_text_for_every_accept_count_and_with_its_own_module(published):
    directory, _ = published
    target, prompt = spec_jax.load_model(directory), [3, 1, 4, 1, 5]
    plain = check_every_count(target, prompt)
    for name in (os.path.relpath(directory), directory):  # one directory, whatever it is called
        modules = spec_jax.load_draft(name, target)
        assert modules.method == "mtp"
    assert modules.config.has_zero_centred_norms
    assert modules.config.layer.layer_types == ("full_attention",)
    drafted = SpeculativeDecoder(target, modules, GREEDY)
    assert list(drafted.generate(prompt, 64).tokens) == plain
    assert drafted.stats.drafted > 0


_D, _F, _C, _W, _N = 5120, 17408, 2 * 16 * 128 + 48 * 128, 48 * 128, 48
_FEED = {"mlp.gate_proj": (_F, _D), "mlp.up_proj": (_F, _D), "mlp.down_proj": (_D, _F)}
_NORMS = {"input_layernorm": (_D,), "post_attention_layernorm": (_D,)}
_DELTA = {"in_proj_qkv": (_C, _D), "in_proj_z": (_W, _D), "in_proj_b": (_N, _D)}
_DELTA |= {"in_proj_a": (_N, _D), "conv1d": (_C, 1, 4), "norm": (128,), "out_proj": (_D, _W)}
_FULL = {"q_proj": (2 * 24 * 256, _D), "k_proj": (1024, _D), "v_proj": (1024, _D)}
_FULL |= {"o_proj": (_D, 24 * 256), "q_norm": (256,), "k_norm": (256,)}


def test_every_tensor_of_the_published_27b_is_accounted_for():
    config = Qwen35Config.from_hf({"text_config": QWEN_27B, "tie_word_embeddings": False})
    spelled = lambda spec: spec.shape[::-1] if spec.is_linear else spec.shape
    found = {spec.hf_name.format(i=i): spelled(spec) for _, spec, i in declared(config)}
    weight = lambda prefix, shapes: {f"{prefix}.{n}.weight": shape for n, shape in shapes.items()}
    expected = weight("model", {"embed_tokens": (248320, _D), "norm": (_D,)})
    expected["lm_head.weight"] = (248320, _D)
    for i in range(64):
        at = f"model.layers.{i}"
        expected |= weight(at, _NORMS | _FEED)
        if i % 4 == 3:
            expected |= weight(f"{at}.self_attn", _FULL)
            continue
        expected |= weight(f"{at}.linear_attn", _DELTA)
        expected |= {f"{at}.linear_attn.{name}": (_N,) for name in ("A_log", "dt_bias")}
    assert found == expected
    assert config.eos_token_id == (248044,) and config.rotary_dim == 64
    module = MtpConfig.of_target(config)
    shapes = {spelled(spec) for spec in mtp_table(module).values()}
    assert shapes == {(_D, 2 * _D), (_D,), *_FULL.values(), *_FEED.values()}


REFUSED = [
    (
        dict(linear_num_value_heads=3),
        "linear_num_value_heads 3 is not a multiple of .*_key_heads 2",
    ),
    (dict(layer_types=["linear_attention"]), "layer_types is .*for each of 2 layers"),
    (dict(layer_types=["sliding_attention"] * 2), "expected linear_attention or full_attention"),
    (dict(attn_output_gate=False), "attn_output_gate False is not supported; expected True"),
    (dict(output_gate_type="sigmoid"), "output_gate_type 'sigmoid' is not supported"),
    (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
    (dict(linear_key_head_dim=0), "linear_key_head_dim is 0; expected a positive integer"),
    (dict(eos_token_id=31), "eos_token_id is .*31.*expected an id from 0 to 30"),
    (dict(num_experts=1), "num_experts_per_tok is 2 of 1 experts"),
    (dict(num_experts=None), "num_experts is missing"),
    (dict(layer_types=None, full_attention_interval=3), "full_attention_interval is 3 without"),
]


@pytest.mark.parametrize("changes, message", REFUSED)
def test_a_config_that_is_not_read_is_refused_by_name(changes, message):
    config = QWEN35_MOE if "num_experts" in changes else QWEN35
    with pytest.raises(ConfigError, match=message):
        Qwen35Config.from_hf(config.to_hf() | changes)


def test_the_layer_of_a_module_is_attention_whatever_the_target_ends_with():
    config = dataclasses.replace(QWEN35, layer_types=("full_attention", "linear_attention"))
    assert MtpConfig.of_target(config).layer == module_layer(QWEN35)
    assert family_of(config).mtp_formats == ("Qwen3-Next",)
