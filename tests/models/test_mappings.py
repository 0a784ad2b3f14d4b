"""Weights by other libraries' names: docs/examples/mappings.py, and checkpoints of orbax."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from support.library_models import FILE, SIZES, TOKENS, weight
from support.tiny_models import LLAMA, random_weights

from docs.examples import mappings
from spec_jax import LoadedModel, load_model
from spec_jax.errors import WeightsError
from spec_jax.models import transformer
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.models.config import ModelConfig, RopeConfig
from spec_jax.models.params import declared, walk

RECORDED = json.loads(FILE.read_text(encoding="utf-8"))
FAMILY = {"tunix llama3": "llama", "tunix qwen2": "qwen2", "tunix qwen3": "qwen3"}


def config_of(name: str, **changes) -> ModelConfig:
    kind = FAMILY.get(name, "llama")
    sizes = dict(
        vocab_size=SIZES["vocabulary"],
        hidden_size=SIZES["width"],
        intermediate_size=SIZES["inner"],
        num_hidden_layers=SIZES["layers"],
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        head_dim=4,
        rms_norm_eps=1e-6,
        rope=RopeConfig(rope_theta=1e6 if name in FAMILY else 1e4),
        model_type=kind,
        attention_bias=kind == "qwen2",
    )
    return ModelConfig(**sizes | changes)


def logits_of(target: LoadedModel) -> np.ndarray:
    return transformer.logits(target.params, jnp.asarray(TOKENS), config=target.config)


@pytest.mark.parametrize("name", RECORDED)
def test_a_librarys_weights_give_its_logits(name):
    names = mappings.KERAS_HUB if name == "keras-hub" else mappings.TUNIX
    weights = {key: weight(key, shape) for key, shape in RECORDED[name]["shapes"].items()}
    target = LoadedModel.from_params(config_of(name), mappings.leaf_of(weights, names))
    expected = np.asarray(RECORDED[name]["logits"])
    assert np.abs(logits_of(target) - expected).max() < 1e-4
    known = {names[key][0].replace("{i}", "0") for key in names}
    assert {key for key in weights if "1" not in key} <= known  # each of their weights is read


def maxtext_logits(weights, has_pairs: bool) -> np.ndarray:
    """The forward pass of MaxText's layout in NumPy: no scale of scores, pairs as complex numbers.

    Source: layers/attentions.py and layers/embeddings.py of maxtext 0.2.5.
    """

    def norm(x, w):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6) * w

    def rotated(x):  # [T,N,H]
        T, _, H = x.shape
        angles = np.arange(T)[:, None] * 1e4 ** (-np.arange(0, H, 2) / H)
        turn = np.exp(1j * angles)[:, None]
        if has_pairs:
            turned = (x[..., ::2] + 1j * x[..., 1::2]) * turn
            return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
        turned = (x[..., : H // 2] + 1j * x[..., H // 2 :]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    x = weights["token_embedder/embedding"][TOKENS[0]]
    T = len(x)
    for i in range(SIZES["layers"]):
        own = {
            key.removeprefix("decoder/layers/"): w.take(i, 1)
            for key, w in weights.items()
            if "layers" in key
        }
        h = norm(x, own["pre_self_attention_layer_norm/scale"])
        q, k, v = (
            np.einsum("td,dnh->tnh", h, own[f"self_attention/{name}/kernel"])
            for name in ("query", "key", "value")
        )
        q, k = rotated(q), rotated(k)
        k, v = (np.repeat(y, SIZES["heads"] // SIZES["kv_heads"], axis=1) for y in (k, v))
        scores = np.where(np.tri(T, dtype=bool), np.einsum("tnh,snh->nts", q, k), -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        seen = np.einsum("nts,snh->tnh", shares, v)
        x = x + np.einsum("tnh,nhd->td", seen, own["self_attention/out/kernel"])
        h = norm(x, own["post_self_attention_layer_norm/scale"])
        gate = h @ own["mlp/wi_0/kernel"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ own["mlp/wi_1/kernel"])) @ own["mlp/wo/kernel"]
    return norm(x, weights["decoder/decoder_norm/scale"]) @ weights["decoder/logits_dense/kernel"]


@pytest.mark.parametrize("has_pairs", [False, True])
def test_stacked_layers_of_maxtext_give_the_logits_of_its_conventions(has_pairs):
    D, F, V, L = (SIZES[name] for name in ("width", "inner", "vocabulary", "layers"))
    shapes = {
        "token_embedder/embedding": (V, D),
        "decoder/decoder_norm/scale": (D,),
        "decoder/logits_dense/kernel": (D, V),
        "decoder/layers/pre_self_attention_layer_norm/scale": (D, L),
        "decoder/layers/self_attention/query/kernel": (D, L, 4, 4),
        "decoder/layers/self_attention/key/kernel": (D, L, 2, 4),
        "decoder/layers/self_attention/value/kernel": (D, L, 2, 4),
        "decoder/layers/self_attention/out/kernel": (4, L, 4, D),
        "decoder/layers/post_self_attention_layer_norm/scale": (D, L),
        "decoder/layers/mlp/wi_0/kernel": (D, L, F),
        "decoder/layers/mlp/wi_1/kernel": (D, L, F),
        "decoder/layers/mlp/wo/kernel": (F, L, D),
    }
    weights = {name: weight(name, shape) for name, shape in shapes.items()}
    leaf = mappings.leaf_of(weights, mappings.maxtext(4, has_pairs=has_pairs), axis=1)
    found = logits_of(LoadedModel.from_params(config_of("maxtext"), leaf))
    assert np.abs(found[0] - maxtext_logits(weights, has_pairs)).max() < 1e-4


def named(params, config) -> dict:
    """The weights by our name and the number of the layer."""
    keys = [(name, layer) for name, _, layer in declared(config)]
    return dict(zip(keys, (np.asarray(w) for *_, w in walk(config, params))))


@pytest.mark.parametrize("is_stacked", [False, True])
def test_a_checkpoint_of_orbax_with_a_config_is_a_model(tmp_path, is_stacked):
    stored = dataclasses.replace(LLAMA, scan_layers=is_stacked)
    params = random_weights(stored)
    save_pretrained(tmp_path, params, stored)
    (tmp_path / "model.safetensors").unlink()
    with ocp.StandardCheckpointer() as writer:
        writer.save(tmp_path / "params", {"params": params} if is_stacked else params)
    for scan in (False, True):
        found = load_model(tmp_path, scan_layers=scan)
        expected = named(params, stored)
        for key, w in named(found.params, found.config).items():
            np.testing.assert_array_equal(w, expected[key])
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(WeightsError, match=r"holds .* of layer 1, which its config.json does not"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(WeightsError, match="attention_norm of layer 2 is missing"):
        load_model(tmp_path)
    (tmp_path / "params" / "_METADATA").write_text("{")
    with pytest.raises(WeightsError, match="cannot be read as an orbax checkpoint"):
        load_model(tmp_path)


def test_weights_that_cannot_be_used_are_named():
    weights = named(random_weights(LLAMA), LLAMA)

    def refused(at, w):
        changed = weights | {at: w}
        with pytest.raises(WeightsError) as error:
            LoadedModel.from_params(
                LLAMA, lambda *at: changed[at]() if at[0] == "q" else changed[at]
            )
        return str(error.value)

    weights |= {at: functools.partial(np.asarray, w) for at, w in weights.items() if at[0] == "q"}
    assert "o of layer 1 is not finite in float32" in refused(("o", 1), weights["o", 1] * np.nan)
    assert "q of layer 1: ValueError('cannot reshape array of size 12" in refused(
        ("q", 1), lambda: np.zeros(12).reshape(5)
    )
