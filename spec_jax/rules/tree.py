"""Acceptance rules for a tree of drafts, each written for one row.

Notation as in ``rules/chain.py``; ``p[v]`` is the target's distribution of the token after node
v. The rules try the children of an accepted node one after the other, in the order of their
indices; node i has coin ``uniforms[i - 1]``. Whatever the tree, the walk ends with one token of
the target's own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.contracts import Noise, Proposal, TargetScores, Verdict
from spec_jax.rules.chain import replace
from spec_jax.sampling import argmax


def _earlier_siblings(proposal: Proposal) -> jax.Array:
    """Returns bool[K,K]: entry [i, j] says that draft j is offered and tried before draft i."""
    parents = proposal.parents
    index = jnp.arange(len(proposal.parents))
    is_sibling = parents[:, None] == parents
    return is_sibling & (index < index[:, None]) & proposal.is_offered


def _verdict(last, proposal: Proposal, token, accept_probs, dist) -> Verdict:
    """The verdict that accepts the path from the root to node ``last``."""
    paths = proposal.paths
    depths = paths.sum(axis=1) - 1
    n_accept = depths[last]
    index = jnp.arange(proposal.depth + 1)
    is_at = paths[last] & (depths == index[:, None])
    path = jnp.where(is_at, jnp.arange(len(depths)), 0).max(axis=1)
    drafts = jnp.append(proposal.tokens[path[1:] - 1], 0)
    tokens = jnp.where(index < n_accept, drafts, jnp.where(index == n_accept, token, 0))
    return Verdict(n_accept, tokens, accept_probs, dist, path)


def _walk(is_success, proposal: Proposal) -> jax.Array:
    """Returns the last node on the walk that goes on to the first child that succeeds."""
    is_first = is_success & proposal.is_offered
    is_first &= ~(_earlier_siblings(proposal) & is_success).any(axis=1)
    is_reached = (jnp.append(True, is_first) | ~proposal.paths).all(axis=1)
    return jnp.where(is_reached, jnp.arange(len(is_reached)), 0).max()


def match(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Samples the target's own token after every node and goes to the draft equal to it.

    Lossless for any tree, and the tokens equal plain decoding's: nodes of one depth share the
    noise of their position.

    Args:
      target: the target's scores of one row's nodes, f32[K+1,V].
      proposal: the row's tree: tokens i32[K], parents, and distributions by parent if drawn.
      noise: Gumbel noise f32[P,V], one vector a depth; the coins are unused.
    """
    depths = proposal.paths.sum(axis=1) - 1
    return _match(target.processed + noise.gumbel[depths], proposal)


