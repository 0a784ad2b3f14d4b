"""Heads for a target whose embedding is padded to another size than theirs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.eagle_heads import CONFIGS, LAYER, TARGET, D, V, head_of
from support.meshes import mesh
from support.mtp_modules import modules_of, of_target
from support.tiny_models import random_weights
from support.tiny_tokenizers import letters

from spec_jax import LoadedHead, LoadedModel, load_draft
from spec_jax.drafters import loaded as drafts
from spec_jax.drafters.common.vocabulary import resized
from spec_jax.errors import ConfigError
from spec_jax.models import transformer

N = 27  # tokens; V pads them to 31


def target_of(size: int) -> LoadedModel:
    """The tiny target, its embedding padded to another size."""
    params = {**random_weights(TARGET)}
    params |= {"embed": resized(params["embed"], 0, size), "head": resized(params["head"], 1, size)}
    config = dataclasses.replace(TARGET, vocab_size=size)
    model = transformer.model(config, num_tokens=min(N, size))
    return LoadedModel(f"padded to {size}", model, params, letters(N), config)


def whole_head(name):
    config = CONFIGS[name]
    return LoadedHead(name, config, head_of(config))


OWN_ENDS = of_target(has_own_embed=True, has_own_head=True)
HEADS = {
    "eagle-1": lambda: whole_head("eagle-1"),
    "eagle-3": lambda: whole_head("eagle-3"),
    "eagle-3 whole vocabulary": lambda: whole_head("eagle-3 whole vocabulary"),
    "own_embed": lambda: whole_head("own_embed"),
    "modules": lambda: LoadedHead("modules", OWN_ENDS, modules_of(OWN_ENDS)),
}


@pytest.mark.parametrize("size", [N, 29, 40])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_the_same_tokens_for_a_target_of_other_padding(name, size, tmp_path):
    same, other = target_of(V), target_of(size)
    HEADS[name]().save(tmp_path, same)
    head, moved = load_draft(tmp_path, same), load_draft(tmp_path, other)
    moved.check_params()
    assert moved.config.target_vocab_size == size
    assert any(f"vocab_size {V}; the target has {size} ids" in note for note in moved.notes)
    logits = []
    for loaded, target in ((head, same), (moved, other)):
        functions = drafts.head_of(loaded, transformer.model(target.config, loaded.config.taps, N))
        params = {"head": loaded.params, "target": target.params}
        state = jnp.asarray(np.random.RandomState(0).randn(2, functions.width), jnp.float32)
        logits.append(np.asarray(functions.unembed(params, state)))
    assert logits[1].shape[-1] == size and (logits[1][:, N:] == -np.inf).all()
    np.testing.assert_array_equal(logits[1][:, :N], logits[0][:, :N])
    weights = moved.params.get("0", moved.params)
    assert "embed" not in weights or weights["embed"].shape == (size, D)


def test_a_copy_of_the_embedding_is_known_though_it_has_fewer_rows(tmp_path):
    """The head's file holds the embedding as the smaller of two sizes."""
    small, large = target_of(V), target_of(40)
    config = dataclasses.replace(CONFIGS["eagle-3"], own_embed=True)
    params = {**head_of(config), "embed": small.params["embed"]}
    LoadedHead("copy", config, params).save(tmp_path, small)
    head = load_draft(tmp_path, large)
    assert head.config.own_embed  # as the directory says
    np.testing.assert_array_equal(head.params["embed"][:V], small.params["embed"])
    assert not load_draft(tmp_path, large, own_embed=False).config.own_embed


def test_a_head_of_another_size_lies_on_the_targets_mesh(tmp_path):
    where, target = mesh("data:4,tensor:2"), target_of(32)
    HEADS["eagle-3 whole vocabulary"]().save(tmp_path, target_of(V))
    alone = load_draft(tmp_path, target)
    shared = load_draft(tmp_path, target.on_mesh(where), mesh=where)
    assert not shared.params["head"].sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, alone.params, shared.params)


@pytest.mark.parametrize(
    ("target", "size"),
    [
        (dataclasses.replace(target_of(40), tokenizer=None), V),  # nobody knows what is padding
        (target_of(40), N - 1),  # the head lacks a token
        (target_of(40), N + 1024),  # no padding: another vocabulary
    ],
    ids=["no tokenizer", "lacks a token", "another vocabulary"],
)
def test_a_head_of_other_tokens_is_refused(target, size, tmp_path):
    layer = dataclasses.replace(LAYER, vocab_size=size)
    config = dataclasses.replace(CONFIGS["eagle-1"], target_vocab_size=size, layer=layer)
    LoadedHead("other", config, head_of(config)).save(tmp_path, target_of(size))
    with pytest.raises(ConfigError, match=f"for a target of vocabulary {size}; this one has 40"):
        load_draft(tmp_path, target)
