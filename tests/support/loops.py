"""A round in two compiled halves, for tests of decoding that need no loop of their own.

Such tests spend their time on compiling. Rules that ask the drafter for the same share the half
that drafts and verifies, which is three quarters of a round; accepting and committing is the rest.
"""

from __future__ import annotations

import functools

import jax
import numpy as np
from support.decoders import start

from spec_jax import decoding
from spec_jax.engine.stats import Stats, row_stats
from spec_jax.sampling import make_sampler

_ALIKE = {}  # a rule for all that read the same


@functools.partial(jax.jit, static_argnames="system")
def _draft_and_verify(params, state, system):
    proposal, state = decoding.draft(params["draft"], state, system)
    scores, state = decoding.verify(params["target"], state, proposal, system)
    return proposal, scores, state


@functools.partial(jax.jit, static_argnames="system")
def _accept_and_commit(params, state, proposal, scores, system):
    verdict = decoding.accept(state, proposal, scores, system)
    return decoding.commit(params, state, proposal, scores, verdict, system)


def decode_round(params, state, system):
    """``decoding.decode_round`` as two programs."""
    nameless = system.rule._replace(
        name="", accept=None, expected_acceptance=None, is_lossless=True, is_joint=False
    )
    alike = (
        system
        if system.observers
        else system._replace(rule=_ALIKE.setdefault(nameless, system.rule))
    )
    proposal, scores, state = _draft_and_verify(params, state, system=alike)
    return _accept_and_commit(params["draft"], state, proposal, scores, system=system)


def finish(params, state, system):
    """Rounds until every row has finished."""
    while state.is_active.any():
        state = decode_round(params, state, system)
    return state


def decode(decoder, prompts, max_new_tokens, samplers, **options):
    """The final state of the prompts; ``options`` as for ``make_request``."""
    vocab_size = decoder.target.model.vocab_size
    sampler = make_sampler(samplers, len(prompts), vocab_size, options.pop("seeds", None))
    state = start(decoder, prompts, max_new_tokens, sampler, **options)
    return finish(decoder.params(), state, decoder.system())


def outputs(state) -> list[list[int]]:
    """What each row has emitted."""
    begin, n = np.asarray(state.prompt_length), np.asarray((state.kind > 0).sum(axis=1))
    return [t[b : b + k].tolist() for t, b, k in zip(np.asarray(state.tokens), begin, n)]


def counts(state, num_draft, rows=None) -> Stats:
    """Of some rows together; None: of all."""
    total, emitted = Stats(), outputs(state)
    for row in range(len(emitted)) if rows is None else rows:
        begin = int(state.prompt_length[row])
        kept = slice(begin, begin + len(emitted[row]))
        kind, offered = np.asarray(state.kind[row])[kept], np.asarray(state.offered[row])[kept]
        total += row_stats(kind, offered, num_draft, finish=int(state.finish[row]))
    return total
