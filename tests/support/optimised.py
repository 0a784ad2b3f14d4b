"""The loop of ``decode``, compiled with optimisation: for tests that run for longer than they
compile. What the others are compiled with: conftest.py."""

import jax

from spec_jax import decoding

prefill = decoding.prefill
generate = jax.jit(
    decoding.generate.__wrapped__,
    static_argnames=("system",),
    donate_argnames=("state",),
    compiler_options={"xla_backend_optimization_level": 1},
)
