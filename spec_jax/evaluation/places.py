"""Acceptance by place in a tree, and how close it is to the optimum.

After an accepted draft that is not its parent's first child, drafts are often wrong if their
distribution does not depend on that token. So nodes are counted by *place*: the root, accepted
drafts all of whose ancestors are first children, accepted siblings of a first child, and first
children below such a sibling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.contracts import Observer, Proposal, Round, TargetScores, Verdict
from spec_jax.intervals import Interval, jackknife, shares
from spec_jax.sharding import SAMPLED_ROWS, constrain, shard_map_rows

PLACES = ("the pending token", "first children alone", "a sibling", "below a sibling")
_NAME = "acceptance_by_place"


def transport_bound(p: jax.Array, q: jax.Array, num_drafts: jax.Array | int) -> jax.Array:
    """Returns the largest probability with which any rule accepts one of n independent drafts.

    That of optimal transport, ``1 + min over H of (p(H) - q(H)^n)`` over sets H of tokens. The
    expression is concave in ``(p(H), q(H))``, increasing in the first and decreasing in the second,
    so its minimum is at a set of the tokens with the largest q / p. With one draft the bound is 1
    less the total variation distance.

    Source: SpecTr, arXiv 2310.15141, section 3; the minimum over sets is its dual.

    Args:
      p: f32[...,V], the target's distribution.
      q: f32[...,V], the drafts'.
      num_drafts: i32[...], n; without drafts the bound is 0.
    """
    order = jnp.argsort(-jnp.where(p > 0, q / jnp.where(p > 0, p, 1.0), jnp.inf), axis=-1)

    def prefix(x):
        return jnp.cumsum(jnp.take_along_axis(x, order, axis=-1), axis=-1)

    n = jnp.asarray(num_drafts)[..., None]
    gain = prefix(p) - jnp.minimum(prefix(q), 1.0) ** n
    bound = 1.0 + jnp.minimum(gain.min(axis=-1), 0.0)  # of no tokens the expression is 0
    return jnp.where(n[..., 0] > 0, jnp.maximum(bound, 0.0), 0.0)


def _update(seen: jax.Array, of: Round) -> jax.Array:
    if of.proposal.tokens.shape[1] == 0:
        return seen
    is_counted = of.columns >= 0

    def run(scores: TargetScores, proposal: Proposal, verdict: Verdict, is_counted):
        return jax.vmap(_count)(scores, proposal, verdict, is_counted)

    scores = of.scores.replace(features=None, logits=None)
    new = shard_map_rows(run, SAMPLED_ROWS)(scores, of.proposal, of.verdict, is_counted)
    return seen + constrain(new, "batch")


def _count(scores: TargetScores, proposal: Proposal, verdict: Verdict, is_counted) -> jax.Array:
    """Counts the nodes of one row's accepted path: f32[4,4], see ``ACCEPTANCE_BY_PLACE``."""
    P = len(verdict.tokens)
    K = len(proposal.tokens)
    index = jnp.arange(P)
    path = index if verdict.path is None else verdict.path
    parents = jnp.arange(K) if proposal.parents is None else proposal.parents
    is_child = (parents == path[:, None]) & proposal.is_offered  # [P,K]
    first = jnp.argmax(is_child, axis=1) + 1
    n = is_child.sum(axis=1)
    is_first = jnp.append(True, path[1:] == first[:-1])
    is_spine = jnp.cumprod(is_first) > 0
    place = jnp.where(is_spine, jnp.minimum(index, 1), jnp.where(is_first, 3, 2))
    is_reached = is_counted & (index <= verdict.n_accept) & (n > 0)
    is_any = is_reached & (index < verdict.n_accept)
    is_first_right = is_any & jnp.append(is_first[1:], False)
    p = scores.probs[path]
    is_same = (parents[:, None] == parents) & (proposal.tokens[:, None] == proposal.tokens)
    is_again = jnp.tril(is_same, -1).any(axis=1)
    bound = (p[:, proposal.tokens] * (is_child & ~is_again)).sum(axis=1)  # of chosen tokens
    if proposal.probs is not None:
        q = proposal.probs[jnp.minimum(path, K - 1)]
        is_drawn = (q.max(axis=-1) < 1 - 1e-6) & (q.max(axis=-1) > 0)
        bound = jnp.where(is_drawn, transport_bound(p, q, n), bound)
    columns = jnp.stack([is_reached, is_first_right, is_any, is_reached * bound], axis=1)
    return jax.nn.one_hot(place, len(PLACES)).T @ columns.astype(jnp.float32)


ACCEPTANCE_BY_PLACE = Observer(
    name=_NAME,
    init=lambda batch, slots: jnp.zeros((batch, len(PLACES), 4)),
    update=_update,
    needs_probs=True,
    needs_processed=True,
)
"""Counts by place: ``state.seen["acceptance_by_place"]`` is f32[B,4,4].

Each row of ``PLACES`` has the number of accepted nodes with children, how often the first child was
accepted, how often any child was, and the sum of ``transport_bound``, or of the target's
probability of the children where these are no draws. In a chain there are two places.
"""


class PlaceResult(NamedTuple):
    """Acceptance after the accepted nodes of one place.

    Attributes:
      reached: Nodes of the place that were accepted and have children.
      first_child: The share of them whose first child was accepted.
      accepted: The share of them with any accepted child.
      bound: The mean of the largest share that any rule could accept of independent drafts.
      share: ``accepted`` over ``bound``. It may exceed 1, since siblings are drawn without
        replacement; with rules that look ahead only the pending token's share is bounded by 1.
    """

    reached: int
    first_child: Interval
    accepted: Interval
    bound: Interval
    share: Interval

    @classmethod
    def of(cls, rows: Sequence[Any]) -> dict[str, PlaceResult]:
        """Returns the figures of outputs, by place, as far as nodes of it were reached.

        Args:
          rows: Outputs of a decoder that ``ACCEPTANCE_BY_PLACE`` watched; intervals are over these.
            Lists of outputs count together. Nothing is returned if any was not watched.
        """
        groups = [row if isinstance(row, list | tuple) else [row] for row in rows]
        if any(_NAME not in row.seen for group in groups for row in group):
            return {}
        counts = np.asarray(
            [sum(np.asarray(row.seen[_NAME], np.float64) for row in group) for group in groups]
        )
        found = {}
        for name, count in zip(PLACES, np.moveaxis(counts, 1, 0)):
            if count[:, 0].sum() > 0:
                bound, share = jackknife(_rates, count)
                first, some = shares(count[:, 1:3], count[:, :1])
                reached = int(count[:, 0].sum())
                found[name] = cls(reached, first, some, bound.within(0, 1), share)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Returns an entry of ``acceptance_by_place`` of report.json."""
        entry: dict[str, Any] = {"reached": self.reached}
        for name in self._fields[1:]:
            figure: Interval = getattr(self, name)
            entry |= {name: figure.value, f"{name}_interval": figure.bounds}
        return entry


def _rates(count: np.ndarray) -> np.ndarray:
    reached, _, some, bound = np.moveaxis(count, -1, 0)
    return np.stack([bound / reached, some / bound], axis=-1)
