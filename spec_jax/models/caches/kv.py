"""The cache of attention layers: keys and values, with one write index per row.

Invariant: ``forward`` writes slots from ``length`` on and never moves ``length``; only ``commit``
moves it. A rejected draft is forgotten by not committing what it wrote, so rolling back costs
nothing. What was fed after the committed tokens is garbage that is always masked, as are the nodes
of other paths.
Values are finite, as a masked NaN would still reach whatever attends over it: a token whose values
are not has a key of NaN, which reaches only those that see the token.
"""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, Self

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from spec_jax.models.attention import attend, attend_cache
from spec_jax.models.caches.snapshot import KVCacheSnapshot, Snapshotted
from spec_jax.models.sees import Sees
from spec_jax.sharding import (
    ambient,
    constrain,
    kv_replication,
    pin_tpu_layout,
    shard_map_over,
    take_of_array,
)

__all__ = ["UNROLLED_ROWS", "KVCache", "KVCacheSnapshot", "put_rows"]

# See ``put_rows``.
UNROLLED_ROWS = 1024  # a write of each of more rows is compiled for minutes
KERNEL_ROWS = 32  # a write of each of more rows takes a TPU longer than a call of a kernel


def put_rows(
    cache: jax.Array,
    new: jax.Array,
    start: jax.Array,
    layer: int | jax.Array = 0,
    *,
    is_rolling: bool = False,
) -> jax.Array:
    """Writes T slots of each row, from slot ``start[b]`` on.

    How depends on the platform, so that it is in place. On a CPU it is one dynamic_update_slice a
    row; on a TPU, too, if there are few rows, and else a kernel, as a scatter or a loop over the
    rows makes a TPU copy the cache. On CUDA, where every update is a launch, it is one scatter. Of
    more than ``UNROLLED_ROWS`` rows, as a certificate decodes them, it is a scatter wherever there
    is no kernel.

    Args:
      cache: dtype[L,B,G,S,H], dtype[B,G,S,H] or dtype[B*G,S,H].
      new: of the same rank, with T slots, and of one layer or more.
      start: i32[B].
      layer: the first layer that is written.
      is_rolling: slot 0 follows the last one.
    """
    update = _roll_in if is_rolling else jax.lax.dynamic_update_slice
    put = _put_by_row if len(start) <= UNROLLED_ROWS else _put_at_once
    put, at_once = (functools.partial(f, update=update) for f in (put, _put_at_once))
    has_kernel = not is_rolling and _has_kernel(cache, new, len(start))
    args = (cache, new.astype(cache.dtype), start, jnp.int32(layer))
    return pin_tpu_layout(
        jax.lax.platform_dependent(
            *args, tpu=_put_by_kernel if has_kernel else put, cuda=at_once, default=put
        )
    )


def _roll_in(cache, new, at):
    """A ``dynamic_update_slice`` that goes on at slot 0 of its last axis but one.

    It writes as many slots up to the end, and as many from slot 0 on: what is new, and of the
    others what they hold.
    """
    S = cache.shape[-2]
    T = new.shape[-2]
    *lead, start, last = at
    start = start % S
    until_end = jnp.minimum(start, S - T)
    for begin, by in ((until_end, start - until_end), (0, start - S)):
        place = jnp.arange(T)[:, None] - by  # in what is new
        index = (*lead, begin, last)
        held = jax.lax.dynamic_slice(cache, index, new.shape)
        is_new = (place >= 0) & (place < T)
        new_there = jnp.where(is_new, jnp.roll(new, by, axis=-2), held)
        cache = jax.lax.dynamic_update_slice(cache, new_there, index)
    return cache


def _put_by_row(cache, new, start, layer, *, update=jax.lax.dynamic_update_slice):
    B = len(start)
    axis = 1 if cache.ndim == 5 else 0
    n = cache.shape[axis] // B  # entries of that axis a row
    for b in range(B):
        row = jax.lax.slice_in_dim(new, b * n, (b + 1) * n, axis=axis)
        at = [layer if axis else 0, *[0] * (cache.ndim - 1)]
        at[axis] = b * n
        at[-2] = start[b]
        cache = update(cache, row, at)
    return cache


def _put_at_once(cache, new, start, layer, *, update=jax.lax.dynamic_update_slice):
    """A vmapped update, which is a scatter."""
    axis = 1 if cache.ndim == 5 else 0

    def by_row(x):
        return x.reshape(*x.shape[:axis], len(start), -1, *x.shape[axis + 1 :])

    first = [layer if axis else 0, *[0] * (cache.ndim - 3)]

    def put(row, new, at):
        return update(row, new, (*first, at, 0))

    return jax.vmap(put, (axis, axis, 0), axis)(by_row(cache), by_row(new), start).reshape(
        cache.shape
    )


