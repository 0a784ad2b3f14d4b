"""Every kind of head leaves the target's distribution as it is, in chains and in trees."""

from __future__ import annotations

import functools

import jax
import pytest
from conformance.cells import larger
from conformance.rounds import prove_rounds
from support import block_heads, block_kind

import spec_jax
from spec_jax import SpeculativeConfig
from spec_jax.drafters import registry
from spec_jax.loading import random_head
from spec_jax.models.config import ModelConfig

WAYS = registry.objectives()
RULES = {"chain": ("residual", "block"), "tree": ("residual", "traversal")}
SHAPES = {"chain": {"num_speculative_tokens": 2}, "tree": {"tree": ((0,), (1,), (0, 0))}}
CASES = [f"{name}-{shape}-{rule}" for name in WAYS for shape in RULES for rule in RULES[shape]]
SIZES = {"dflash2": dict(conv_group_size=1, selector_rank=2, selector_top_k=2)}


def head_of(name, vocab_size):
    """A head for the toy target, whose states are its logits."""
    sizes = dict(vocab_size=vocab_size, hidden_size=vocab_size, intermediate_size=6)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    target = ModelConfig(**sizes, num_hidden_layers=1, max_position_embeddings=128)
    _, way = WAYS[name]
    options = dict(taps=(1,)) if "taps" in way.options else {}
    if name == "eagle3":
        options["draft_vocab_size"] = vocab_size - 1
    config = way.new(target, **options, **SIZES.get(name, {}))
    return larger(random_head(config, jax.random.key(3)), 40.0)


def maker(name, shape):
    """``make(target)`` and ``params(target)`` of a certificate."""

    def make(target):
        config = SpeculativeConfig(WAYS[name][0].name, **SHAPES[shape])
        head = head_of(name, target.model.vocab_size)
        return head.kind.make_drafter(head, target.model, config)

    def params(target):
        V = target.model.vocab_size
        embed = jax.random.normal(jax.random.key(7), (V, V))  # the toy has none
        return {"head": head_of(name, V).params, "target": {**target.params, "embed": embed}}

    return make, params


@pytest.mark.representatives(
    "eagle3-chain-residual", "dflash-chain-block", "treeflash-tree-residual", "peagle-chain-block"
)
@pytest.mark.parametrize("case", CASES)
def test_a_round_is_proved(case):
    name, shape, rule = case.split("-")
    prove_rounds(*maker(name, shape), rule)


@pytest.mark.exhaustive
@pytest.mark.landing("peagle-tree-traversal")
@pytest.mark.parametrize(
    ("name", "shape", "rule"), [("dflash2", "chain", "block"), ("peagle", "tree", "traversal")]
)
def test_a_kind_is_certified(name, shape, rule):
    """Under all settings, with fewer drafts too, and by the loop."""
    make, params = maker(name, shape)
    certificate = spec_jax.certify(rule, make, params=params, trials=300)
    assert certificate.failure is None and certificate.max_error <= 1e-6


@pytest.mark.exhaustive
def test_a_kind_from_outside_of_the_package_is_certified():
    new = functools.cache(lambda V: block_heads.make_head(block_heads.new(V, V, num_layers=1)))
    certificate = spec_jax.certify(
        "residual",
        lambda target: block_kind.block_drafter(new(target.model.vocab_size).config, target.model),
        params=lambda target: {
            "head": new(target.model.vocab_size).params,
            "target": target.params,
        },
        trials=500,
    )
    assert certificate.failure is None and certificate.max_error <= 1e-6
