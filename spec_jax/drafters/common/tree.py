"""Drafts a tree level by level, with any model that turns nodes into the logits after them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import rng
from spec_jax.contracts import Context, Proposal
from spec_jax.drafters.common.chain import rows_axis
from spec_jax.models.checks import require
from spec_jax.sampling import process_rows, top_k
from spec_jax.sharding import constrain, shard_map_rows
from spec_jax.tree import AnyTree, DynamicTree, Tree

# ``(carry, tokens i32[B,W], parent i32[B|1,W], seen bool[B|1,W,X]) -> (logits f32[B,W,V],
# carry)``: feeds W nodes after the X - W that were fed since the last round. Node w is a child of
# node ``parent[w]`` of the pass before and sees the fed nodes ``seen[w]``, itself included.
Advance = Callable[..., tuple[jax.Array, Any]]


class _Grown:
    """The drafts that have been fed so far, and which of them the last level sees."""

    def __init__(self, logits, carry, advance: Advance, context: Context):
        # after the root
        self.logits = logits[:, None]
        self.carry = carry
        self.fed = jnp.zeros((len(logits), 0), jnp.int32)
        self.seen = np.zeros((1, 1, 0), bool)
        self._advance = advance
        self._context = context

    def feed(self, tokens, parent) -> None:
        """Feeds one level; ``parent`` i32[B|1,W] counts in the level fed before."""
        W = tokens.shape[1]
        take = np.take_along_axis if isinstance(parent, np.ndarray) else jnp.take_along_axis
        before = take(self.seen, parent[:, :, None], axis=1)
        own = np.broadcast_to(np.eye(W, dtype=bool), (len(before), W, W))
        join = np.concatenate if isinstance(before, np.ndarray) else jnp.concatenate
        self.seen = join([before, own], axis=2)
        self.fed = jnp.concatenate([self.fed, tokens], axis=1)
        self.logits, self.carry = self._advance(self.carry, tokens, parent, self.seen)

    def draw(self, function: Callable[..., Any], *args: jax.Array) -> Any:
        """Calls ``function(process, context, *args)``, on a mesh for the rows of each device.

        ``process(is_argmax=False)`` returns the logits f32[B,W,V] after the last level, under the
        draft's sampler.
        """

        context = self._context

        def run(fields, logits, fed, seen, *args):
            def process(*, is_argmax=False):
                return process_rows(logits, fields["sampler"], fed, seen, is_argmax=is_argmax)

            return function(process, context._replace(**fields), *args)

        names = ("sampler", "request", "length", "gumbel")
        rows = {name: getattr(context, name) for name in names}
        run = shard_map_rows(run, rows_axis(context))
        return run(rows, self.logits, self.fed, self.seen, *args)


def draft_tree(
    logits: jax.Array, carry: Any, advance: Advance, context: Context, num_draft: int, tree: AnyTree
) -> tuple[Proposal, Any, jax.Array]:
    """Drafts one tree for each row.

    The children of a static tree are drawn without replacement. If the distribution has fewer
    tokens than there are children, as at temperature 0, the likeliest of the others follow. The
    children of a dynamic tree are the likeliest tokens, without temperature and filters. Tokens
    that processors forbid are no children, and nodes whose logits are not finite have none.

    Args:
      logits: f32[B,V], after the root.
      carry: the state of ``advance``.
      advance: feeds one level, see ``Advance``.
      context: the sampler and the noise to draw with.
      num_draft: K, the number of the tree's nodes.
      tree: the shape of the tree.

    Returns:
      The proposal, the carry, and i32[B,K]: the index of each draft among those that were fed,
      0 for drafts that were not.

    Raises:
      ConfigError: ``num_draft`` is not the number of the tree's nodes.
    """
    require(num_draft == tree.num_nodes, f"K is {num_draft}; the tree has {tree.num_nodes} nodes")
    grown = _Grown(logits, carry, advance, context)
    draft = _draft_static if isinstance(tree, Tree) else _draft_dynamic
    return draft(grown, context, tree)


def _draft_static(grown: _Grown, context: Context, tree: Tree):
    B, _, V = grown.logits.shape
    K = tree.num_nodes
    tokens = jnp.zeros((B, K), jnp.int32)
    probs = jnp.zeros((B, K, V), jnp.float32) if context.has_probs else None
    is_sound = jnp.ones((B,), bool)
    is_dropped = jnp.zeros((B, K + 1), bool)  # by node
    fed_at = np.zeros(K, np.int32)
    level = np.zeros(1, int)
    for depth in range(1, tree.depth + 1):
        children = [tree.children(int(node)) for node in level]
        count = max(map(len, children))
        drawn, num_drawn, dist, best = _draw_children(grown, level, depth, count)
        drawn, num_drawn, best = (constrain(x, "batch") for x in (drawn, num_drawn, best))
        is_sound &= ((best < jnp.inf) | is_dropped[:, level]).all(axis=1)
        if probs is not None:
            probs = probs.at[:, np.asarray(level)].set(jax.nn.softmax(dist, axis=-1))
        at = [(w, rank, i) for w, own in enumerate(children) for rank, i in enumerate(own)]
        of, rank, nodes = map(np.asarray, zip(*at))
        tokens = tokens.at[:, nodes - 1].set(drawn[:, of, rank])
        is_none = is_dropped[:, level[of]] | (rank >= num_drawn[:, of])
        is_dropped = is_dropped.at[:, nodes].set(is_none)
        is_inner = np.isin(nodes, tree.parents)
        level = nodes[is_inner]
        if depth < tree.depth:
            fed_at[level - 1] = grown.fed.shape[1] + np.arange(len(level))
            grown.feed(tokens[:, level - 1], of[is_inner][None])
    parents = jnp.broadcast_to(jnp.asarray(tree.parents, jnp.int32), (B, K))
    proposal = Proposal(
        tokens,
        jnp.full((B,), K, jnp.int32),
        probs=probs,
        is_sound=is_sound,
        parents=parents,
        is_dropped=is_dropped[:, 1:],
        tree_depth=tree.depth,
    )
    return proposal, grown.carry, jnp.broadcast_to(jnp.asarray(fed_at), (B, K))


def _draw_children(grown: _Grown, nodes, depth: int, count: int):
    """Draws ``count`` children of each of W nodes.

    Returns i32[B,W,count], how many of them there are i32[B,W], as tokens that are forbidden are
    none, their distributions f32[B,W,V], and the largest logits f32[B,W].
    """

    def draw(process, context):
        dist = process()
        if context.sampler.temperature is None:  # the argmax, then the likeliest of the others
            x = process(is_argmax=True)
            value, token = top_k(x, count)
            return token, num_allowed(value, x.max(axis=-1)), dist, x.max(axis=-1)
        noisy = dist + _noise(context, nodes, depth, dist.shape)
        value, first = top_k(noisy, count)
        is_drawn = value > -jnp.inf

        def fill():
            ranked = jnp.where(dist > -jnp.inf, -jnp.inf, process(is_argmax=True))
            left, other = top_k(ranked, count)
            after = jnp.arange(count) - is_drawn.sum(axis=-1, keepdims=True)

            def take(x):
                return jnp.take_along_axis(x, jnp.maximum(after, 0), axis=-1)

            return jnp.where(is_drawn, first, take(other)), jnp.where(is_drawn, value, take(left))

        drawn, value = jax.lax.cond(is_drawn.all(), lambda: (first, value), fill)
        best = dist.max(axis=-1)
        return drawn, num_allowed(value, best), dist, best

    def num_allowed(value, best):
        is_allowed = (value > -jnp.inf) & jnp.isfinite(best)[:, :, None]
        return is_allowed.sum(axis=-1, dtype=jnp.int32)

    return grown.draw(draw)


def _noise(context: Context, nodes, depth: int, shape) -> jax.Array:
    """Gumbel noise f32[B,W,V] for the children of ``nodes``, which are drafts ``depth`` deep."""
    V, nodes = shape[-1], jnp.asarray(nodes)
    if context.gumbel is not None:
        return context.gumbel[:, nodes]
    if context.is_coupled:
        keys = rng.keys(context.request, rng.Purpose.TARGET, context.length + depth)
        return jnp.broadcast_to(rng.gumbel(keys, V)[:, None], shape)

    def one(node):
        keys = context.sampler.keys(rng.Purpose.DRAFT, context.length, node + 1)
        return rng.gumbel(keys, V)

    return jax.vmap(one, out_axes=1)(nodes)


def _draft_dynamic(grown: _Grown, context: Context, tree: DynamicTree):
    k = tree.top_k
    B = len(grown.fed)

    def grow(process, context, score):
        """The k likeliest children of each node, and the k best of all of these; -inf: none."""
        logits = process(is_argmax=True)
        best = logits.max(axis=-1)
        is_sound = ((best < jnp.inf) | (score == -jnp.inf)).all(axis=1)
        value, token = top_k(jax.nn.log_softmax(logits, axis=-1), k)  # [B,W,k]
        value = jnp.where(jnp.isfinite(best)[:, :, None], value + score[:, :, None], -jnp.inf)
        value = value.reshape(len(value), -1)
        return token.reshape(value.shape), value, *jax.lax.top_k(value, k), is_sound

    score = jnp.zeros((B, 1))
    seen = {"token": [], "score": [], "parent": [], "fed_at": []}  # of all nodes, level by level
    frontier = jnp.full((B, 1), -1)  # positions of the expanded nodes among them
    num_seen = 0
    is_sound = jnp.ones((B,), bool)
    for depth in range(1, tree.depth + 1):
        drawn = grown.draw(grow, score)
        token, value, score, best, is_finite = (constrain(x, "batch") for x in drawn)
        is_sound &= is_finite
        parent = jnp.repeat(frontier, k, axis=1)
        fed_at = jnp.zeros_like(token)
        if depth < tree.depth:
            fed_at = _set(fed_at, best, grown.fed.shape[1] + jnp.arange(k))
            frontier = num_seen + best
            grown.feed(jnp.take_along_axis(token, best, axis=1), best // k)
        for name, new in zip(seen, (token, value, parent, fed_at)):
            seen[name].append(new)
        num_seen += token.shape[1]
    seen = {name: jnp.concatenate(parts, axis=1) for name, parts in seen.items()}
    # No child scores above its parent, and the first of equals is taken, so a node is chosen with
    # its parent. In ascending order parents come before their children.
    K = tree.num_nodes

    def choose(seen):
        chosen = jnp.sort(jax.lax.top_k(seen["score"], K)[1], axis=1)

        def take(name):
            return jnp.take_along_axis(seen[name], chosen, axis=1)

        number = jnp.zeros((len(chosen), num_seen + 1), jnp.int32)
        number = _set(number, chosen, jnp.arange(1, K + 1))
        at = jnp.where(take("parent") < 0, num_seen, take("parent"))
        parents = jnp.take_along_axis(number, at, axis=1)
        return take("token"), parents, take("score") == -jnp.inf, take("fed_at")

    tokens, parents, is_dropped, fed_at = shard_map_rows(choose)(seen)
    proposal = Proposal(
        tokens,
        jnp.full((B,), K, jnp.int32),
        is_sound=is_sound,
        parents=parents,
        is_dropped=is_dropped,
        tree_depth=tree.depth,
    )
    return proposal, grown.carry, fed_at


def _set(x: jax.Array, at: jax.Array, values: jax.Array) -> jax.Array:
    """Writes the same values, i32[K], into each row of i32[B,N] at its own places i32[B,K]."""
    return jax.vmap(lambda row, at: row.at[at].set(values))(x, at)
