"""The cache of a model whose layers differ in what they keep: groups of equal layers.

A group is a cache by itself, ``KVCache``, ``LatentCache`` or ``StateCache``: it has the methods of
``contracts.Cache``, and ``parts`` and ``with_parts`` for snapshots. So a model with one group has
that as its cache, and each layer only ever sees its own group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.models.caches.snapshot import CacheSnapshot, check_fits


@flax.struct.dataclass
class GroupedCache:
    """Several groups of layers, to which the same tokens are fed."""

    groups: tuple[Any, ...]

    @property
    def length(self) -> jax.Array:
        """i32[B], tokens fed."""
        return self.groups[0].length

    @property
    def rewind(self) -> Callable[[jax.Array], GroupedCache]:
        """``KVCache.rewind`` of every group; there is none if one of them has none."""
        each = [group.rewind for group in self.groups]
        return lambda n: GroupedCache(tuple(rewind(n) for rewind in each))

    def open_window(self, width: int) -> GroupedCache:
        """Makes room for a window of ``width`` tokens that several passes fill."""
        return GroupedCache(tuple(group.open_window(width) for group in self.groups))

    def commit(self, n: jax.Array, path: jax.Array | None = None) -> GroupedCache:
        """Keeps ``n`` (i32[B]) tokens of the window and forgets the others, see ``Cache``."""
        return GroupedCache(tuple(group.commit(n, path) for group in self.groups))

    def insert_row(self, row: int | jax.Array, other: GroupedCache) -> GroupedCache:
        """Replaces row ``row`` by the only row of ``other``."""
        pairs = zip(self.groups, other.groups)
        return GroupedCache(tuple(ours.insert_row(row, theirs) for ours, theirs in pairs))

    def snapshot(self) -> CacheSnapshot:
        """Returns a copy that outlives the cache, without its window."""
        return CacheSnapshot(tuple(g.parts() for g in self.groups), jnp.copy(self.length))

    def restore_from_snapshot(self, snapshot: CacheSnapshot) -> GroupedCache:
        """Returns the cache as it was when the snapshot was taken.

        Raises:
          SnapshotError: the snapshot is of another kind of cache, or of another shape or dtype.
        """
        check_fits(snapshot, jax.eval_shape(self.snapshot))
        pairs = zip(self.groups, snapshot.groups)
        return GroupedCache(tuple(g.with_parts(x, snapshot.seq_len) for g, x in pairs))


def group_of(cache: Any, index: int) -> Any:
    """Returns a group of a model's cache, which is the cache itself if there is one; or None."""
    return cache.groups[index] if isinstance(cache, GroupedCache) else cache


def with_group(cache: Any, index: int, group: Any) -> Any:
    """Returns a model's cache with another state of one group.

    Args:
      cache: of the model; the group itself if there is one.
      index: of the group.
      group: its new state.
    """
    if not isinstance(cache, GroupedCache):
        return group
    return GroupedCache((*cache.groups[:index], group, *cache.groups[index + 1 :]))
