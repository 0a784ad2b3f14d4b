"""MTP modules written in the formats of other projects: read back bit for bit, and what is not."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.tiny_models import (
    DEEPSEEK,
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_NEXT,
    QWEN35,
    QWEN35_MOE,
    random_tensor,
    random_weights,
)

from spec_jax.drafters.mtp.checkpoint import read_mtp, write_mtp
from spec_jax.drafters.mtp.model import MtpConfig, mtp_head, mtp_table
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models import transformer
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.config import RopeConfig
from spec_jax.models.families import module_layer

L, D = LLAMA.num_hidden_layers, 16
YARN = RopeConfig("yarn", 5e5, factor=4.0, original_max_position_embeddings=16, mscale_all_dim=0.5)
DENSE = dataclasses.replace(DEEPSEEK, n_routed_experts=None, intermediate_size=24, q_lora_rank=None)
CENTRED = dict(has_zero_centred_norms=True)
HIDDEN_FIRST = dict(order="hidden-first")
ALL_OTHER = dict(taps=(L,), recycles_normed=False, protocol="sequential")
OWN_ENDS = dict(has_own_embed=True, has_own_head=True)
TWO = dict(num_modules=2, protocol="sequential", has_zero_centred_norms=True)
CASES = [
    ("MiMo", QWEN2, HIDDEN_FIRST),
    ("MiMo", LLAMA, HIDDEN_FIRST),
    ("MiMo", QWEN3, HIDDEN_FIRST | ALL_OTHER),
    ("MiMo", LLAMA, HIDDEN_FIRST | dict(num_modules=2, protocol="sequential")),
    ("DeepSeek", LLAMA, {}),
    ("DeepSeek", QWEN2, OWN_ENDS),
    ("DeepSeek", DEEPSEEK, {}),
    ("DeepSeek", dataclasses.replace(DEEPSEEK, rope=YARN), ALL_OTHER),
    ("DeepSeek", DENSE, OWN_ENDS | dict(num_modules=2, protocol="sequential")),
    ("Qwen3-Next", QWEN3_NEXT, CENTRED),
    ("Qwen3-Next", module_layer(QWEN35), CENTRED),
    ("Qwen3-Next", module_layer(QWEN35_MOE), CENTRED),
    ("Qwen3-Next", dataclasses.replace(QWEN3_NEXT, norm_topk_prob=False), CENTRED | ALL_OTHER),
]


def make(layer, **changes):
    layer = dataclasses.replace(layer, num_hidden_layers=1)
    return MtpConfig.of_target(LLAMA, layer=layer, **changes)


def params_of(config, dtype=jnp.float32):
    table = mtp_table(config)

    def module(seed):
        return {
            name: jnp.asarray(
                random_tensor(name, spec.shape, seed),
                jnp.float32 if name == "router_bias" else dtype,
            )
            for name, spec in table.items()
        }

    return {str(i): module(i) for i in range(config.num_modules)}


def write(directory, config, params=None, **options):
    params = params_of(config) if params is None else params
    write_mtp(directory, config, params, target_config=LLAMA, **options)
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("format", "layer", "changes"), CASES)
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, format, layer, changes, dtype):
    config = make(layer, **changes)
    params = params_of(config, dtype)
    write(tmp_path, config, params)
    read = read_mtp(tmp_path, LLAMA, dtype)
    assert (read.format, read.config) == (format, config)
    dtypes = lambda tree: jax.tree.map(lambda w: w.dtype.name, tree)
    assert dtypes(read.params) == dtypes(params)
    jax.tree.map(np.testing.assert_array_equal, read.params, params)
    assert {f.name for f in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def outputs(config, params):
    """Residual streams of one pass over given states and tokens."""
    head = mtp_head(config, transformer.model(LLAMA))
    both = {"head": params, "target": random_weights(LLAMA)}
    states = jnp.asarray(random_tensor("states", (1, 5, D), 0))
    cache = KVCache.create(config.layer, 1, 8, jnp.float32)
    return head.feed(both, states, jnp.asarray([[3, 1, 4, 1, 5]]), cache, 0, None)[0]


@pytest.mark.parametrize(
    ("format", "order"), [("MiMo", "embedding-first"), ("DeepSeek", "hidden-first")]
)
def test_an_explicit_format_changes_the_order_and_not_the_function(tmp_path, format, order):
    config = make(QWEN2, order=order)
    params = params_of(config)
    hf = write(tmp_path, config, params, format=format)
    read = read_mtp(tmp_path, LLAMA)
    other = ({"embedding-first", "hidden-first"} - {order}).pop()
    assert read.config == dataclasses.replace(config, order=other)
    fc = params["0"]["fc"]
    np.testing.assert_array_equal(read.params["0"]["fc"], jnp.concatenate([fc[D:], fc[:D]]))
    np.testing.assert_allclose(
        outputs(read.config, read.params), outputs(config, params), rtol=0, atol=1e-5
    )
    assert hf["model_type"] == ("mimo" if format == "MiMo" else "qwen2")


def test_config_and_tensors_are_those_that_servers_look_for(tmp_path):
    hf = write(tmp_path, make(QWEN2, order="hidden-first"), dtype="bfloat16")
    assert (hf["model_type"], hf["architectures"]) == ("mimo", ["MiMoForCausalLM"])
    assert (hf["num_hidden_layers"], hf["num_nextn_predict_layers"]) == (L, 1)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {x.dtype.name for x in tensors.values()} == {"bfloat16"}
    assert "model.mtp_layers.0.input_proj.weight" in tensors
    hf = write(tmp_path, make(dataclasses.replace(DEEPSEEK, rope=YARN)))
    assert hf["model_type"] == "deepseek_v3" and hf["topk_method"] == "noaux_tc"
    assert hf["rope_scaling"]["type"] == "yarn" and hf["rope_theta"] == 5e5
    tensors = load_file(tmp_path / "model.safetensors")
    assert f"model.layers.{L}.mlp.experts.5.up_proj.weight" in tensors
    hf = write(tmp_path, make(QWEN3_NEXT, **CENTRED))
    assert hf["model_type"] == "qwen3_next" and hf["partial_rotary_factor"] == 0.5
    assert "mtp.fc.weight" in load_file(tmp_path / "model.safetensors")


INVALID_CONFIGS = [
    (make(LLAMA), "mimo", "format is 'mimo'; known: DeepSeek, Qwen3-Next, MiMo"),
    (make(DEEPSEEK), "MiMo", "MiMo cannot hold a layer of DeepseekConfig; use DeepSeek"),
    (make(LLAMA), "Qwen3-Next", "Qwen3-Next cannot hold a layer of .*; use DeepSeek or MiMo"),
    (make(QWEN3_NEXT), None, "has_zero_centred_norms is False; loaders of Qwen3-Next"),
    (make(LLAMA, **CENTRED), None, "has_zero_centred_norms is True; loaders of DeepSeek"),
    (make(QWEN3_NEXT, **TWO), None, "num_modules is 2; the format Qwen3-Next holds one"),
    (make(QWEN2, has_own_head=True), "MiMo", "modules in the format MiMo share both"),
]


@pytest.mark.parametrize(("config", "format", "message"), INVALID_CONFIGS)
def test_what_a_format_cannot_express_is_refused(tmp_path, config, format, message):
    with pytest.raises(ConfigError, match=message):
        write(tmp_path, config, format=format)
    assert not list(tmp_path.iterdir())


def test_modules_for_another_target_or_without_a_weight_are_refused(tmp_path):
    config = make(LLAMA)
    wide = dataclasses.replace(LLAMA, vocab_size=40)
    with pytest.raises(ConfigError, match="for a target of vocabulary 31; this one has 40"):
        write_mtp(tmp_path, config, params_of(config), target_config=wide)
    module = params_of(config)["0"]
    del module["fc"]
    with pytest.raises(WeightsError, match=r"^0\.fc is missing; its config asks for \[32, 16\]"):
        write(tmp_path, config, {"0": module})
    with pytest.raises(WeightsError, match=r"^0\.embed_norm is missing"):
        write(tmp_path, config, {})


def test_our_own_key_is_checked_when_it_is_read(tmp_path):
    hf = write(tmp_path, make(LLAMA))
    for value, message in (
        (3, "mtp_config is 3; expected an object"),
        ({"taps": 3}, "taps are 3; expected a tuple"),
        ({"protocol": "none"}, "protocol is 'none'; known"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(hf | {"mtp_config": value}))
        with pytest.raises(ConfigError, match=message):
            read_mtp(tmp_path, LLAMA)
