"""The asynchronous decoder's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from spec_jax.config.checks import check, check_integer
from spec_jax.config.read import build, reads_flat_names
from spec_jax.config.sampler import SamplerConfig
from spec_jax.show.summary import short_repr


@reads_flat_names
@dataclasses.dataclass(frozen=True)
class AsyncSpecConfig:
    """The other published shape of a decoder's config, which holds the samplers and the limit.

    The draft model or head says what drafts, and the rule is ``SpeculativeConfig``'s default.

    Attributes:
      spec_k: K, tokens drafted a round.
      draft_sampler: how drafts are drawn; None: as the target's tokens.
      target_sampler: how the target's tokens are drawn.
      force_n1: draft nothing: the target decodes one token a pass.
      max_tokens: maximum tokens of a row, prompt and output together (what a call names
        ``max_length``), where a call names no limit; None: the call's default holds.
    """

    spec_k: int = 4
    draft_sampler: SamplerConfig | None = None
    target_sampler: SamplerConfig = SamplerConfig()
    force_n1: bool = False
    max_tokens: int | None = None

    __repr__ = short_repr("spec_k")

    def __post_init__(self):
        check_integer("spec_k", self.spec_k, 1)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 2)
        check(isinstance(self.force_n1, bool), "force_n1", self.force_n1, "True or False")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AsyncSpecConfig:
        """Builds a config from plain values; a sampler may be a mapping too.

        Raises:
          ConfigError: an unknown key (the known ones are listed) or a wrong value.
        """
        return build(cls, values)
