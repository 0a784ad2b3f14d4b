"""Acceptance by place in a tree, and the bound of optimal transport, against brute force."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linprog

from spec_jax.config import SpeculativeConfig
from spec_jax.contracts import Noise, Proposal, Round, TargetScores
from spec_jax.evaluation.places import ACCEPTANCE_BY_PLACE, transport_bound
from spec_jax.rules import make_rule
from spec_jax.tree import Tree

V = 6
RESIDUAL = make_rule(SpeculativeConfig("standalone", 3, rejection_sampling_strategy="residual"))


def distributions(rng, count, has_zeros=True):
    p = rng.dirichlet(np.full(V, 0.4), count)
    if has_zeros:
        p = np.where(rng.random(p.shape) < 0.2, 0, p)
        p[:, 0] += 1e-3
    return p / p.sum(axis=1, keepdims=True)


def over_all_sets(p, q, n):
    sets = [list(h) for size in range(V + 1) for h in itertools.combinations(range(V), size)]
    return 1 + min(p[h].sum() - q[h].sum() ** n for h in sets)


def test_only_the_tokens_with_the_largest_ratios_need_a_look():
    rng = np.random.default_rng(0)
    p, q = distributions(rng, 300), distributions(rng, 300)
    n = rng.integers(1, 5, 300)
    found = transport_bound(jnp.asarray(p), jnp.asarray(q), jnp.asarray(n))
    expected = [over_all_sets(*args) for args in zip(p, q, n)]
    np.testing.assert_allclose(found, expected, atol=2e-6)
    overlap = np.minimum(p, q).sum(axis=1)[n == 1]
    np.testing.assert_allclose(found[n == 1], overlap, atol=2e-6)
    assert transport_bound(jnp.asarray(p[0]), jnp.asarray(q[0]), 0) == 0


def test_the_bound_is_the_best_joint_distribution_of_drafts_and_token():
    """By linear programming over all joints of two independent drafts and the target's token."""
    rng = np.random.default_rng(1)
    for p, q in zip(distributions(rng, 6, False)[:, :4], distributions(rng, 6, False)[:, :4]):
        p, q = p / p.sum(), q / q.sum()
        pairs = [*itertools.product(range(4), repeat=2)]
        hit = np.asarray([[token in pair for token in range(4)] for pair in pairs], float)
        rows = np.kron(np.eye(16), np.ones(4)), np.kron(np.ones(16), np.eye(4))
        sides = np.concatenate([[q[a] * q[b] for a, b in pairs], p])
        best = linprog(-hit.ravel(), A_eq=np.concatenate(rows), b_eq=sides)
        assert transport_bound(jnp.asarray(p), jnp.asarray(q), 2) == pytest.approx(
            -best.fun, abs=2e-6
        )


TREES = {"chain": None, "tree": Tree((0, 0, 1, 2, 2, 4, 5))}


@pytest.mark.representatives("tree")
@pytest.mark.parametrize("tree", TREES)
def test_nodes_are_counted_by_place(tree):
    """Random rounds against a walk in Python; some offer fewer drafts, or are cut by a limit."""
    shape, B = TREES[tree], 256
    K, rng = 4 if shape is None else shape.num_nodes, np.random.default_rng(2)
    parents = range(K) if shape is None else shape.parents
    q = distributions(rng, B * K, False).reshape(B, K, V)
    p = np.concatenate([q, distributions(rng, B, False)[:, None]], axis=1)
    p *= rng.random((B, K + 1, V))
    p /= p.sum(axis=2, keepdims=True)
    tokens = np.zeros((B, K), int)
    for b in range(B):
        for node in range(K):  # siblings differ
            free = q[b, parents[node]].copy()
            free[[tokens[b, i] for i in range(node) if parents[i] == parents[node]]] = 0
            tokens[b, node] = rng.choice(V, p=free / free.sum())
    n_draft = rng.integers(0, K + 1, B)
    proposal = Proposal(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(n_draft, jnp.int32),
        probs=jnp.asarray(q, jnp.float32),
        parents=None if shape is None else jnp.broadcast_to(jnp.asarray(parents), (B, K)),
        tree_depth=0 if shape is None else shape.depth,
    )
    scores = TargetScores(jnp.log(jnp.asarray(p)), jnp.log(jnp.asarray(p, jnp.float32)))
    noise = Noise(jnp.asarray(rng.random((B, K)), jnp.float32), jnp.zeros((B, 1, V)))
    verdict = jax.jit(RESIDUAL.accept)(scores, proposal, noise)
    n_emit = jnp.minimum(verdict.n_accept + 1, jnp.asarray(rng.integers(0, 6, B)))
    of = Round(proposal, scores, verdict, jnp.zeros(B, jnp.int32), n_emit)
    found = jax.jit(ACCEPTANCE_BY_PLACE.update)(ACCEPTANCE_BY_PLACE.init(B, 9), of)
    for b in range(B):
        emitted = verdict.tokens[b, : int(n_emit[b])].tolist()
        expected = walk(parents, n_draft[b], tokens[b], emitted, p[b], q[b])
        np.testing.assert_allclose(found[b], expected, atol=1e-5)
    places = np.asarray(found).sum(axis=(0, 2)) > 0
    assert places.tolist() == [True, True, *([False] * 2 if shape is None else [True] * 2)]


def walk(parents, n_draft, drafts, emitted, p, q):
    counts, node, place = np.zeros((4, 4)), 0, 0
    for token in emitted:
        children = [i + 1 for i in range(n_draft) if parents[i] == node]
        if not children:
            break
        right = [i for i in children if drafts[i - 1] == token]
        is_first = right == children[:1]
        counts[place] += 1, is_first, bool(right), over_all_sets(p[node], q[node], len(children))
        if not right:
            break
        place = (1 if place < 2 else 3) if is_first else 2
        node = right[0]
    return counts
