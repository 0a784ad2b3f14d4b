"""The attention cache: a functional value with one write index a row.

Law: ``forward`` writes slots at and past ``length`` and never moves ``length``; only
``commit`` moves it. So what a rejected draft wrote is forgotten by not committing it,
and rolling back costs nothing. Slots past ``length`` hold garbage that is finite and
always masked.
"""

from __future__ import annotations

import pathlib
from collections import Counter
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from spec_jax.errors import SnapshotError


class KVCacheSnapshot(NamedTuple):
    """A cache as it was, independent of the cache it came from (donation included).

    Attributes:
      keys: one ``dtype[B,G,S,H]`` a layer.
      values: one ``dtype[B,G,S,H]`` a layer.
      seq_len: i32[B], tokens fed.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    seq_len: jax.Array

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the snapshot as one safetensors file."""
        arrays = {"seq_len": np.asarray(self.seq_len)}
        for i, (k, v) in enumerate(zip(self.keys, self.values)):
            arrays[f"keys.{i}"], arrays[f"values.{i}"] = np.asarray(k), np.asarray(v)
        save_file(arrays, path, metadata={"format": "spec_jax.KVCacheSnapshot"})

    @classmethod
    def load(cls, path: str | pathlib.Path) -> KVCacheSnapshot:
        """Reads what ``save`` wrote.

        Raises:
          SnapshotError: the file is missing, truncated or not a snapshot.
        """
        try:
            arrays = load_file(path)
            layers = range((len(arrays) - 1) // 2)
            return cls(
                tuple(jnp.asarray(arrays[f"keys.{i}"]) for i in layers),
                tuple(jnp.asarray(arrays[f"values.{i}"]) for i in layers),
                jnp.asarray(arrays["seq_len"]),
            )
        except (OSError, KeyError, SafetensorError) as error:
            raise SnapshotError(f"{path} is no cache snapshot: {error!r}") from error


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer, slots next to the head dimension."""

    keys: jax.Array  # dtype[L,B,G,S,H]
    values: jax.Array  # dtype[L,B,G,S,H]
    length: jax.Array  # i32[B], tokens fed

    @classmethod
    def create(cls, config, batch: int, slots: int, dtype=jnp.float32) -> KVCache:
        """An empty cache for ``batch`` rows of ``slots`` tokens of this ModelConfig."""
        shape = (
            config.num_hidden_layers, batch, config.num_key_value_heads, slots, config.head_dim,
        )
        return cls(
            jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros((batch,), jnp.int32)
        )

    @property
    def slots(self) -> int:
        return self.keys.shape[3]

    def write(self, layer, keys: jax.Array, values: jax.Array, start: jax.Array) -> KVCache:
        """Writes T new slots a row, in place where the cache is donated.

        The caller keeps ``start + T <= S``: a slice past the end would be shifted back
        onto valid entries.

        Args:
          layer: the layer's index; may be traced.
          keys: dtype[B,G,T,H].
          values: dtype[B,G,T,H].
          start: i32[B], the first slot of each row.
        """

        def put(cache, new):
            # One dynamic_update_slice a row stays in place on every back end; a vmapped
            # one becomes a scatter, which a TPU runs as a serial loop.
            for b in range(new.shape[0]):
                cache = jax.lax.dynamic_update_slice(
                    cache, new[None, b : b + 1].astype(cache.dtype), (layer, b, 0, start[b], 0)
                )
            return cache

        return self.replace(keys=put(self.keys, keys), values=put(self.values, values))

    def commit(self, n: jax.Array) -> KVCache:
        """Keeps the first ``n`` (i32[B]) slots of the window; the others are forgotten."""
        return self.replace(length=self.length + n)

    def insert_row(self, row, other: KVCache) -> KVCache:
        """Replaces row ``row`` by the only row of ``other`` (same slots)."""
        put = lambda full, one: jax.lax.dynamic_update_index_in_dim(full, one[:, 0], row, 1)
        return KVCache(
            put(self.keys, other.keys),
            put(self.values, other.values),
            self.length.at[row].set(other.length[0]),
        )

    def snapshot(self) -> KVCacheSnapshot:
        """A copy that outlives the cache; ``restore_from_snapshot`` is its inverse."""
        return KVCacheSnapshot(
            tuple(jnp.copy(k) for k in self.keys),
            tuple(jnp.copy(v) for v in self.values),
            jnp.copy(self.length),
        )

    def restore_from_snapshot(self, snapshot: KVCacheSnapshot) -> KVCache:
        """The cache as it was at the snapshot.

        Raises:
          SnapshotError: the snapshot is of a cache of another shape or dtype.
        """

        def describe(arrays):
            kinds = Counter(f"{x.dtype.name}{list(x.shape)}" for x in arrays)
            return ", ".join(f"{n} x {kind}" for kind, n in kinds.items())

        layer = jax.ShapeDtypeStruct(self.keys.shape[1:], self.keys.dtype)
        ours = describe([layer] * 2 * self.keys.shape[0] + [self.length])
        theirs = describe(jax.tree.leaves(snapshot))
        if ours != theirs:
            raise SnapshotError(f"the snapshot holds {theirs}; this cache has {ours}")
        return KVCache(
            jnp.stack(snapshot.keys), jnp.stack(snapshot.values), jnp.copy(snapshot.seq_len)
        )
