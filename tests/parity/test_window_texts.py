"""Greedy text of models with sliding windows is that of transformers, at one to five windows."""

import dataclasses

import numpy as np
import pytest
from needs import torch, transformers
from support.tiny_models import random_tensor

from spec_jax import SpeculativeConfig, SpeculativeDecoder, load_model
from spec_jax.models import transformer

WINDOW = 9
SIZE = dict(vocab_size=31, hidden_size=16, intermediate_size=20, num_attention_heads=4)
SIZE |= dict(num_key_value_heads=2, sliding_window=WINDOW, max_position_embeddings=256)
FLAGGED = dict(SIZE, use_sliding_window=True)
MODELS = {
    "Mistral": dict(SIZE, num_hidden_layers=2),
    "Qwen2": dict(FLAGGED, num_hidden_layers=3, max_window_layers=1),
    "Qwen3": dict(
        FLAGGED,
        num_hidden_layers=4,
        head_dim=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
}
LENGTHS = (3, WINDOW, 2 * WINDOW + 1, 4 * WINDOW)


@pytest.mark.parametrize("family", MODELS)
def test_greedy_text_is_transformers(family, tmp_path):
    """By itself and with drafts, of prompts that are fed whole and in chunks, in one batch."""
    config = getattr(transformers, f"{family}Config")(**MODELS[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.from_numpy(2 * random_tensor(name, tuple(weight.shape), 0)))
    model.save_pretrained(tmp_path)
    draw = np.random.RandomState(0)
    prompts = [draw.randint(0, 31, n).tolist() for n in LENGTHS]
    options = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = []
    for ids in prompts:
        one = torch.tensor([ids])
        text = model.generate(one, attention_mask=torch.ones_like(one), **options)
        expected.append(text[0, len(ids) :].tolist())
    target = load_model(tmp_path)
    rolling = dataclasses.replace(target.config, max_pass=12)
    target = dataclasses.replace(target, config=rolling, model=transformer.model(rolling))
    assert any(rolling.windows)
    ngram = SpeculativeConfig("ngram", rejection_sampling_strategy="greedy")
    for drafts, chunk in ((None, None), (ngram, 4)):
        decoder = SpeculativeDecoder(target, config=drafts, prefill_chunk=chunk)
        rows = decoder.generate(prompts, 20, stop_tokens=())
        assert [list(row.tokens) for row in rows] == expected
