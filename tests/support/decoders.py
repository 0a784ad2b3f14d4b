"""A decoder's first state, for tests that drive the loop themselves."""

from __future__ import annotations

from spec_jax import decoding
from spec_jax.engine.request import make_request


def start(decoder, prompts, max_new_tokens, sampler, system=None, **options):
    """Prefills prompts with one sampler for target and draft; ``options`` of ``make_request``."""
    engine = decoder.engine()
    system = engine.system if system is None else system
    request = make_request(system, prompts, max_new_tokens, sampler, sampler, **options)
    *arrays, slots = request
    return decoding.prefill(engine.params(), *arrays, system=system, slots=slots)
