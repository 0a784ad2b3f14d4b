"""GGUF files as transformers reads them: logits, and SmolLM2's greedy text."""

import pathlib

import jax
import numpy as np
import pytest
from models.test_gguf import MODELS, TEXTS, bpe
from needs import torch, transformers
from support.gguf_files import write
from support.smollm2 import HAS_SMOLLM2
from support.tiny_models import random_weights

import spec_jax
from spec_jax import zoo
from spec_jax.models import transformer
from spec_jax.models.gguf import read_header

pytest.importorskip("accelerate", reason="transformers reads GGUF with accelerate")
whole = jax.jit(transformer.logits, static_argnames="config")


def in_torch(file: pathlib.Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    for module in model.modules():
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = True  # as llama.cpp has it; transformers reads no such field
    return model.eval()


def logits_of(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize("kind", ["F16", "Q4_1"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_a_file_are_those_of_transformers(tmp_path, name, kind):
    config = MODELS[name]
    write(tmp_path / "tiny.gguf", config, random_weights(config), kind)
    loaded = spec_jax.load_model(tmp_path)
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, (2, 24))
    expected = logits_of(in_torch(tmp_path / "tiny.gguf"), tokens)
    np.testing.assert_allclose(
        whole(loaded.params, tokens, config=loaded.config), expected, 0, 1e-4
    )


@HAS_SMOLLM2
def test_smollm2_writes_what_transformers_does():
    file = zoo.path(zoo.SMOLLM2)
    target = spec_jax.load_model(zoo.SMOLLM2)
    fields = read_header(file).fields
    tokens = fields["tokenizer.ggml.tokens"]
    vocab = {token: i for i, token in enumerate(tokens)}
    specials = {tokens[i] for i in np.flatnonzero(fields["tokenizer.ggml.token_type"] == 3)}
    for text in (*TEXTS, "a<|im_end|> b<|im_start|>2024<|im_end|>"):
        ids = bpe(text, "smollm", vocab, fields["tokenizer.ggml.merges"], specials)
        assert target.tokenizer.encode(text) == ids
    model = in_torch(file)
    decoder = spec_jax.SpeculativeDecoder(target, config=spec_jax.SpeculativeConfig("ngram"))
    turns = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    asked = ("What is the capital of France?", "Write a haiku about 2024.", "Count to nine.")
    prompts = [turns.format(text) for text in asked]
    for prompt, ours in zip(prompts, decoder.generate(prompts, max_new_tokens=24)):
        ids = target.tokenizer.encode(prompt)
        expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24)
        assert list(ours.tokens) == expected[0, len(ids) :].tolist()
    expected = logits_of(model, [ids])
    ours = whole(target.params, np.array([ids]), config=target.config)
    np.testing.assert_allclose(ours, expected, 0, 1e-3)
