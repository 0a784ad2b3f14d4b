"""Whether the installed jax writes a few slots of a large array in place, as decode loops must.

Needs nothing but jax: `python tests/support/writes.py` in an environment with another release says
whether its CPU writes in place. `docs/measurements.md` has the table.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

SLOTS = (256, 4096, 65536)
WIDTH = 64  # of a head
_WRITES = 100  # a call


def put(cache, new, start):
    """Writes one row's new slots, as ``put_rows`` does without a mesh."""
    return jax.lax.dynamic_update_slice(cache, new.astype(cache.dtype), (0, start[0], 0))


def lower(heads: int, slots: int, dtype, write=put):
    """Lowers a loop that carries a donated array and writes one slot a step.

    Args:
      heads: G, of one row.
      slots: S.
      dtype: of the array.
      write: ``(cache dtype[G,S,H], new dtype[G,1,H], start i32[1]) -> cache``.
    """

    def run(cache, count):
        def step(i, cache):
            new = jnp.full((heads, 1, WIDTH), i).astype(dtype)
            return write(cache, new, jnp.full((1,), i % slots, jnp.int32))

        return jax.lax.fori_loop(0, count, step, cache)

    cache = jax.ShapeDtypeStruct((heads, slots, WIDTH), dtype)
    return jax.jit(run, donate_argnums=0).lower(cache, jax.ShapeDtypeStruct((), jnp.int32))


def write_us(heads: int, slots: int, dtype, write=put) -> float:
    """Returns the median microseconds of a write, of 5 to 25 calls."""
    run = lower(heads, slots, dtype, write).compile()
    cache, times = jnp.zeros((heads, slots, WIDTH), dtype), []
    end = time.perf_counter() + 1.0
    while len(times) < 5 or (len(times) < 25 and time.perf_counter() < end):
        begin = time.perf_counter()
        cache = jax.block_until_ready(run(cache, np.int32(_WRITES)))
        times.append(1e6 * (time.perf_counter() - begin) / _WRITES)
    return statistics.median(times)


def is_in_place(times_us) -> bool:
    """Whether writes take as long however many slots there are: a rewrite takes over 100 times."""
    return times_us[-1] < 20 * times_us[0]


def table(write=put, dtypes=(jnp.float32, jnp.bfloat16, jnp.uint16)) -> dict[str, list[float]]:
    """Returns microseconds a write at each number of slots, by heads and dtype."""
    return {
        f"{heads} heads, {jnp.dtype(dtype).name}": [
            write_us(heads, slots, dtype, write) for slots in SLOTS
        ]
        for heads in (2, 4)
        for dtype in dtypes
    }


if __name__ == "__main__":
    print(f"jax {jax.__version__}, microseconds a write at {SLOTS} slots")
    for name, times_us in table().items():
        said = "in place" if is_in_place(times_us) else "REWRITES THE ARRAY"
        print(f"  {name:<18}", *(f"{us:10.2f}" for us in times_us), f"  {said}")
