"""The attention cache: a functional value with one write index a row.

Law: ``forward`` writes slots at and past ``length`` and never moves ``length``; only
``commit`` moves it. So what a rejected draft wrote is forgotten by not committing it,
and rolling back costs nothing. Slots past ``length`` hold garbage that is always masked, and
finite, since weights are (a masked NaN would still reach what attends over it).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.models.caches.snapshot import KVCacheSnapshot, check_fits
from spec_jax.models.layout import attend_prefix

__all__ = ["KVCache", "KVCacheSnapshot"]


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer, slots next to the head dimension, each of its own width.

    Stacked, ``dtype[L,B,G,S,H]``, where the layers are scanned; else apart, a tuple of one
    ``dtype[B*G,S,H]`` a layer. Apart, a layer has the very shape that attention's products
    take: a slice of a stack and a change of rank are each a copy of the layer on a CPU.
    """

    keys: jax.Array | tuple[jax.Array, ...]
    values: jax.Array | tuple[jax.Array, ...]
    length: jax.Array  # i32[B], tokens fed

    @classmethod
    def create(
        cls, config, batch: int, slots: int, dtype=jnp.float32, num_layers: int | None = None
    ) -> KVCache:
        """An empty cache for ``batch`` rows of ``slots`` tokens of this model's config.

        ``num_layers`` says how many of its layers attend, where that is not all.
        """
        L = config.num_hidden_layers if num_layers is None else num_layers
        G = config.num_key_value_heads

        def zeros(H):
            if config.scan_layers and L > 1:  # the slice of a stack of one is a change of rank
                return jnp.zeros((L, batch, G, slots, H), dtype)
            return tuple(jnp.zeros((batch * G, slots, H), dtype) for _ in range(L))

        keys, values = zeros(config.key_dim), zeros(config.value_dim)
        return cls(keys, values, jnp.zeros((batch,), jnp.int32))

    @property
    def is_stacked(self) -> bool:
        return not isinstance(self.keys, tuple)

    @property
    def slots(self) -> int:
        return self.layer(0)[0].shape[-2]

    def layer(self, index) -> tuple[jax.Array, jax.Array]:
        """Keys and values of one layer, dtype[B,G,S,H] or dtype[B*G,S,H].

        Args:
          index: may be traced where there is a stack, or one layer.
        """
        index = index if self.is_stacked or len(self.keys) > 1 else 0
        return self.keys[index], self.values[index]

    def write(self, layer, keys: jax.Array, values: jax.Array, start: jax.Array) -> KVCache:
        """Writes T new slots a row, in place where the cache is donated.

        The caller keeps ``start + T <= S``: a slice past the end would be shifted back
        onto valid entries.

        Args:
          layer: the layer's index, as in ``layer``.
          keys: dtype[B,G,T,H].
          values: dtype[B,G,T,H].
          start: i32[B], the first slot of each row.
        """
        G = keys.shape[1]
        put = jax.lax.dynamic_update_slice

        # One dynamic_update_slice a row stays in place on every back end; a vmapped one
        # becomes a scatter, which a TPU runs as a serial loop.
        def into_stack(cache, new):
            for b in range(new.shape[0]):
                at = (layer, b, 0, start[b], 0)
                cache = put(cache, new[None, b : b + 1].astype(cache.dtype), at)
            return cache

        def into_one(caches, new):
            index = layer if len(caches) > 1 else 0
            cache = caches[index]
            for b in range(new.shape[0]):
                cache = put(cache, new[b].astype(cache.dtype), (b * G, start[b], 0))
            return (*caches[:index], cache, *caches[index + 1 :])

        into = into_stack if self.is_stacked else into_one
        return self.replace(keys=into(self.keys, keys), values=into(self.values, values))

    def attend(self, q_BTNH, k_BGTH, v_BGTH, index, window, scale=None):
        """Writes the window's keys and values, and attends over all slots that it sees.

        Args and returns as ``layers.attend_window``.
        """
        cache = self.write(index, k_BGTH, v_BGTH, window.start)
        return attend_prefix(q_BTNH, *cache.layer(index), window.mask, scale=scale), cache

    def open_window(self, width: int) -> KVCache:
        """The cache itself: the slots behind what is committed are the window's room."""
        del width
        return self

    def commit(self, n: jax.Array, path: jax.Array | None = None) -> KVCache:
        """Keeps ``n`` (i32[B]) slots of the window and forgets the others.

        Args:
          n: how many.
          path: i32[B,P], which slots of the window, of which the first n count; they are moved
            to its front. None: they stand there.
        """
        moved = self if path is None else self._gather(path)
        return moved.replace(length=self.length + n)

    def rewind(self, n: jax.Array) -> KVCache:
        """Forgets the last ``n`` (i32[B]) tokens that were committed."""
        return self.replace(length=self.length - n)

    def _gather(self, path) -> KVCache:
        """Copies slots ``path`` (i32[B,P]) of the window to its front."""
        B = len(path)
        slots = self.length[:, None] + path
        axis = 1 if self.is_stacked else 0
        take = lambda x, at: jnp.take(x, at, axis=-2)

        def move(cache):
            n = cache.shape[axis] // B  # entries of that axis a row
            # Taken out before it is written: a shifted copy in place may read what it wrote.
            new = jax.vmap(take, (axis, 0), axis)(cache, jnp.repeat(slots, n, axis=0))
            for b in range(B):
                one = jax.lax.slice_in_dim(new, b * n, (b + 1) * n, axis=axis)
                at = [0] * cache.ndim
                at[axis], at[-2] = b * n, self.length[b]
                cache = jax.lax.dynamic_update_slice(cache, one, at)
            return cache

        return self.replace(
            keys=jax.tree.map(move, self.keys), values=jax.tree.map(move, self.values)
        )

    def insert_row(self, row, other: KVCache) -> KVCache:
        """Replaces row ``row`` by the only row of ``other`` (same slots)."""
        update = jax.lax.dynamic_update_slice_in_dim

        def put(full, one):
            if self.is_stacked:
                return update(full, one, row, axis=1)
            return tuple(update(f, o, row * len(o), axis=0) for f, o in zip(full, one))

        return KVCache(
            put(self.keys, other.keys),
            put(self.values, other.values),
            self.length.at[row].set(other.length[0]),
        )

    def _by_layer(self, arrays) -> tuple[jax.Array, ...]:
        """One ``dtype[B,G,S,H]`` a layer."""
        B = self.length.shape[0]
        return tuple(x.reshape(B, -1, *x.shape[-2:]) for x in arrays)

    def snapshot(self) -> KVCacheSnapshot:
        """A copy that outlives the cache; ``restore_from_snapshot`` is its inverse."""
        return KVCacheSnapshot(
            tuple(map(jnp.copy, self._by_layer(self.keys))),
            tuple(map(jnp.copy, self._by_layer(self.values))),
            jnp.copy(self.length),
        )

    def restore_from_snapshot(self, snapshot: KVCacheSnapshot) -> KVCache:
        """The cache as it was at the snapshot.

        Raises:
          SnapshotError: the snapshot is of a cache of another kind, shape or dtype.
        """
        check_fits(snapshot, jax.eval_shape(self.snapshot))

        def lay_out(arrays):
            if self.is_stacked:
                return jnp.stack(arrays)
            return tuple(jnp.copy(x).reshape(-1, *x.shape[-2:]) for x in arrays)

        return KVCache(
            lay_out(snapshot.keys), lay_out(snapshot.values), jnp.copy(snapshot.seq_len)
        )
