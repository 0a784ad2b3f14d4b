"""Drafters: what they propose, and from what."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_jax.drafters.ngram import lookup

WIDTH = 24
_lookup = jax.jit(lookup, static_argnums=(2, 3, 4))


def by_hand(history, K, longest, shortest):
    """The longest suffix that occurred before; of its occurrences the latest."""
    for n in range(min(longest, len(history)), shortest - 1, -1):
        suffix = history[len(history) - n :]
        for start in range(len(history) - n - 1, -1, -1):
            if history[start : start + n] == suffix:
                return history[start + n : start + n + K]
    return []


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=WIDTH - 2), st.sampled_from([(3, 1), (2, 2)])
)
def test_lookup_is_the_search_by_hand(history, sizes):
    tokens = np.full(WIDTH, 9, np.int32)
    tokens[: len(history)] = history
    copied, n = _lookup(jnp.asarray(tokens), jnp.int32(len(history) - 1), 4, *sizes)
    expected = by_hand(history, 4, *sizes)
    assert int(n) == len(expected)
    assert np.asarray(copied).tolist() == expected + [0] * (4 - len(expected))
