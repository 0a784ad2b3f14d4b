"""The logit bias, as a processor without a state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spec_jax.config import SamplerConfig
from spec_jax.contracts import Processor
from spec_jax.errors import ConfigError

LOGIT_BIAS = Processor(
    "logit_bias",
    init=lambda tokens, length, vocab_size: (),
    apply=lambda bias, state, logits, drafted, is_before: logits + bias,
    advance=lambda state, tokens, n: state,
)
"""Adds its parameters, f32[V] of a row."""


def bias_of(configs: Sequence[SamplerConfig], vocab_size: int) -> np.ndarray | None:
    """Returns f32[B,V], the bias of each row; None where no row has one.

    Raises:
      ConfigError: a biased id is not in the vocabulary.
    """
    if not any(config.logit_bias for config in configs):
        return None
    bias = np.zeros((len(configs), vocab_size), np.float32)
    for row, config in enumerate(configs):
        for token, value in config.logit_bias:
            if token >= vocab_size:
                raise ConfigError(f"logit_bias names token {token}; the vocabulary is {vocab_size}")
            bias[row, token] = value
    return bias