def greedy(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Goes to the draft that is the target's argmax. Lossless at temperature 0.

    Args:
      target: the target's scores of one row's nodes, f32[K+1,V].
      proposal: the row's tree: tokens i32[K], parents, and distributions by parent if drawn.
      noise: unused.
    """
    del noise
    return _match(target.processed, proposal)


def _match(scores, proposal: Proposal) -> Verdict:
    own = argmax(scores)
    is_success = proposal.tokens == own[proposal.parents]
    last = _walk(is_success, proposal)
    dist = jax.nn.one_hot(own[last], scores.shape[-1], dtype=jnp.float32)
    coins = (is_success & proposal.is_offered).astype(jnp.float32)
    return _verdict(last, proposal, own[last], coins, dist)


def residual(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Tries siblings in turn, each against what the ones before it have left of the target.

    Lossless. Deterministic children are tried by ``deterministic_children``, those drawn without
    replacement by ``recursive_rejection``.

    Args:
      target: the target's scores of one row's nodes, f32[K+1,V].
      proposal: the row's tree: tokens i32[K], parents, and distributions by parent if drawn.
      noise: coins f32[K], and Gumbel noise f32[1,V] of the last token.
    """
    rule = deterministic_children if proposal.probs is None else recursive_rejection
    return rule(target, proposal, noise)


def deterministic_children(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Accepts child x with probability p(x) of what its rejected siblings have left of p.

    The token after the last accepted node is drawn from p without that node's children.
    Source: recursive rejection with a point mass for every child, as in EAGLE-2, arXiv
    2406.16858.

    Args:
      target: the target's scores of one row's nodes, f32[K+1,V].
      proposal: the row's tree: tokens i32[K], parents, and distributions by parent if drawn.
      noise: coins f32[K], and Gumbel noise f32[1,V] of the last token.
    """
    p = target.probs
    tokens = proposal.tokens
    parents = proposal.parents
    earlier = _earlier_siblings(proposal)
    is_again = (earlier & (tokens[:, None] == tokens)).any(axis=1)
    mass = jnp.where(is_again, 0.0, p[parents, tokens])
    left = 1.0 - jnp.where(earlier, mass, 0.0).sum(axis=1)
    coins = jnp.where(proposal.is_offered & (left > 0), mass / jnp.where(left > 0, left, 1.0), 0.0)
    coins = jnp.minimum(coins, 1.0)
    last = _walk(noise.uniforms < coins, proposal)
    V = p.shape[-1]
    tried = jnp.where(proposal.is_offered & (parents == last), tokens, V)  # V: dropped
    weights = p[last].at[tried].set(0.0, mode="drop")
    dist, token = replace(weights, p[last], noise.gumbel[0])
    return _verdict(last, proposal, token, coins, dist)


def _child_distribution(q_V, token):
    """Returns the distribution of a child: what its siblings left of q, or a point mass.

    The point mass is of a drafter's own choice, made where q has no mass left.
    """
    point = jax.nn.one_hot(token, q_V.shape[-1], dtype=q_V.dtype)
    return jnp.where(q_V[token] > 0, q_V / jnp.maximum(q_V.sum(), q_V[token]), point)


def _without(q, node, token):
    """Returns q f32[K,V] once ``token`` has been tried after ``node``: siblings differ."""
    return q.at[node, token].set(0.0)


def recursive_rejection(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Accepts child x with probability min(1, p(x)/q(x)); rejected, it takes q out of p.

    After a rejection p becomes norm(max(p - q, 0)) and q loses x; the token after the last
    accepted node is drawn from what is left of its p.
    Source: Sequoia, arXiv 2402.12374, Algorithm 1; SpecInfer, arXiv 2305.09781.

    Args:
      target: the target's scores of one row's nodes, f32[K+1,V].
      proposal: the row's tree: tokens i32[K], parents, and distributions by parent if drawn.
      noise: coins f32[K], and Gumbel noise f32[1,V] of the last token.
    """

    def try_child(i, carry):
        p, q, coins = carry
        v = proposal.parents[i]
        x = proposal.tokens[i]
        dist = _child_distribution(q[v], x)
        ratio = p[v, x] / jnp.maximum(dist[x], p[v, x])
        coin = jnp.where(p[v, x] > 0, jnp.minimum(1.0, ratio), 0.0)
        left = jnp.maximum(p[v] - dist, 0.0)
        mass = left.sum()
        left = jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1.0), p[v])
        counts = proposal.is_offered[i]
        p = p.at[v].set(jnp.where(counts, left, p[v]))
        q = jnp.where(counts, _without(q, v, x), q)
        return p, q, coins.at[i].set(jnp.where(counts, coin, 0.0))

    K = len(proposal.tokens)
    carry = (target.probs, proposal.probs, jnp.zeros(K))
    p, _, coins = jax.lax.fori_loop(0, K, try_child, carry)
    last = _walk(noise.uniforms < coins, proposal)
    dist, token = replace(p[last], p[last], noise.gumbel[0])
    return _verdict(last, proposal, token, coins, dist)


