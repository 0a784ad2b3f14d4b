"""Directories of ``pytorch_model.bin`` alone, as torch and transformers write them."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from needs import torch
from safetensors.numpy import load_file
from support.meshes import mesh
from support.tiny_models import LLAMA, QWEN2, random_weights

import spec_jax
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.errors import WeightsError
from spec_jax.loading import random_head
from spec_jax.models.checkpoint import load_pretrained, save_pretrained

SINGLE, PICKLE = "model.safetensors", "pytorch_model.bin"


def as_torch(array):
    if array.dtype == jnp.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array)


def pickled(directory, num_files=1, **options):
    """Replaces a directory's safetensors by files of torch."""
    tensors = {name: as_torch(x) for name, x in load_file(directory / SINGLE).items()}
    (directory / SINGLE).unlink()
    if num_files == 1:
        torch.save(tensors, directory / PICKLE, **options)
        return directory
    where = {
        name: f"pytorch_model-0000{i % num_files + 1}-of-0000{num_files}.bin"
        for i, name in enumerate(sorted(tensors))
    }
    for file in set(where.values()):
        torch.save({n: x for n, x in tensors.items() if where[n] == file}, directory / file)
    (directory / f"{PICKLE}.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["one file", "shards", "old"])
def test_the_files_of_torch_are_the_same_model(tmp_path, form, dtype):
    for config in (LLAMA, QWEN2):  # the latter's ends are tied
        directory = tmp_path / config.model_type
        save_pretrained(directory, random_weights(config), config, dtype=dtype)
        expected, _ = load_pretrained(directory, dtype)
        options = {"_use_new_zipfile_serialization": False} if form == "old" else {}
        pickled(directory, 3 if form == "shards" else 1, **options)
        params, again = load_pretrained(directory, dtype)
        assert again == config
        jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("kind", [EagleConfig, MtpConfig])
def test_heads_and_models_are_read_onto_a_mesh(tmp_path, kind):
    save_pretrained(tmp_path / "model", random_weights(LLAMA), LLAMA)
    alone = spec_jax.load_model(pickled(tmp_path / "model"))
    where = mesh("data:4,tensor:2")
    placed = spec_jax.load_model(tmp_path / "model", mesh=where)
    jax.tree.map(np.testing.assert_array_equal, placed.params, alone.params)
    assert not placed.params["layers"]["0"]["q"].sharding.is_fully_replicated
    head = random_head(kind.of_target(LLAMA), jax.random.key(0))
    head.save(tmp_path / "head", alone)
    again = spec_jax.load_draft(pickled(tmp_path / "head"), placed, mesh=where)
    assert again.method == head.method
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)


def test_8_bit_weights_of_torch_are_refused_by_their_dtype(tmp_path):
    save_pretrained(tmp_path, random_weights(LLAMA), LLAMA)
    tensors = torch.load(pickled(tmp_path) / PICKLE)
    name = "model.layers.1.mlp.up_proj.weight"
    torch.save({**tensors, name: tensors[name].to(torch.float8_e4m3fn)}, tmp_path / PICKLE)
    with pytest.raises(WeightsError, match=f"{name} has dtype float8_e4m3fn: quantised"):
        load_pretrained(tmp_path)


def test_a_tensor_that_repeats_its_bytes_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA.to_hf(), "vocab_size": 10**6}))
    tensors = {"model.embed_tokens.weight": torch.zeros(1, 16).expand(10**6, 16)}
    torch.save(tensors, tmp_path / PICKLE)
    with pytest.raises(WeightsError, match=r"shape \[1000000, 16\], but the file holds 64 bytes"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("content", [b"no pickle", b""])
def test_a_damaged_file_is_named(tmp_path, content):
    save_pretrained(tmp_path, random_weights(LLAMA), LLAMA)
    (pickled(tmp_path) / PICKLE).write_bytes(content)
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin cannot be read by torch"):
        load_pretrained(tmp_path)
