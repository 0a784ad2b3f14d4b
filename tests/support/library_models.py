"""Tiny models of other libraries: the names and shapes of their weights, and their logits.

``python -m support.library_models`` in tests/, with google-tunix and keras-hub installed, writes
tests/recorded/libraries.json, from which tests/models/test_mappings.py needs neither.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import zlib

import numpy as np

FILE = pathlib.Path(__file__).resolve().parents[1] / "recorded" / "libraries.json"
SIZES = {"layers": 2, "vocabulary": 31, "width": 16, "inner": 24, "heads": 4, "kv_heads": 2}
TOKENS = [[3, 1, 4, 1, 5, 9, 2]]
TUNIX = {"llama3": "Llama3", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def weight(name: str, shape) -> np.ndarray:
    """A weight's values, by its name alone; those of a norm are near 1."""
    drawn = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape) * 0.3
    return (1 + drawn if "norm" in name else drawn).astype(np.float32)


def tunix(name: str):
    """Returns the weights by name, and the logits, of a model of tunix."""
    import jax.numpy as jnp
    from flax import nnx, traverse_util

    module = importlib.import_module(f"tunix.models.{name}.model")
    config = module.ModelConfig(
        num_layers=SIZES["layers"],
        vocab_size=SIZES["vocabulary"],
        embed_dim=SIZES["width"],
        hidden_dim=SIZES["inner"],
        num_heads=SIZES["heads"],
        head_dim=4,
        num_kv_heads=SIZES["kv_heads"],
        rope_theta=1_000_000,
        norm_eps=1e-6,
    )
    graph, state = nnx.split(getattr(module, TUNIX[name])(config, rngs=nnx.Rngs(0)))
    flat = traverse_util.flatten_dict(nnx.to_pure_dict(state))
    filled = {path: weight(".".join(map(str, path)), w.shape) for path, w in flat.items()}
    nnx.replace_by_pure_dict(state, traverse_util.unflatten_dict(filled))
    T = len(TOKENS[0])
    mask = jnp.tri(T, dtype=bool)[None]
    given = jnp.asarray(TOKENS), jnp.arange(T)[None], None, mask
    logits = nnx.merge(graph, state)(*given)[0]
    return {".".join(map(str, path)): w for path, w in filled.items()}, logits


def keras_hub():
    """Likewise, of keras-hub's Llama."""
    os.environ["KERAS_BACKEND"] = "jax"
    models = importlib.import_module("keras_hub").models
    backbone = models.LlamaBackbone(
        vocabulary_size=SIZES["vocabulary"],
        num_layers=SIZES["layers"],
        num_query_heads=SIZES["heads"],
        num_key_value_heads=SIZES["kv_heads"],
        hidden_dim=SIZES["width"],
        intermediate_dim=SIZES["inner"],
    )
    for w in backbone.weights:
        w.assign(weight(w.path, w.shape))
    ids = np.asarray(TOKENS)
    hidden = backbone({"token_ids": ids, "padding_mask": np.ones_like(ids)})
    logits = backbone.token_embedding(hidden, reverse=True)
    return {w.path: np.asarray(w) for w in backbone.weights}, logits


def record() -> None:
    found = {f"tunix {name}": tunix(name) for name in TUNIX} | {"keras-hub": keras_hub()}
    text = {
        name: {
            "shapes": {key: w.shape for key, w in weights.items()},
            "logits": np.asarray(logits, np.float32).round(6).tolist(),
        }
        for name, (weights, logits) in found.items()
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in text.items())
    FILE.write_text(f"{{{lines}}}\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(record())
