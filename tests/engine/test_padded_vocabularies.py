"""Pairs of one tokenizer whose embeddings are padded to different sizes."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_models import LLAMA, random_weights
from support.tiny_tokenizers import letters

from spec_jax import testing
from spec_jax.drafters.common.vocabulary import aligned
from spec_jax.loading import load_model
from spec_jax.models.checkpoint import save_pretrained


@pytest.mark.parametrize(("size", "draft_size"), [(5, 5), (5, 4), (4, 5)])
def test_padding_is_not_drafted_by_a_model_without_a_tokenizer(size, draft_size):
    """Of three tokens; the sizes of the embeddings differ."""
    target = testing.toy_model(size)._replace(num_tokens=3)
    model = aligned(testing.mock_model(draft_size).model, target)
    logits = model.unembed(None, jnp.arange(float(draft_size)))
    np.testing.assert_array_equal(logits, [0, 1, 2, *[-np.inf] * (size - 3)])


def test_a_stop_token_that_the_tokenizer_lacks_is_said(tmp_path, caplog):
    config = dataclasses.replace(LLAMA, vocab_size=16, eos_token_id=(2, 13))
    save_pretrained(tmp_path, random_weights(config), config, letters(12))
    assert load_model(tmp_path).stop_tokens == (2, 13)
    assert "stop tokens [13] are not in its tokenizer.json, which has 12 ids" in caplog.text
