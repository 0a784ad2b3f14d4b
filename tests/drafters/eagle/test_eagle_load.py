"""``load_head``: a published head, loaded for its target, and what is refused."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support.published_heads import HEADS, TARGET, D, V, write_head
from support.tiny_models import random_tensor, random_weights

import spec_jax
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel
from spec_jax.models import transformer

MODEL = LoadedModel("tiny", transformer.model(TARGET), random_weights(TARGET), config=TARGET)


def test_a_head_loads_for_its_target_in_the_targets_dtype(tmp_path):
    head = spec_jax.load_head(write_head(tmp_path), MODEL)
    assert head.name == str(tmp_path)
    assert head.config == HEADS["eagle-3"][2]
    assert head.params["fc"].dtype == jnp.float32
    assert any("usual" in note for note in head.notes)
    half = spec_jax.load_head(tmp_path, MODEL, "bfloat16", taps=(0, 1, 2))
    assert (half.params["fc"].dtype.name, half.config.taps) == ("bfloat16", (0, 1, 2))
    with pytest.raises(ConfigError, match="dtype is 'int8'"):
        spec_jax.load_head(tmp_path, MODEL, "int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_copy_of_the_targets_embedding_is_left_out(tmp_path, dtype):
    copy = {"embed_tokens.weight": np.asarray(MODEL.params["embed"].astype(dtype))}
    head = spec_jax.load_head(write_head(tmp_path, "eagle-1", tensors=copy), MODEL)
    assert "embed" not in head.params and not head.config.own_embed
    assert "copy of the target's" in " ".join(head.notes)


def test_an_embedding_that_differs_from_the_targets_is_the_heads_own(tmp_path):
    other = random_tensor("other", (V, D), 0)
    directory = write_head(tmp_path, tensors={"embed_tokens.weight": other})
    head = spec_jax.load_head(directory, MODEL)
    assert head.config.own_embed and "keeps its own" in " ".join(head.notes)
    np.testing.assert_array_equal(head.params["embed"], other)
    shared = spec_jax.load_head(directory, MODEL, own_embed=False)
    assert "embed" not in shared.params and "shares the target's" in " ".join(shared.notes)


BARE = dataclasses.replace(MODEL, config=None)
TARGETS = [
    (None, None, "target is None; expected a LoadedModel"),
    (BARE, None, "tiny has no config"),
    (MODEL, 3, "dtype is 3"),
]


@pytest.mark.parametrize(("target", "dtype", "message"), TARGETS, ids=["none", "bare", "dtype"])
def test_arguments_of_another_kind_are_refused(tmp_path, target, dtype, message):
    with pytest.raises(ConfigError, match=message):
        spec_jax.load_head(write_head(tmp_path), target, dtype)
