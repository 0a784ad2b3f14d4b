"""Logit processors: what changes the logits of a row before temperature and filters.

A ``spec_jax.Processor`` of your own is a step of sampling like the penalties, see
docs/processors.md:

    processor = spec_jax.Processor("no repeats", *per_token(init, apply, advance))
    decoder.generate(prompt, sampler=spec_jax.SamplerConfig(processors=(processor,)))
"""

from spec_jax.processors.active import BatchedProcessor, from_configs
from spec_jax.processors.bias import LOGIT_BIAS
from spec_jax.processors.penalties import PENALTIES, TokenCounts
from spec_jax.processors.tokens import per_token

__all__ = [
    "LOGIT_BIAS",
    "PENALTIES",
    "BatchedProcessor",
    "TokenCounts",
    "per_token",
    "from_configs",
]
