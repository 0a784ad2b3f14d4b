"""Decoders for a target that is a table of logits: with a draft model, copies, or any head.

A head's layer of attention rounds far below the differences of its logits.
"""

import dataclasses

import jax
from conformance.cells import larger

from spec_jax import SpeculativeConfig, SpeculativeDecoder, testing
from spec_jax.drafters import registry
from spec_jax.loading import random_head
from spec_jax.models.config import ModelConfig

V, K = 6, 3
SHAPES = {
    "chain": {"num_speculative_tokens": K},
    "static": {"tree": (2, 2, 1)},
    "dynamic": {"tree_depth": 3, "tree_top_k": 3, "num_speculative_tokens": 7},
    "small": {"tree": (2, 1)},
}
WAYS = registry.objectives()
SIZES = {
    "dspark": dict(markov_rank=2),
    "dflash2": dict(conv_group_size=1, selector_rank=2, selector_top_k=2),
    "mtp in turn": dict(protocol="sequential", num_modules=K),
}
TARGET = testing.mock_model(V, 0, scale=1.5)
_NOISE = testing.toy_params(V, 1)["logits"]
DRAFT = dataclasses.replace(
    TARGET, name="draft", params={"logits": TARGET.params["logits"] + 0.8 * _NOISE}
)


def head_of(name, vocab_size):
    """A head for a toy target, whose states are its logits."""
    sizes = dict(vocab_size=vocab_size, hidden_size=vocab_size, intermediate_size=6)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    target = ModelConfig(**sizes, num_hidden_layers=1, max_position_embeddings=128)
    _, way = WAYS[name.split()[0]]
    options = dict(taps=(1,)) if "taps" in way.options else {}
    if name == "eagle3":
        options["draft_vocab_size"] = vocab_size - 1
    config = way.new(target, **options, **SIZES.get(name, {}))
    return larger(random_head(config, jax.random.key(3)), 40.0)


def maker(name, shape):
    """``make(target)`` and ``params(target)`` of a certificate; ``shape``: options of a config."""

    def make(target):
        head = head_of(name, target.model.vocab_size)
        config = SpeculativeConfig(head.method, **shape)
        return head.kind.make_drafter(head, target.model, config)

    def params(target):
        V = target.model.vocab_size
        embed = jax.random.normal(jax.random.key(7), (V, V))  # the toy has none
        return {"head": head_of(name, V).params, "target": {**target.params, "embed": embed}}

    return make, params


def parts_of(name, shape="chain"):
    """A drafter, None for a draft model's own, and what holds its parameters."""
    if name in ("standalone", "ngram"):
        return None, DRAFT if name == "standalone" else None
    make, params = maker(name, SHAPES[shape])
    return make(TARGET), dataclasses.replace(TARGET, name="head", params=params(TARGET))


def decoder(name, rule, shape="chain", **options) -> SpeculativeDecoder:
    """A decoder of the toy target; ``options`` are its own."""
    drafter, draft = parts_of(name, shape)
    method = name if drafter is None else WAYS[name.split()[0]][0].name
    config = SpeculativeConfig(method, rejection_sampling_strategy=rule, **SHAPES[shape])
    return SpeculativeDecoder(TARGET, draft, config, drafter=drafter, **options)
