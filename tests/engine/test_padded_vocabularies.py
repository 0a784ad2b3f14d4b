"""Pairs of one tokenizer whose embeddings are padded to different sizes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import LLAMA, random_weights
from support.tiny_tokenizers import letters

from spec_jax import testing
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.drafters.common.vocabulary import aligned
from spec_jax.drafters.standalone.model import standalone
from spec_jax.loading import LoadedModel, load_model
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.rules import make_rule

N = 3  # tokens; further ids are padding
WARM = SamplerConfig(temperature=1.0)


def toy(size: int, seed: int) -> LoadedModel:
    """A toy of N tokens and ``size`` ids. Its table would emit padding with near certainty."""
    real = np.random.default_rng(seed).standard_normal((N, N, N)).astype(np.float32)
    table = np.full((size, size, size), 30.0, np.float32)
    table[:N, :N, :N] = real
    model = testing.toy_model(size)
    if size > N:
        mask = lambda params, hidden: jnp.where(jnp.arange(size) < N, hidden, -jnp.inf)
        model = model._replace(num_tokens=N, unembed=mask)
    params = {"logits": jnp.asarray(table.reshape(-1, size)), "real": real}
    return LoadedModel(f"toy of {size}", model, params, letters(N))


def real_logits(params, tokens):
    a, b = (0, *tokens)[-2:]
    return params["real"][a, b]


@pytest.mark.parametrize("sizes", [(5, 4), (4, 5)], ids=str)
def test_enumerated_distribution_is_the_targets(sizes):
    target, draft = toy(sizes[0], 0), toy(sizes[1], 1)
    V = sizes[0]

    def whole(logits):
        return np.concatenate([logits, np.full(V - N, -np.inf)])

    def draft_distribution(row, output, drafted):
        logits = whole(real_logits(draft.params, (*row.prompt, *output, *drafted)))
        return testing.reference_distribution(logits, row.draft, row.prompt, output)

    testing.certify_rule(
        make_rule(SpeculativeConfig(rejection_sampling_strategy="residual")),
        vocab_size=V,
        num_draft=2,
        num_tokens=3,
        target=target.model,
        drafter=standalone(aligned(draft.model, target.model)),
        rows=[testing.Row((0, 1), WARM, SamplerConfig(temperature=0.7))],
        params={"target": target.params, "draft": draft.params},
        draft_distribution=draft_distribution,
        logits_of=lambda params, tokens: whole(real_logits(params, tokens)),
    )


def test_padding_is_not_drafted_by_a_model_without_a_tokenizer():
    target, draft = toy(5, 0), testing.mock_model(5)
    logits = aligned(draft.model, target.model).unembed(None, jnp.arange(5.0))
    np.testing.assert_array_equal(logits, [0, 1, 2, -np.inf, -np.inf])


def test_a_stop_token_that_the_tokenizer_lacks_is_said(tmp_path, caplog):
    config = dataclasses.replace(LLAMA, vocab_size=16, eos_token_id=(2, 13))
    save_pretrained(tmp_path, random_weights(config), config, letters(12))
    assert load_model(tmp_path).stop_tokens == (2, 13)
    assert "stop tokens [13] are not in its tokenizer.json, which has 12 ids" in caplog.text