def _has_kernel(cache, new, batch):
    """Whether a TPU writes by ``write.write_rows``: whole tiles of many rows, few slots of each."""
    S, H = cache.shape[-2:]
    T = new.shape[-2]
    is_tiled = H % 128 == 0 and cache.dtype.itemsize in (2, 4) and S % 16 == 0 and S >= T + 32
    return KERNEL_ROWS < batch and T <= 32 and is_tiled


def _put_by_kernel(cache, new, start, layer):
    from spec_jax.models.caches.write import write_rows  # Pallas takes long to import

    B = len(start)
    heads = math.prod(cache.shape[:-2]) // B // (cache.shape[0] if cache.ndim == 5 else 1)

    def by_row(x):
        return x.reshape(-1, B, heads, *x.shape[-2:])

    return write_rows(by_row(cache), by_row(new), start, layer).reshape(cache.shape)


def take_slots(cache: jax.Array, slots: jax.Array) -> jax.Array:
    """Reads some slots of each row.

    Args:
      cache: as in ``put_rows``.
      slots: i32[B,P].

    Returns:
      The cache with P slots in place of S.
    """
    return jax.lax.platform_dependent(cache, slots, tpu=_slice_slots, default=_gather_slots)


def _gather_slots(cache, slots):
    axis = 1 if cache.ndim == 5 else 0
    slots = jnp.repeat(slots, cache.shape[axis] // len(slots), axis=0)

    def take(x, at):
        return jnp.take(x, at, axis=-2)

    return jax.vmap(take, (axis, 0), axis)(cache, slots)


def _slice_slots(cache, slots):
    """One dynamic_slice a slot: for a gather a TPU turns the whole cache."""
    B, P = slots.shape
    axis = 1 if cache.ndim == 5 else 0
    size = list(cache.shape)
    size[axis], size[-2] = size[axis] // B, 1

    def read(b, p):
        at = [0] * cache.ndim
        at[axis], at[-2] = b * size[axis], slots[b, p]
        return jax.lax.dynamic_slice(cache, at, size)

    rows = [jnp.concatenate([read(b, p) for p in range(P)], axis=-2) for b in range(B)]
    # Without the barrier reading and writing could become one step, which needs a copy.
    return jax.lax.optimization_barrier(jnp.concatenate(rows, axis=axis))


@flax.struct.dataclass
class KVCache(Snapshotted):
    """Keys and values of every layer. Slots stand next to the head dimension.

    If the layers are scanned, they are stacked, ``dtype[L,B,G,S,H]``. Otherwise they are a tuple
    of one array a layer: ``dtype[B,G,S,H]`` on a mesh, and ``dtype[B*G,S,H]`` without one, which
    is the shape that attention's products take. On a CPU, slicing a stack or changing the rank
    would each copy the layer. Keys and values may differ in their width H.
    """

    keys: jax.Array | tuple[jax.Array, ...]
    values: jax.Array | tuple[jax.Array, ...] | None  # None: the keys are the values
    length: jax.Array  # i32[B], tokens fed
    # Attention reads all slots, so that its rounding does not depend on how far they are filled.
    is_read_whole: bool = flax.struct.field(pytree_node=False, default=False)
    attention: str = flax.struct.field(pytree_node=False, default="auto")  # see ``attend_cache``
    kv_replication: int = flax.struct.field(pytree_node=False, default=1)  # see ``sharding``

    is_rolling: ClassVar[bool] = False  # slot 0 follows the last one

    @classmethod
    def create(
        cls,
        config: Any,
        batch: int,
        slots: int,
        dtype: DTypeLike = jnp.float32,
        num_layers: int | None = None,
    ) -> Self:
        """Creates an empty cache for ``batch`` rows of ``slots`` tokens.

        Args:
          config: of the model.
          batch: B.
          slots: S.
          dtype: of keys and values.
          num_layers: number of layers that attend; by default all layers of the model.
        """
        L = config.num_hidden_layers if num_layers is None else num_layers
        copies = kv_replication("kv_heads", config.num_key_value_heads)
        G = copies * config.num_key_value_heads

        def zeros(width):
            if config.scan_layers and L > 1:  # the slice of a stack of one is a change of rank
                return jnp.zeros((L, batch, G, slots, width), dtype)
            rows = (batch * G,) if ambient() is None else (batch, G)
            return tuple(jnp.zeros((*rows, slots, width), dtype) for _ in range(L))

        keys, values = (width and zeros(width) for width in cls.widths(config))
        attention = getattr(config, "attention", "auto")
        length = jnp.zeros((batch,), jnp.int32)
        return cls(keys, values, length, attention=attention, kv_replication=copies)

    @staticmethod
    def widths(config: Any) -> tuple[int, int | None]:
        """Returns the widths of a key and of a value; None if the keys are the values."""
        return config.key_dim, config.value_dim

    def axes(self) -> KVCache:
        """The logical axes of the arrays, see ``sharding``."""
        axes = self._array_axes
        keys, values = jax.tree.map(lambda x: axes, (self.keys, self.values))
        return self.replace(keys=keys, values=values, length=P("batch"))

    @property
    def _array_axes(self) -> P:
        axes = P("layers", "batch", "kv_heads", "slots", "head_dim")
        return {5: axes, 4: P(*axes[1:]), 3: P()}[jax.tree.leaves(self.keys)[0].ndim]

    @property
    def is_stacked(self) -> bool:
        """Whether the layers are stacked in one array."""
        return not isinstance(self.keys, tuple)

    @property
    def slots(self) -> int:
        """S."""
        return self.layer(0)[0].shape[-2]

    @property
    def arrays(self) -> tuple[Any, Any]:
        """Keys and values of all layers, as they are held."""
        return self.keys, self.keys if self.values is None else self.values

    def layer(self, index: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values of one layer, dtype[B,G,S,H] or dtype[B*G,S,H].

        Args:
          index: of the layer; may be traced if the layers are stacked, or if there is one layer.
        """
        index = index if self.is_stacked or len(self.keys) > 1 else 0
        return self.keys[index], self.values[index]

    def write(
        self, layer: int | jax.Array, keys: jax.Array, values: jax.Array, start: jax.Array
    ) -> KVCache:
        """Writes T new slots per row, in place if the cache is donated.

        Unless the cache is rolling, the caller ensures ``start + T <= S``: a slice past the end
        would be shifted back onto valid entries.

        Args:
          layer: index of the layer, see ``layer``.
          keys: dtype[B,G,T,H].
          values: dtype[B,G,T,H].
          start: i32[B], the first slot to write in each row.
        """
        is_finite = jnp.isfinite(values).all(axis=-1, keepdims=True)
        keys, values = jnp.where(is_finite, keys, jnp.nan), jnp.where(is_finite, values, 0)

        def into(caches, new):
            return self._put(caches, layer, new, start)

        return self.replace(keys=into(self.keys, keys), values=into(self.values, values))

    def _put(self, caches, layer, new, start):
        """Keys or values of all layers, with new slots of one."""
        axes = self._array_axes
        put = functools.partial(put_rows, is_rolling=self.is_rolling)
        put = shard_map_over(put, (axes, axes, P("batch"), P()), axes)
        if self.is_stacked:
            return put(caches, new[None], start, jnp.int32(layer))
        index = layer if len(caches) > 1 else 0
        shape = (*caches[index].shape[:-2], *new.shape[-2:])
        cache = put(caches[index], new.reshape(shape), start, jnp.int32(0))
        return (*caches[:index], cache, *caches[index + 1 :])

    def positions(self, slots: jax.Array, end: jax.Array) -> jax.Array:
        """Returns the position that each of some slots holds, see ``Sees``: here its own number.

        Args:
          slots: i32[S].
          end: i32[B], the position after the last token that was written.

        Returns:
          i32[S] or i32[B,S]; below 0 where a slot holds nothing.
        """
        del end
        return slots

    def slots_of(self, positions: jax.Array) -> jax.Array:
        """Returns the slots of positions, i32[...]."""
        return positions

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BGTH: jax.Array,
        v_BGTH: jax.Array,
        index: int | jax.Array,
        sees: Sees,
        scale: float | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Writes the pass's keys and values, and attends over all slots that each token sees.

        Args and Returns are those of ``layers.attend_window``.
        """
        cache = self.write(index, k_BGTH, v_BGTH, sees.start)
        if not self.is_read_whole:
            return attend_cache(q_BTNH, cache, index, sees, scale), cache
        slots = jnp.arange(self.slots, dtype=jnp.int32)
        positions = jnp.broadcast_to(self.positions(slots, sees.end), (len(q_BTNH), self.slots))
        if sees.inside is not None:
            return cache._attend_paths(q_BTNH, index, sees, positions, scale), cache
        return attend(q_BTNH, *cache.layer(index), sees(positions), scale=scale), cache

    def _attend_paths(self, q_BTNH, index, sees, positions, scale):
        """Attends from each node over a copy of the slots in which its path stands in one piece.

        So its sums have the terms at the places that they have once the path is committed.
        """
        B, T, N, H = q_BTNH.shape
        S = self.slots
        W = sees.inside.shape[-1]
        inside = jnp.broadcast_to(sees.inside, (B, T, W))
        place = positions - self.length[:, None]  # i32[B,S], in the window
        path = jnp.argsort(~inside, axis=-1, stable=True)  # i32[B,T,W], what is seen first
        at = jnp.clip(place, 0, W - 1)[:, None]
        moved = jnp.take_along_axis(path, jnp.broadcast_to(at, (B, T, S)), axis=2)
        is_inside = ((place >= 0) & (place < W))[:, None]
        moved = self.slots_of(self.length[:, None, None] + moved)
        moved = jnp.where(is_inside, moved, jnp.arange(S))

        def gather(x):
            x = x.reshape(B, 1, -1, S, x.shape[-1])
            x = jnp.take_along_axis(x, moved[:, :, None, :, None], axis=3)
            return x.reshape(B * T, -1, S, x.shape[-1])

        last = self.length[:, None] + inside.sum(axis=2, dtype=jnp.int32) - 1
        mask = Sees(last.reshape(-1), 1, size=sees.size)(jnp.repeat(positions, T, axis=0))
        keys, values = map(gather, self.layer(index))
        out = attend(q_BTNH.reshape(B * T, 1, N, H), keys, values, mask, scale=scale)
        return out.reshape(B, T, -1)

    def open_window(self, width: int) -> KVCache:
        """Returns the cache itself: the slots after the committed ones are room enough."""
        del width
        return self

    def commit(self, n: jax.Array, path: jax.Array | None = None) -> KVCache:
        """Keeps ``n`` tokens of the window and forgets the others.

        Args:
          n: i32[B], how many tokens to keep.
          path: i32[B,P], their slots in the window, of which the first n count; these are moved
            to its front. None if they stand there already.
        """
        moved = self if path is None else self._gather(path)
        return moved.replace(length=self.length + n)

    def rewind(self, n: jax.Array) -> KVCache:
        """Forgets the last ``n`` (i32[B]) committed tokens."""
        return self.replace(length=self.length - n)

    def _gather(self, path) -> KVCache:
        """Copies slots ``path`` (i32[B,P]) of the window to its front."""
        axes = self._array_axes

        def move(cache, slots, start):
            # Read everything before writing: a shifted copy in place may read what it wrote.
            moved = take_slots(cache, slots)
            return put_rows(cache, moved, start, is_rolling=self.is_rolling)

        move = shard_map_over(move, (axes, P("batch"), P("batch")), axes)

        def each(cache):
            slots = self.slots_of(self.length[:, None] + path)
            return move(cache, slots, self.length)

        return self.replace(
            keys=jax.tree.map(each, self.keys), values=jax.tree.map(each, self.values)
        )

    def insert_row(self, row: int | jax.Array, other: KVCache) -> KVCache:
        """Replaces row ``row`` by the only row of ``other``, which has as many slots."""
        update = jax.lax.dynamic_update_slice_in_dim

        def put(full, one):
            axis = 1 if self.is_stacked else 0
            return update(full, one, row * one.shape[axis], axis=axis)

        return self.replace(
            keys=jax.tree.map(put, self.keys, other.keys),
            values=jax.tree.map(put, self.values, other.values),
            length=self.length.at[row].set(other.length[0]),
        )

    def take_rows(self, rows: jax.Array) -> KVCache:
        """Returns the cache of the rows i32[P], in their order."""
        B = len(self.length)
        axis = 1 if self.is_stacked else 0

        def take(x):
            by_row = x.reshape(*x.shape[:axis], B, -1, *x.shape[-2:])  # rows and heads apart
            taken = take_of_array(by_row, rows, axis)
            return taken.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

        def each(arrays):
            return jax.tree.map(take, arrays)

        length = take_of_array(self.length, rows)
        return self.replace(keys=each(self.keys), values=each(self.values), length=length)

    def _by_layer(self, arrays) -> tuple[jax.Array, ...]:
        """One ``dtype[B,G,S,H]`` a layer, each head once."""
        B = self.length.shape[0]
        copies = self.kv_replication
        by_layer = (x.reshape(B, -1, *x.shape[-2:]) for x in arrays)
        return tuple(x if copies == 1 else constrain(x, "batch")[:, ::copies] for x in by_layer)

    def parts(self) -> dict[str, tuple[jax.Array, ...]]:
        """Returns copies of keys and values, one ``dtype[B,G,S,H]`` a layer, for a snapshot."""
        held = {"keys": self.keys, "values": self.values}
        return {
            name: tuple(map(jnp.copy, self._by_layer(x)))
            for name, x in held.items()
            if x is not None
        }

    def with_parts(self, parts: dict[str, tuple[jax.Array, ...]], length: jax.Array) -> KVCache:
        """Returns the cache with copies of the keys and values of ``parts``."""

        def lay_out(ours, arrays):
            if self.kv_replication > 1:
                arrays = [jnp.repeat(x, self.kv_replication, axis=1) for x in arrays]
            if self.is_stacked:
                return jnp.stack(arrays)
            return tuple(jnp.copy(x).reshape(own.shape) for own, x in zip(ours, arrays))

        laid_out = {name: lay_out(getattr(self, name), x) for name, x in parts.items()}
        return self.replace(**laid_out, length=jnp.copy(length))
