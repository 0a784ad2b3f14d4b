"""The asynchronous decoder's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from spec_jax.config.checks import check_options, integer, option
from spec_jax.config.read import build, flat_attribute, reads_flat_names
from spec_jax.config.sampler import SamplerConfig
from spec_jax.show.summary import short_repr


@reads_flat_names
@dataclasses.dataclass(frozen=True)
class AsyncSpecConfig:
    """Config of an engine that drafts and verifies asynchronously: K, both samplers and the limit.

    The draft model or head says what drafts, and the rule is ``SpeculativeConfig``'s default.

    Attributes:
      spec_k: K, tokens drafted a round.
      draft_sampler: how drafts are drawn; None: as the target's tokens.
      target_sampler: how the target's tokens are drawn.
      force_n1: draft nothing: the target decodes one token a pass.
      max_tokens: maximum tokens of a row, prompt and output together (what a call names
        ``max_length``), where a call names no limit; None: the call's default holds.
    """

    spec_k: int = integer(4, 1)
    draft_sampler: SamplerConfig | None = None
    target_sampler: SamplerConfig = SamplerConfig()
    force_n1: bool = option(False, lambda x: isinstance(x, bool), "True or False")
    max_tokens: int | None = integer(None, 2)

    __repr__ = short_repr("spec_k")
    __getattr__ = flat_attribute

    def __post_init__(self):
        check_options(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AsyncSpecConfig:
        """Builds a config from plain values; a sampler may be a mapping too.

        Raises:
          ConfigError: an unknown key (the known ones are listed) or a wrong value.
        """
        return build(cls, values)
