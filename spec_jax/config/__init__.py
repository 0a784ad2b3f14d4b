"""Configuration: frozen, validated where it enters, readable from a file."""

from spec_jax.config.asynchronous import AsyncSpecConfig
from spec_jax.config.checks import check_integer
from spec_jax.config.read import build
from spec_jax.config.records import (
    BUCKETS,
    AdaptiveConfig,
    NgramConfig,
    SuffixConfig,
    SyntheticConfig,
    TreeConfig,
    TypicalConfig,
)
from spec_jax.config.sampler import GREEDY_BELOW, SamplerConfig, columns
from spec_jax.config.speculative import METHODS, STRATEGIES, SpeculativeConfig

__all__ = [
    "AdaptiveConfig",
    "AsyncSpecConfig",
    "BUCKETS",
    "GREEDY_BELOW",
    "METHODS",
    "NgramConfig",
    "STRATEGIES",
    "SamplerConfig",
    "SpeculativeConfig",
    "SuffixConfig",
    "SyntheticConfig",
    "TreeConfig",
    "TypicalConfig",
    "build",
    "check_integer",
    "columns",
]
