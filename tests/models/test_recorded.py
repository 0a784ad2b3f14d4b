"""Recorded values of transformers on torch (by tests/parity/record.py), checked without it."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from support.tiny_models import random_tensor

from spec_jax.config import SamplerConfig
from spec_jax.models import transformer
from spec_jax.models.checkpoint import load_pretrained
from spec_jax.models.tokenizer import Tokenizer
from spec_jax.sampling import make_sampler, process

_FILE = pathlib.Path(__file__).parents[1] / "recorded" / "reference.json"
RECORDED = json.loads(_FILE.read_text())


@pytest.mark.parametrize("model", RECORDED["models"], ids=lambda m: m["name"])
def test_logits_of_a_directory_written_by_transformers(tmp_path, model):
    (tmp_path / "config.json").write_text(json.dumps(model["config"]))
    tensors = {name: random_tensor(name, shape, 0) for name, shape in model["shapes"].items()}
    save_file(tensors, tmp_path / "model.safetensors")
    params, config = load_pretrained(tmp_path)
    run = jax.jit(functools.partial(transformer.logits, config=config))
    expected = np.asarray(model["last_logits"])
    assert np.abs(expected).max() > 0.5
    logits = run(params, jnp.asarray([model["tokens"]]))
    np.testing.assert_allclose(logits[0, -4:], expected, atol=1e-4)


def test_processed_logits():
    recorded = RECORDED["processors"]
    configs = [SamplerConfig(**r["config"]) for r in recorded["results"]]
    logits = np.tile(np.float32(recorded["logits"]), (len(configs), 1, 1))
    B, _, V = logits.shape
    prompt = jnp.tile(jnp.asarray(recorded["seen"]), (B, 1))
    sampler = make_sampler(configs, B, V).start(prompt, jnp.full(B, prompt.shape[1]), V)
    x = np.asarray(jax.jit(process)(logits, sampler))[:, 0]
    lost = lambda row: [-np.inf if value is None else value for value in row]
    expected = np.asarray([lost(r["processed"]) for r in recorded["results"]])
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=2e-6)


def test_greedy_text_of_a_real_model(data_dir):
    directory, recorded = data_dir / "models" / "stories260K", RECORDED["stories260K"]
    if not directory.is_dir():
        pytest.skip("the stories260K model is not among the real inputs")
    prompt, expected = recorded["prompt_ids"], recorded["new_ids"]
    assert Tokenizer.from_directory(directory).encode(recorded["prompt"]) == prompt
    params, config = load_pretrained(directory)
    # Teacher-forced: greedy decoding gives this text if and only if each token is the argmax
    # after the ones before it.
    tokens = jnp.asarray([prompt + expected])
    logits = jax.jit(functools.partial(transformer.logits, config=config))(params, tokens)
    best = np.asarray(logits[0].argmax(axis=-1))[len(prompt) - 1 : -1]
    assert len(expected) == 200 and best.tolist() == expected
