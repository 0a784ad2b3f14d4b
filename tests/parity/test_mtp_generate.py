"""Drafts and text of transformers' own MTP decoding, ``generate(use_mtp=True)``, against ours."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from needs import torch, transformers
from support.decoders import prefill, propose
from support.mtp_modules import write_with_modules
from support.tiny_models import DEEPSEEK_TARGET, GLM4_MOE, QWEN35, QWEN35_MOE
from transformers.cache_utils import MtpCache
from transformers.generation import candidate_generator
from transformers.modeling_layers import MtpModel

import spec_jax
from spec_jax import SpeculativeConfig, SpeculativeDecoder

PROMPT, NUM_NEW = [3, 1, 4, 1, 5], 24
# They draft as many tokens as there are modules, one each.
CASES = {
    "glm-4.5": (GLM4_MOE, 1),
    "glm-4.5, three modules": (GLM4_MOE, 3),
    "deepseek, two modules": (DEEPSEEK_TARGET, 2),
    "qwen3.5": (QWEN35, 1),
    "qwen3.5, experts": (QWEN35_MOE, 1),
}


OPTIONS = dict(max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0)


def generate(model, num_modules, monkeypatch):
    """Their text, and what each round drafted after how many tokens of it."""
    rounds, generator = [], candidate_generator.MTPCandidateGenerator
    theirs, prompt = generator.get_candidates, torch.tensor([PROMPT])
    # The class lists the modules' layers of the published sizes alone.
    numbers = range(model.config.num_hidden_layers, model.config.num_hidden_layers + num_modules)
    model._keys_to_ignore_on_load_unexpected = {rf"model\.layers\.{i}\." for i in numbers}

    def get_candidates(self, input_ids, *args, **options):
        candidates = theirs(self, input_ids, *args, **options)
        rounds.append((input_ids.shape[1], candidates[0][0, input_ids.shape[1] :].tolist()))
        return candidates

    monkeypatch.setattr(generator, "get_candidates", get_candidates)
    mask = torch.ones_like(prompt)
    text = model.generate(prompt, attention_mask=mask, use_mtp=True, **OPTIONS)[0].tolist()
    return text, rounds[1:]  # the first has none


def draft_after_every_token(model):
    """The same of a model with states, which they do not roll back: plain text, and their modules
    over every beginning of it.
    """
    prompt = torch.tensor([PROMPT])
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), **OPTIONS)
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    modules, rounds = MtpModel.from_pretrained(model), []
    hidden = model.model(text).last_hidden_state
    for n in range(len(PROMPT) + 1, text.shape[1] + 1):
        cache, position = MtpCache(config=model.config.get_mtp_config()), torch.arange(1, n)[None]
        with torch.no_grad():
            drafts = modules(text[:, 1:n], hidden[:, : n - 1], None, position, cache)[0]
        rounds.append((n, drafts[0].tolist()))
    return text[0].tolist(), rounds


@pytest.mark.representatives("glm-4.5, three modules", "qwen3.5")
@pytest.mark.parametrize("name", CASES)
def test_drafts_and_text_are_those_of_transformers(tmp_path, monkeypatch, name):
    """All of its drafts, also where a module reads the state of the one before it."""
    config, num_modules = CASES[name]
    config = dataclasses.replace(config, max_position_embeddings=64)
    protocol = "recycled" if num_modules == 1 else "sequential"
    write_with_modules(tmp_path, config, num_modules=num_modules, protocol=protocol)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    if hasattr(config, "layer_types"):
        text, rounds = draft_after_every_token(model)
    else:
        text, rounds = generate(model, num_modules, monkeypatch)
    assert len(rounds) > 10 and len({tuple(drafts) for _, drafts in rounds}) > 3

    target = spec_jax.load_model(tmp_path)
    modules = spec_jax.load_draft(tmp_path, target)
    assert modules.config.num_modules == num_modules and modules.config.recycles_normed
    greedy = SpeculativeConfig("mtp", num_modules, rejection_sampling_strategy="greedy")
    decoder = SpeculativeDecoder(target, modules, greedy)
    assert list(decoder.generate(PROMPT, NUM_NEW).tokens) == text[len(PROMPT) :]
    engine = decoder.engine()
    # The target emits the last token of each prefix itself, which is then pending.
    prefixes = [text[: n - 1] for n, _ in rounds]
    state = prefill(engine.system, engine.params(), prefixes, 8, width=32)
    proposal = propose(engine.system, engine.params(), state)
    np.testing.assert_array_equal(proposal.tokens, [drafts for _, drafts in rounds])
