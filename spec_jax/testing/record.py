"""What a certificate says: its checks, what they did not cover, and the error where one fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from spec_jax.config import SamplerConfig
from spec_jax.errors import SpecJaxError
from spec_jax.testing.oracles import Row


class CertificateError(SpecJaxError, AssertionError):
    """The emitted tokens do not have the target's distribution.

    Attributes:
      certificate: what ``certify`` had proved before it failed; None for other functions.
    """

    certificate: Any = None


class StatementError(CertificateError):
    """A rule does not flip its coins, or does not draw its last token, as its verdict states."""


def where(row: Row, output: Sequence[int], num_draft: int) -> str:
    """Says after which tokens and under which settings something happens."""
    return (
        f"after the prompt {row.prompt} and the output {tuple(map(int, output))} "
        f"(K={num_draft}, {describe(row.target)}; draft: {describe(row.draft)})"
    )


def describe(config: SamplerConfig) -> str:
    """Returns the temperature and all that is not a default."""
    other = [
        f"{field.name} {getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if field.name not in ("temperature", "seed")
        and getattr(config, field.name) != field.default
    ]
    return ", ".join([f"temperature {config.temperature}", *other])


