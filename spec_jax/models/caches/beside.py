"""A cache that is only read, with a window beside it: for drafts that read the target's cache.

A program that wrote drafts into the target's own slots, and then gave the target the cache as it
was, would copy it in every round.
"""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.models.attention import grouped, ungrouped
from spec_jax.models.caches.groups import GroupedCache
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.sees import Sees


@flax.struct.dataclass
class BesideCache:
    """Committed keys and values of another cache, and those of a window after them."""

    base: KVCache
    window: KVCache  # of as many slots as the window has tokens, none of them committed

    @property
    def length(self) -> jax.Array:
        """i32[B], tokens fed to the cache that is read."""
        return self.base.length

    def open_window(self, width: int) -> BesideCache:
        """Returns the cache itself, whose window is open."""
        del width
        return self

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BGTH: jax.Array,
        v_BGTH: jax.Array,
        index: int | jax.Array,
        sees: Sees,
        scale: float | None = None,
    ) -> tuple[jax.Array, BesideCache]:
        """Writes the pass's keys and values into the window, and attends over both caches.

        Args and Returns are those of ``layers.attend_window``.
        """
        B, T, N, H = q_BTNH.shape
        own = self.window.write(index, k_BGTH, v_BGTH, sees.start - self.length)
        end = self.length[:, None]
        slots = jnp.arange(self.base.slots, dtype=jnp.int32)
        positions = self.base.positions(slots, self.length)
        committed = sees(positions) & (positions < end)[:, None]
        seen = sees(end + jnp.arange(own.slots, dtype=jnp.int32))
        layers = [self.base.layer(index), own.layer(index)]
        *lead, _, _ = layers[0][0].shape
        G = math.prod(lead) // B
        q = grouped(q_BTNH, G).reshape(*lead, -1, H)

        def score(keys, seen):
            scores = jnp.einsum("...mh,...sh->...ms", q, keys, preferred_element_type=jnp.float32)
            scores = scores.reshape(B, G, N // G, T, -1) * (H**-0.5 if scale is None else scale)
            return jnp.where(seen[:, None, None], scores, -1e30)

        scores = [score(keys, seen) for (keys, _), seen in zip(layers, (committed, seen))]
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        out = 0
        for (_, values), part in zip(layers, jnp.split(weights, [len(slots)], axis=-1)):
            part = part.astype(values.dtype).reshape(*lead, N // G * T, -1)
            out += jnp.einsum("...ms,...sh->...mh", part, values)
        return ungrouped(out.reshape(B, G, N // G, T, -1)), self.replace(window=own)


def open_beside(cache: Any, width: int) -> Any:
    """Returns a cache that reads another one, and writes up to ``width`` tokens beside it.

    Args:
      cache: of a model, between two rounds; it is not changed.
      width: tokens that passes may feed.
    """
    if isinstance(cache, GroupedCache):
        return GroupedCache(tuple(open_beside(group, width) for group in cache.groups))
    if not isinstance(cache, KVCache):  # its window holds no more than the tokens that are fed
        return cache.open_window(width) if hasattr(cache, "open_window") else cache

    def empty(x):
        return jnp.zeros((*x.shape[:-2], width, x.shape[-1]), x.dtype)

    keys, values = jax.tree.map(empty, (cache.keys, cache.values))
    none = jnp.zeros_like(cache.length)
    return BesideCache(cache, cache.replace(keys=keys, values=values, length=none))
