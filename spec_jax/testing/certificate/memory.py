"""Drafters that remember earlier outputs: prompts decoded again with the same seeds.

Where a drafter learns from outputs, the noise that judges its drafts must not be the noise that
made these outputs. Enumeration forces the noise, so it does not see whether noise is used twice.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax
import numpy as np

from spec_jax import decoding
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context, Drafter, Memory
from spec_jax.testing.certificate.loop import Loop, joint
from spec_jax.testing.certificate.records import ALPHA, CertificateError
from spec_jax.testing.oracles import LogitsOf, Row, goodness_of_fit

_NUM_TOKENS = 3  # whose joint distribution is tested
_NUM_CALLS = 3


def a_memory_each(drafter: Drafter) -> Drafter:
    """Returns a drafter without a state, with other parameters for each row.

    Every array of its parameters has the rows first.
    """

    def propose(params, state, context: Context, num_draft: int):
        fields = {name: getattr(context, name) for name in _BY_ROW}

        def one(params, fields):
            row = context._replace(**jax.tree.map(lambda x: x[None], fields))
            return jax.tree.map(lambda x: x[0], drafter.propose(params, (), row, num_draft)[0])

        return jax.vmap(one)(params, fields), state

    return drafter._replace(propose=propose)


_BY_ROW = ("tokens", "length", "sampler", "request", "gumbel", "is_greedy")


def certify_memory(
    system: decoding.System,
    params: dict[str, Any],
    memory: Memory | None,
    logits_of: LogitsOf,
    *,
    rows: int = 2048,
) -> tuple[float, int]:
    """Tests three calls with the same prompts and seeds, between which the drafter learns.

    Each row has a memory of its own, or, if the drafter keeps its memory to itself, a prompt of
    its own, so that what it learns from one row is not blurred by the others.

    Args:
      system: target, drafter, rule and K; the drafter has a memory.
      params: ``{"target": ..., "draft": ...}``, of which the draft's are replaced by the memory's.
      memory: what learns from outputs, copied for each row; None: the drafter does so by itself.
      logits_of: ``(params, tokens) -> f32[V]`` of the target.
      rows: how many prompts are decoded; each has a seed of its own.

    Returns:
      The smallest p-value, and how many sequences were decoded.

    Raises:
      CertificateError: the tokens of a call do not have the target's distribution.
    """
    V = system.target.vocab_size
    warm = SamplerConfig(temperature=1.0)
    last = (0, 1)  # the target reads no more of a prompt
    width = 0 if memory is not None else int(np.ceil(np.log(rows) / np.log(V)))
    own = np.arange(rows)[:, None] // V ** np.arange(width) % V
    memories = None if memory is None else [copy.copy(memory) for _ in range(rows)]
    if memories is not None:
        system = system._replace(drafter=a_memory_each(system.drafter))
    prompts = [Row((*ids, *last), warm, warm) for ids in own.tolist()]
    slots = width + len(last) + 1 + _NUM_TOKENS + system.lookahead_slots
    loop = Loop(system, params, prompts, _NUM_TOKENS, slots)
    expected = joint(
        Row(last, warm, warm), 1, _NUM_TOKENS, functools.partial(logits_of, params["target"])
    )
    p_value = 1.0
    for call in range(_NUM_CALLS):
        if memories is not None:
            each = [memory.params for memory in memories]
            loop.params = {**params, "draft": jax.tree.map(lambda *x: np.stack(x), *each)}
        output = loop.decode(np.arange(rows), np.arange(rows))
        for kept, tokens in zip(memories or [], output):
            kept.add(tokens)
        counts = np.zeros((V,) * _NUM_TOKENS, np.int64)
        np.add.at(counts, tuple(output[:, 1:].T), 1)
        p_value = min(p_value, goodness_of_fit(counts, expected))
        if not p_value >= ALPHA:
            raise CertificateError(
                f"{loop.name}: in call {call + 1} with the same prompts and seeds the tokens do "
                f"not have the target's distribution (chi-square p-value {p_value:.1e} over "
                f"{rows:,} rows): noise was used again that had made what the drafter learned "
                "from. Its num_updates must count every update of the memory, before the memory "
                "is read"
            )
    return p_value, _NUM_CALLS * rows
