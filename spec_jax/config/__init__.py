"""Configuration: frozen, validated where it enters, readable from a file."""

from spec_jax.config.asynchronous import AsyncSpecConfig
from spec_jax.config.speculative import (
    BUCKETS,
    GREEDY_BELOW,
    METHODS,
    STRATEGIES,
    SamplerConfig,
    SpeculativeConfig,
    build,
    check_integer,
)

__all__ = [
    "AsyncSpecConfig",
    "BUCKETS",
    "GREEDY_BELOW",
    "METHODS",
    "STRATEGIES",
    "SamplerConfig",
    "SpeculativeConfig",
    "build",
    "check_integer",
]
