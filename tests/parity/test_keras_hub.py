"""KerasHub's speculative sampler itself has the distribution of its rule as restated here.

    pip install -e '.[test]' keras-hub  # in an environment of its own
    KERAS_BACKEND=jax PYTHONPATH=.:tests python -m pytest tests/parity/test_keras_hub.py

Seen with keras-hub 0.32.0 on keras 3.15; see docs/peers.md.
"""

import os

import numpy as np
import pytest
from oracles.argmax_drafts import P, Q, first_token

os.environ.setdefault("KERAS_BACKEND", "jax")
keras = pytest.importorskip("keras", reason="needs keras-hub, in an environment of its own")
keras_hub = pytest.importorskip("keras_hub", reason="needs keras-hub, in an environment of its own")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

SEEDS = 20_000


def first_tokens(batch, base_sampler):
    """The first new token of the first row, under every seed; K = 1, and no model but p and q."""
    sampler = keras_hub.samplers.SpeculativeSampler(
        num_speculative_tokens=1, base_sampler=base_sampler, seed=0
    )
    logits = lambda values, *shape: jnp.broadcast_to(
        jnp.log(jnp.asarray(list(map(float, values)))), (batch, *shape, len(values))
    )
    draft = lambda prompt, cache, index: (logits(Q), None, cache)
    verify = lambda prompt, cache, index, k: (logits(P, k + 1), cache)
    (state,) = sampler.variables

    def one(seed):
        with keras.StatelessScope(state_mapping=[(state, jnp.stack([jnp.uint32(0), seed]))]):
            prompt = jnp.zeros((batch, 3), jnp.int32)
            return sampler(next=None, prompt=prompt, index=1, draft_next=draft, verify_next=verify)[
                0, 1
            ]

    return np.asarray(jax.jit(jax.vmap(one))(jnp.arange(SEEDS, dtype=jnp.uint32)))


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_sampled_tokens_have_the_distribution_of_the_restated_rule(batch):
    tokens = first_tokens(batch, keras_hub.samplers.RandomSampler())
    want = [float(x) for x in first_token(P, Q, batch)]
    found = np.bincount(tokens, minlength=3) / SEEDS
    np.testing.assert_allclose(found, want, atol=6 * 0.5 / SEEDS**0.5)
    assert abs(found[0] - float(P[0])) > 0.1


def test_without_a_base_sampler_tokens_are_the_argmax_of_the_target():
    assert set(first_tokens(2, None)) == {int(np.argmax(P))}
