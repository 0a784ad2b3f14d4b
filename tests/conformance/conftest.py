"""The kinds of the tests' own are registered while these tests run."""

from __future__ import annotations

import pytest
from conformance import cells

from spec_jax.drafters import registry


@pytest.fixture(scope="module", autouse=True)
def registered():
    for kind in cells.OWN_KINDS:
        registry.register(kind)
    yield
    for kind in cells.OWN_KINDS:
        registry.unregister(kind.name)
