"""MTP modules written in the formats of other projects: read back bit for bit, and what is not."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.any_head import any_head
from support.tiny_models import DEEPSEEK, LLAMA, QWEN2, QWEN3_NEXT, random_tensor, random_weights

from spec_jax import load_mtp
from spec_jax.drafters.mtp.model import MtpConfig, mtp_head
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.models import transformer
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.config import RopeConfig

TARGET = LoadedModel("tiny", transformer.model(LLAMA), random_weights(LLAMA), config=LLAMA)
L, D = LLAMA.num_hidden_layers, 16
YARN = RopeConfig("yarn", 5e5, factor=4.0, original_max_position_embeddings=16, mscale_all_dim=0.5)


def make(layer, **changes):
    layer = dataclasses.replace(layer, num_hidden_layers=1)
    return MtpConfig.of_target(LLAMA, layer=layer, **changes)


def write(directory, config, params=None, **options):
    head = any_head(config) if params is None else LoadedHead("modules", config, params)
    head.save(directory, TARGET, **options)
    return json.loads((directory / "config.json").read_text())


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
    params = any_head(config).params
    hf = write(tmp_path, config, params, format=format)
    read = load_mtp(tmp_path, TARGET)
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
    hf = write(tmp_path, make(QWEN3_NEXT, has_zero_centred_norms=True))
    assert hf["model_type"] == "qwen3_next" and hf["partial_rotary_factor"] == 0.5
    assert "mtp.fc.weight" in load_file(tmp_path / "model.safetensors")


def test_modules_for_another_target_or_without_a_weight_are_refused(tmp_path):
    config = make(LLAMA)
    wide = dataclasses.replace(LLAMA, vocab_size=40)
    with pytest.raises(ConfigError, match="vocabulary has 31 ids; the target's has 40"):
        target = dataclasses.replace(TARGET, config=wide)
        LoadedHead("modules", config, any_head(config).params).save(tmp_path, target)
    module = any_head(config).params["0"]
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
        ({"protocol": "none"}, "protocol is 'none'; expected one of"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(hf | {"mtp_config": value}))
        with pytest.raises(ConfigError, match=message):
            load_mtp(tmp_path, TARGET)
