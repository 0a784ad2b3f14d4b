"""DeepSeek-V3: attention over latents, and weights of eight bits."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.mtp_modules import write_with_modules
from support.tiny_models import DEEPSEEK_TARGET, random_tokens, random_weights

import spec_jax
from spec_jax.errors import WeightsError
from spec_jax.inspection import inspect
from spec_jax.models import transformer
from spec_jax.models.caches.latent import LatentCache
from spec_jax.models.config import RopeConfig

YARN = dict(factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.2)
TARGET = dataclasses.replace(
    DEEPSEEK_TARGET, num_attention_heads=4, rope=RopeConfig("yarn", **YARN)
)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A directory as published: the model, and its module as the layer after the last one."""
    at = tmp_path_factory.mktemp("deepseek")
    write_with_modules(at, TARGET)
    return at


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
    module = lambda at, **options: spec_jax.load_mtp(tmp_path / at, target, **options).params
    for options in ({}, {"mesh": "data:2,tensor:2"}):
        jax.tree.map(np.testing.assert_array_equal, module("quantised", **options), module("plain"))
    found = inspect(tmp_path / "quantised")
    assert found.refused is None and found.num_params == inspect(tmp_path / "plain").num_params
    assert not any("scale_inv" in note for note in found.notes)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    without = {n: x for n, x in tensors.items() if n != f"{name}_scale_inv"}
    for changed, words in (
        (tensors | {name: expected[name]}, f"but {name} is stored as float32; only 8-bit"),
        (
            without | {f"{name}_scale_inv": np.ones((1, 1), np.float32)},
            r"has shape \[1, 1\]; .* bl",
        ),
        (without, f"{name}_scale_inv is missing, of float8_e4m3fn"),
    ):
        save_file(changed, tmp_path / "quantised" / "model.safetensors")
        with pytest.raises(WeightsError, match=words):
            load("quantised")
