"""Configuration: frozen, validated where it enters, readable from a file."""

from spec_jax.config.checks import check_integer
from spec_jax.config.read import build
from spec_jax.config.sampler import GREEDY_BELOW, SamplerConfig, columns
from spec_jax.config.speculative import (
    METHODS,
    STRATEGIES,
    AdaptiveConfig,
    AsyncSpecConfig,
    NgramConfig,
    SpeculativeConfig,
    SuffixConfig,
    SyntheticConfig,
    TreeConfig,
    TypicalConfig,
)

__all__ = [
    "AdaptiveConfig",
    "AsyncSpecConfig",
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
