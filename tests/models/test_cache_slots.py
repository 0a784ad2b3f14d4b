"""Slots of the attention cache that are read one by one, as along a path through a tree."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.models.caches import kv

SLOTS, H = 16, 4
AT = np.array([[5, 6, 9, 10], [2, 4, 2, 2], [1, 2, 4, 1]])  # of three rows


@pytest.mark.parametrize("shape", [(2, 3, 2, SLOTS, H), (3, 2, SLOTS, H), (6, SLOTS, H)])
def test_slots_are_read_alike_on_every_platform(shape):
    """A TPU slices what others gather."""
    cache = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    by_row = cache.reshape(-1, 3, 2, SLOTS, H)
    expected = [by_row[:, b].take(at, axis=-2) for b, at in enumerate(AT)]
    expected = np.stack(expected, axis=1).reshape(*shape[:-2], 4, H)
    for read in (kv.take_slots, kv._slice_slots, kv._gather_slots):
        np.testing.assert_array_equal(read(jnp.asarray(cache), jnp.asarray(AT)), expected)
