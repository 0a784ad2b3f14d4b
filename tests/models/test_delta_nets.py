"""Gated delta nets, over chunks, as they are defined: token after token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles.state_space import run_delta_net
from support.tiny_models import QWEN35, random_tensor, random_weights

from spec_jax.models.caches.state import StateCache
from spec_jax.models.delta import delta_net, invert_unit_lower
from spec_jax.models.layers import Window
from spec_jax.models.ssm import CHUNK


def test_a_delta_net_equals_its_recurrence():
    """Over chunks, keys that repeat among them, and the state that ragged rows leave."""
    config, T = QWEN35.mixer, CHUNK + 21
    layer = dict(random_weights(QWEN35)["layers"]["0"], decay=jnp.asarray([-6.0, -1.0, 1.0, 5.0]))
    x = random_tensor("inputs", (2, T, QWEN35.hidden_size), 0)
    x[:, 9:40] = x[:, 8:9]
    lengths = np.array([T, CHUNK + 2])

    @jax.jit
    def run(x):
        cache = StateCache.create(config, 1, 2)
        window = Window.after(QWEN35, cache, 2, T)
        out, cache = delta_net(layer, x, cache, 0, window, config)
        return out, cache.commit(jnp.asarray(lengths))

    out, cache = run(x)
    as_64 = {name: np.asarray(w, np.float64) for name, w in layer.items()}
    for b, length in enumerate(lengths):
        expected, state, last = run_delta_net(as_64, x[b, :length].astype(np.float64), config)
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(out[b, :length], expected, atol=2e-5)
        np.testing.assert_allclose(cache.layers[0].ssm[b], state, atol=2e-5)
        np.testing.assert_allclose(cache.layers[0].conv[b], last, atol=1e-6)


@pytest.mark.parametrize("size", [9, 16, CHUNK])
def test_inverses_of_triangular_matrices(size):
    """Random ones, and those of keys that repeat, where a series of powers loses all digits."""
    lower = np.tril(np.random.default_rng(size).normal(size=(2, size, size)) / 3, -1)
    lower[1] = np.tril(np.full((size, size), 0.9), -1)
    spoiled = lower + np.triu(np.full((size, size), np.nan))  # is not read
    found = jax.jit(invert_unit_lower)(spoiled.astype(np.float32))
    np.testing.assert_allclose(found, np.linalg.inv(lower + np.eye(size)), atol=2e-5)
