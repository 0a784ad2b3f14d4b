"""The options of a call of ``SpeculativeDecoder.generate``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.engine.cancellation import CancellationToken
from spec_jax.engine.request import Messages
from spec_jax.sampling import Samplers


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """What ``generate``, ``stream`` and ``generate_async`` take beside prompts."""

    messages: Messages | Sequence[Messages] | None = None
    max_length: int | None = None
    stop: str | Sequence[str] = ()
    stop_tokens: Sequence[int] | None = None
    sampler: Samplers | str | None = None
    draft_sampler: Samplers | None = None
    seeds: Sequence[int] | None = None
    cancellation_token: CancellationToken | Sequence[CancellationToken] | None = None
    rounds_per_sync: int | None = None
    pad_to: int = 0
    logprobs: bool = False
    num_samples: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> GenerateOptions:
        """Takes the options among a function's arguments, ``locals()`` in its first line."""
        return cls(**{name: arguments[name] for name in NAMES & arguments.keys()})


NAMES = frozenset(field.name for field in dataclasses.fields(GenerateOptions))
