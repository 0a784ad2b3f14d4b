"""Shapes of trees, and the rules that accept in them, one round at a time."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.decoders import rule
from support.trees import BUSH, PLAIN

from spec_jax.config import SamplerConfig
from spec_jax.contracts import Noise, Proposal, TargetScores
from spec_jax.drafters.standalone.model import standalone
from spec_jax.errors import ConfigError
from spec_jax.rules import batched, tree
from spec_jax.testing import Row, certify_rule, ragged, toy_model
from spec_jax.tree import DynamicTree, Tree, paths

# ----------------------------------------------------------------------------- shapes


def test_a_tree_is_described_by_branching_paths_or_parents():
    assert Tree.branching((2, 1)).parents == (0, 0, 1, 2)
    listed = Tree.from_paths([[1], [0], [0, 1], [0, 0], [1, 0], [0, 0, 0]])
    assert listed == BUSH
    assert (BUSH.num_nodes, BUSH.depth, BUSH.max_children, BUSH.num_fed) == (6, 3, 2, 3)


INVALID_TREES = [
    (lambda: Tree((0, 3, 0)), "node 2 of the tree has parent 3"),
    (lambda: Tree((0, 1, 0)), "order of their depths"),
    (lambda: Tree(()), "one node or more"),
    (lambda: Tree.from_paths([[0], [1, 0]]), r"lists \[1, 0\] and not \[1\]"),
    (lambda: Tree.from_paths([[0], [0]]), r"lists \[0\] twice"),
    (lambda: Tree.from_paths([[]]), r"lists \[\] as a node"),
    (lambda: DynamicTree(60, 2, 3), "60 nodes; 2 levels of 3 have 2 to 12"),
    (lambda: DynamicTree(4, 2, 0), "top_k of the tree is 0"),
]


@pytest.mark.parametrize(("make", "message"), INVALID_TREES)
def test_a_tree_that_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_paths_are_the_ways_from_the_root():
    seen = np.asarray(paths(jnp.asarray(BUSH.parents), BUSH.depth))
    for node in range(7):
        way, at = {0}, node
        while at:
            way.add(at)
            at = BUSH.parents[at - 1]
        assert set(np.flatnonzero(seen[node])) == way


# ------------------------------------------------------------------------------ rules


def random_round(parents, *, seed=0, size=256, vocab=4, is_sampled=True):
    """Random distributions, drafts and noise of many rows; ``parents`` None: a chain of three."""
    draw = np.random.default_rng(seed)
    K = 3 if parents is None else len(parents)
    dist = lambda *shape: draw.dirichlet(np.ones(vocab), shape).astype(np.float32)
    logits = np.log(dist(size, K + 1))
    proposal = Proposal(
        jnp.asarray(draw.integers(0, vocab, (size, K)), jnp.int32),
        jnp.asarray(draw.integers(0, K + 1, size), jnp.int32),
        probs=dist(size, K) if is_sampled else None,
        parents=None if parents is None else jnp.tile(jnp.asarray(parents), (size, 1)),
        tree_depth=0 if parents is None else Tree(parents).depth,
    )
    uniforms = draw.random((size, K), np.float32)
    return TargetScores(logits, logits), proposal, uniforms, draw


@functools.partial(jax.jit, static_argnames="rule")
def accepted(rule, scores, proposal, noise):
    return rule.accept(scores, proposal, noise)


@pytest.mark.representatives(
    "residual-sampled", "traversal-deterministic", "match-sampled", "greedy-deterministic"
)
@pytest.mark.parametrize("is_sampled", [True, False], ids=["sampled", "deterministic"])
@pytest.mark.parametrize("name", ["residual", "traversal", "match", "greedy"])
def test_on_a_chain_a_tree_rule_is_the_chain_rule(name, is_sampled):
    scores, proposal, uniforms, draw = random_round(None, is_sampled=is_sampled)
    depth = 4 if name == "match" else 1
    noise = Noise(uniforms, draw.gumbel(size=(256, depth, 4)).astype(np.float32))
    as_tree = proposal.replace(parents=jnp.tile(jnp.arange(3), (256, 1)), tree_depth=3)
    a = accepted(rule(name), scores, proposal, noise)
    b = accepted(rule(name), scores, as_tree, noise)
    np.testing.assert_array_equal(a.n_accept, b.n_accept)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.accept_probs, b.accept_probs, atol=1e-5)
    np.testing.assert_allclose(a.replacement, b.replacement, atol=1e-5)
    np.testing.assert_array_equal(proposal.first_child(a.last), as_tree.first_child(b.last))
    np.testing.assert_array_equal(proposal.levels, as_tree.levels)


def test_deterministic_children_are_recursive_rejection_from_point_masses():
    scores, proposal, uniforms, draw = random_round(BUSH.parents, is_sampled=False)
    noise = Noise(uniforms, draw.gumbel(size=(256, 1, 4)).astype(np.float32))
    no_probs = proposal.replace(probs=jnp.zeros((256, 6, 4)))  # every child is a free choice
    a = jax.jit(batched(tree.deterministic_children))(scores, proposal, noise)
    b = jax.jit(batched(tree.recursive_rejection))(scores, no_probs, noise)
    np.testing.assert_array_equal(a.tokens, b.tokens)
    np.testing.assert_allclose(a.accept_probs, b.accept_probs, atol=1e-5)
    np.testing.assert_allclose(a.replacement, b.replacement, atol=1e-5)


PENALISED = SamplerConfig(temperature=1.0, repetition_penalty=1.4, frequency_penalty=0.4)
THREE = [
    Row((0, 1), SamplerConfig(temperature=0.7), PLAIN),
    Row((2,), SamplerConfig(temperature=1.0, top_k=2), SamplerConfig(temperature=1.3)),
    Row((1, 1, 2), PENALISED, SamplerConfig(temperature=1.0, presence_penalty=0.3)),
]
TINY = Tree((0, 0, 1))


ONE_CHILD = [
    Row((0, 1), PLAIN, SamplerConfig(temperature=1.0, top_k=1)),
    Row((1,), PLAIN, SamplerConfig(temperature=0.0)),
]
TREES = {
    "static": (standalone(toy_model(3), TINY), THREE),
    "truncated": (ragged(standalone(toy_model(3), TINY), lambda length: length % 4), THREE),
    "siblings exhaust the draft": (standalone(toy_model(3), TINY), ONE_CHILD),
    "dynamic": (standalone(toy_model(3), DynamicTree(4, 2, 2)), THREE),
}


@pytest.mark.representatives("static-residual")
@pytest.mark.parametrize("strategy", ["residual", "traversal"])
@pytest.mark.parametrize("name", TREES)
def test_a_sampled_tree_matches_target_distribution(name, strategy):
    drafter, rows = TREES[name]
    assert certify_rule(rule(strategy), drafter=drafter, rows=rows, num_tokens=3) <= 1e-6


def test_traversal_accepts_more_than_recursive_rejection():
    """Of drafts that are drawn from their distributions, siblings without replacement."""
    scores, proposal, uniforms, draw = random_round(TINY.parents, size=4096)
    q, tokens = np.asarray(proposal.probs), np.zeros((4096, 3), np.int32)
    for row, node in np.ndindex(tokens.shape):
        dist = q[row, TINY.parents[node]].astype(float)
        if node == 1:
            dist[tokens[row, 0]] = 0.0
        tokens[row, node] = draw.choice(4, p=dist / dist.sum())
    noise = Noise(uniforms, draw.gumbel(size=(4096, 1, 4)).astype(np.float32))
    proposal = proposal.replace(tokens=jnp.asarray(tokens), n_draft=jnp.full(4096, 3))
    mean = {
        name: float(accepted(rule(name), scores, proposal, noise).n_accept.mean())
        for name in ("residual", "traversal")
    }
    assert mean["traversal"] > mean["residual"] + 0.01
