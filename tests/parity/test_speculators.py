"""Agreement with the ``speculators`` package: a head that we export is there the same head."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from speculators_models import load_theirs, torch
from support import block_drafts, parallel_heads
from support.smollm2 import HAS_SMOLLM2
from support.tiny_models import LLAMA, QWEN3, random_tensor, random_tokens, random_weights
from test_speculators_blocks import CASES as BLOCKS

from spec_jax import load_draft, load_model, zoo
from spec_jax.drafters.common.vocabulary import draft_ids
from spec_jax.drafters.eagle.model import (
    EagleConfig,
    forward,
    head_table,
    join_features,
    recycle,
    unembed,
)
from spec_jax.loading import LoadedHead
from spec_jax.models import transformer
from spec_jax.models.checkpoint import save_pretrained
from spec_jax.models.config import RopeConfig

# What the package and those that it imports warn of is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 3  # one from the target's states, two recycled
V, U, D, T = 31, 20, 16, 9
TARGET = dataclasses.replace(LLAMA, num_hidden_layers=8, max_position_embeddings=64)
TEXT = "The house stands at the end of a road, and a garden lies behind it."
IDS = np.sort(np.random.RandomState(0).permutation(V)[:U])
LLAMA_3 = RopeConfig("llama3", 5e5, factor=8.0, original_max_position_embeddings=32)
HEADS = {
    "plain": {},
    "whole vocabulary": dict(draft_vocab_size=V),
    "normalised residual": dict(norm_before_residual=True),
    "norm over all states": dict(norm_before_fc=True, norm_output=True),
    "norm of each state": dict(fc_norm=True, norm_before_residual=True, norm_output=True),
    "two states": dict(taps=(3, 8)),
    "an embedding of its own": dict(own_embed=True),
    "biases": dict(layer=dict(attention_bias=True, mlp_bias=True)),
    "scaled rope": dict(layer=dict(rope=LLAMA_3)),
    "qwen3": dict(layer=dict(model_type="qwen3", rope=QWEN3.rope, num_key_value_heads=1)),
}


def make_head(name):
    changes = {"draft_vocab_size": U, **HEADS[name]}
    layer = changes.pop("layer", {})
    config = EagleConfig.of_target(TARGET, **changes)
    size = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5)
    config = dataclasses.replace(config, layer=dataclasses.replace(config.layer, **size | layer))
    table = head_table(config)
    params = {n: jnp.asarray(random_tensor(n, spec.shape, 1)) for n, spec in table.items()}
    if config.layer.vocab_size < V:
        params["d2t"] = jnp.asarray(IDS - np.arange(U), jnp.int32)
    return LoadedHead(name, config, params)


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    """The targets as loaded, by their configs."""
    found = {}
    for config in (TARGET, LLAMA):
        path = tmp_path_factory.mktemp("target")
        save_pretrained(path, random_weights(config), config)
        found[config] = load_model(path)
    return found


def their_logits(model, features, tokens):
    """Logits f32[STEPS,T,U] of every row and step, the tokens of later steps given."""
    found = []
    handle = model.lm_head.register_forward_hook(lambda m, x, y: found.append(y[0].numpy()))
    inputs = [torch.from_numpy(x)[None] for x in (features, tokens)]
    ids = {"document_ids": torch.zeros(1, T, dtype=torch.long)}
    with torch.no_grad():
        model(*inputs, **ids, position_ids=torch.arange(T)[None], ttt_steps=STEPS)
    handle.remove()
    return np.stack(found)


def our_logits(head, target, row, features, tokens):
    """Logits f32[STEPS,V] behind the pairs up to ``row``, its state recycled with later tokens."""
    config, model = head.config, transformer.model(target.config)
    both = {"head": head.params, "target": target.params}
    embed = both["head" if config.own_embed else "target"]["embed"]

    @jax.jit
    def step(states, at):
        x, _ = forward(head.params, embed, states, tokens[None], None, config=config)
        following = states.at[:, at + 1].set(recycle(head.params, x[:, at], config))
        return following, unembed(both, x[0, at], config, model)

    states = join_features(head.params, features[None], config)
    logits = []
    for at in range(row, row + STEPS):  # what stands behind a row does not move it
        states, found = step(states, at)
        logits.append(found)
    return np.stack(logits)


def check_logits(folder, head, target, tokens):
    """Compares the logits of a head with those of the same head as we export it."""
    head.save(folder, target, format="speculators")
    model = load_theirs(folder, "eagle3")
    tokens = np.array(tokens, np.int64)
    tapped = transformer.model(target.config, head.config.taps)
    output = tapped.forward(target.params, jnp.asarray(tokens[None]))
    features = np.array(output.features[0])
    theirs = their_logits(model, features, tokens)
    ids = draft_ids(head.params)
    ids = np.arange(target.config.vocab_size) if ids is None else np.asarray(ids)
    if len(ids) < target.config.vocab_size:
        np.testing.assert_array_equal(model.d2t.numpy() + np.arange(len(ids)), ids)
        np.testing.assert_array_equal(np.flatnonzero(model.t2d.numpy()), ids)
    assert np.abs(theirs).max() > 0.5  # an error would show
    for row in (0, T - STEPS):
        ours = our_logits(head, target, row, features, tokens)
        np.testing.assert_allclose(ours[:, ids], theirs[:, row], rtol=0, atol=1e-4)
        assert np.isneginf(np.delete(ours, ids, axis=1)).all()


@pytest.mark.parametrize("name", HEADS)
def test_an_exported_head_has_the_same_logits_there(tmp_path, targets, name):
    head = make_head(name)
    if head.config.layer.vocab_size < V:
        np.testing.assert_array_equal(draft_ids(head.params), IDS)
    check_logits(tmp_path, head, targets[TARGET], random_tokens(T))


@HAS_SMOLLM2
def test_the_head_of_the_zoo_has_the_same_logits_there(tmp_path):
    whole = load_model(zoo.SMOLLM2)
    save_pretrained(tmp_path / "target", whole.params, whole.config)  # the form that they read
    target = load_model(tmp_path / "target")
    head = load_draft("zoo/smollm2-eagle3", target)
    check_logits(tmp_path / "head", head, target, whole.tokenizer.encode(TEXT)[:T])


EVERY = {  # what they call a head, its target, and the head
    **{
        f"eagle-3, {name}": ("eagle3", TARGET, functools.partial(make_head, name)) for name in HEADS
    },
    **{
        name: (config.name.replace("-", ""), LLAMA, functools.partial(heads.head_of, config))
        for heads, configs in ((parallel_heads, parallel_heads.HEADS), (block_drafts, BLOCKS))
        for name, config in configs.items()
    },
}


@pytest.mark.parametrize("name", EVERY)
def test_what_they_save_again_is_the_same_head_here(tmp_path, targets, name):
    kind, config, make = EVERY[name]
    head, target = make(), targets[config]
    head.save(tmp_path / "ours", target, format="speculators")
    load_theirs(tmp_path / "ours", kind).save_pretrained(tmp_path / "theirs")
    for path in (tmp_path / "ours", tmp_path / "theirs"):
        again = load_draft(path, target)
        assert again.config == head.config and again.format == "speculators"
        jax.tree.map(np.testing.assert_array_equal, again.params, head.params)
