"""A kernel for TPUs that writes a few slots of every row of a cache in one call.

The call takes the cache in place. Slots lie in tiles of 8 or 16 by 128 numbers, so it reads the
tiles that a row's slots lie in, changes them, and writes them back: all rows of a group at a time.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

GROUP_BYTES = 2**21  # of a group's tiles, in on-chip memory
GROUP_ROWS = 128  # each has a semaphore, of which there is room for 512


def num_slots(num_tokens: int, dtype: jax.typing.DTypeLike) -> int:
    """Returns how many slots of a row are read and written: those of whole tiles."""
    tile = tile_of(dtype)
    return tile * (1 + -(-(num_tokens - 1) // tile))


def tile_of(dtype: jax.typing.DTypeLike) -> int:
    """Returns the slots of a tile."""
    return 32 // jnp.dtype(dtype).itemsize


def write_rows(
    cache: jax.Array,
    new: jax.Array,
    start: jax.Array,
    layer: jax.Array,
    *,
    is_interpreted: bool = False,
) -> jax.Array:
    """Writes T slots of each row, from slot ``start[b]`` on.

    Args:
      cache: dtype[L,B,G,S,H], where H is a multiple of 128, and S of a tile and at least
        ``num_slots``. It is written in place if nothing else reads it.
      new: dtype[I,B,G,T,H], of I layers.
      start: i32[B], at most S - T.
      layer: i32[], the first layer that is written.
      is_interpreted: runs on any platform, slowly.
    """
    _, B, G, S, H = cache.shape
    (num_layers, *_, T, _) = new.shape
    dtype = cache.dtype
    tile = tile_of(dtype)
    n = num_slots(T, dtype)
    most = min(GROUP_BYTES // (G * n * H * dtype.itemsize), GROUP_ROWS, B)
    rows = next(r for r in range(max(most, 1), 0, -1) if B % r == 0)
    begin = jnp.minimum(start // tile * tile, S - n)

    def kernel(layer_ref, begin_ref, shift_ref, new_ref, _, cache_ref, tiles_ref, semaphores):
        into = layer_ref[0] + pl.program_id(0)
        first = pl.program_id(1) * rows

        def copy(r, is_read):
            slots = pl.ds(pl.multiple_of(begin_ref[first + r], tile), n)
            there = cache_ref.at[into, first + r, :, slots, :]
            ends = (there, tiles_ref.at[r]) if is_read else (tiles_ref.at[r], there)
            return pltpu.make_async_copy(*ends, semaphores.at[r])

        def change(r, _):
            copy(r, True).wait()
            tiles = tiles_ref[r].astype(jnp.float32)
            place = jax.lax.broadcasted_iota(jnp.int32, tiles.shape, 1) - shift_ref[first + r]
            values = new_ref[0, r].astype(jnp.float32)
            for t in range(T):
                tiles = jnp.where(place == t, values[:, t : t + 1], tiles)
            tiles_ref[r] = tiles.astype(dtype)
            copy(r, False).start()

        jax.lax.fori_loop(0, rows, lambda r, _: copy(r, True).start(), None)
        jax.lax.fori_loop(0, rows, change, None)
        jax.lax.fori_loop(0, rows, lambda r, _: copy(r, False).wait(), None)

    block = pl.BlockSpec((1, rows, G, T, H), lambda i, j, *_: (i, j, 0, 0, 0))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(num_layers, B // rows),
        in_specs=[block, anywhere],
        out_specs=anywhere,
        scratch_shapes=[pltpu.VMEM((rows, G, n, H), dtype), pltpu.SemaphoreType.DMA((rows,))],
    )
    call = pl.pallas_call(
        kernel,
        grid_spec=grid,
        out_shape=jax.ShapeDtypeStruct(cache.shape, dtype),
        input_output_aliases={4: 0},
        interpret=is_interpreted,
        name="write_rows",
    )
    return call(layer.reshape(1), begin, start - begin, new, cache)