def _leaves_first(proposal: Proposal) -> jax.Array:
    """Returns i32[K], the drafts in the order in which they become leaves and are taken."""
    paths = proposal.paths[1:, 1:]
    K = len(paths)
    depths = paths.sum(axis=1)
    levels = jnp.arange(1, proposal.depth + 1)
    is_at = paths[:, None] & (depths == levels[:, None])  # [K,P-1,K], draft on the way, by level
    way = jnp.where(is_at, jnp.arange(K), -1).max(axis=2)
    way = jnp.where(way < 0, K, way)  # a node comes after all its descendants
    return jnp.lexsort(tuple(way[:, i] for i in reversed(range(proposal.depth))))


def traversal(target: TargetScores, proposal: Proposal, noise: Noise) -> Verdict:
    """Takes leaves away from the tree until one passes, and accepts the whole path to it.

    Lossless, and never accepts less on average than recursive rejection; on a chain it is
    block verification.
    Source: Traversal Verification, arXiv 2505.12398, Algorithm 2.

    Args:
      target: the target's scores of one row's nodes, f32[K+1,V].
      proposal: the row's tree: tokens i32[K], parents, and distributions by parent if drawn.
      noise: coins f32[K], and Gumbel noise f32[1,V] of the last token.
    """
    parents = proposal.parents
    tokens = proposal.tokens
    paths = proposal.paths
    K = len(tokens)
    V = target.logits.shape[-1]
    order = _leaves_first(proposal)
    q = jnp.zeros((K, V)) if proposal.probs is None else proposal.probs  # no mass: free choices
    depths = paths.sum(axis=1) - 1

    def enter(node, carry):
        """Sets the weight of a node that is visited for the first time."""
        w, is_entered, p, q = carry
        i = node - 1
        v = parents[i]
        x = tokens[i]
        dist = _child_distribution(q[v], x)
        ratio = w[v] * p[v, x] / jnp.where(dist[x] > 0, dist[x], 1.0)
        weight = jnp.where(p[v, x] > 0, jnp.minimum(1.0, ratio), 0.0)
        is_new = (node > 0) & ~is_entered[node]
        w = w.at[node].set(jnp.where(is_new, weight, w[node]))
        return w, is_entered.at[node].set(True), p, q

    def take_leaf(step, carry):
        w, is_entered, p, q, coins = carry
        i = order[step]
        node = i + 1
        v = parents[i]
        x = tokens[i]
        for level in range(1, proposal.depth + 1):
            on_way = jnp.where(paths[node] & (depths == level), jnp.arange(K + 1), 0).max()
            w, is_entered, p, q = enter(on_way, (w, is_entered, p, q))
        coin = w[node]
        left = jnp.maximum(w[v] * p[v] - _child_distribution(q[v], x), 0.0)
        mass = left.sum()
        room = mass + 1.0 - w[v]
        counts = proposal.is_offered[i]
        dist = jnp.where(mass > 0, left / jnp.where(mass > 0, mass, 1.0), p[v])
        weight = jnp.where(room > 0, mass / jnp.where(room > 0, room, 1.0), 0.0)
        w = w.at[v].set(jnp.where(counts, weight, w[v]))
        p = p.at[v].set(jnp.where(counts, dist, p[v]))
        q = jnp.where(counts, _without(q, v, x), q)
        return w, is_entered, p, q, coins.at[i].set(jnp.where(counts, coin, 0.0))

    w = jnp.zeros(K + 1).at[0].set(1.0)
    carry = (w, jnp.zeros(K + 1, bool).at[0].set(True), target.probs, q, jnp.zeros(K))
    # A leaf's coin and p hold if all leaves before it failed, and no later leaf changes them.
    _, _, p, _, coins = jax.lax.fori_loop(0, K, take_leaf, carry)
    is_success = noise.uniforms < coins
    rank = jnp.zeros(K, jnp.int32).at[order].set(jnp.arange(K, dtype=jnp.int32))
    rank = jnp.where(is_success, rank, K)
    last = jnp.where(is_success.any(), jnp.argmin(rank) + 1, 0)
    dist, token = replace(p[last], target.probs[last], noise.gumbel[0])
    return _verdict(last, proposal, token, coins, dist)
