"""The drafter's states after commits, against a fresh prefill of the same tokens."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from spec_jax import decoding
from spec_jax.compilation import bounded_jit
from spec_jax.contracts import Proposal
from spec_jax.testing.certificate.forcing import Drafting, matches_report, propose_afresh
from spec_jax.testing.certificate.loop import Loop
from spec_jax.testing.certificate.records import CertificateError, short, where

_ALONE = 50  # places whose drafts are drawn in batches of one
_TOLERANCE = 1e-4  # on probabilities of a state that has been fed token by token


class Asked(NamedTuple):
    """What a drafter proposed after fresh prefills of some texts, as NumPy arrays.

    Attributes:
      contexts: the texts and the samplers.
      gumbel: the noise.
      proposal: what it proposed.
    """

    contexts: Any
    gumbel: np.ndarray
    proposal: Proposal


def check_states(loop: Loop, state: decoding.DecodeState, of: np.ndarray) -> tuple[float, Asked]:
    """Compares the drafter's next proposal with the one after a fresh prefill of the text.

    Args:
      loop: whose state it is.
      state: after some rounds.
      of: i64[B], which of the loop's rows stands in each place.

    Returns:
      The largest difference of a probability, and what was asked after fresh prefills.

    Raises:
      CertificateError: they differ.
    """
    system = loop.system
    V = loop.system.target.vocab_size
    K = loop.system.num_draft
    noise = np.random.default_rng(2).gumbel(size=(1, K, V)).astype(np.float32)
    noise = np.broadcast_to(noise, (len(of), K, V))  # of all rows, whatever their place
    kept = propose_next(system, loop.params, state, noise)
    contexts = (state.tokens, state.length, state.sampler, state.draft_sampler)
    _, fresh = _propose_afresh(system, loop.params, contexts, noise)
    # On the host, since the state's arrays are donated.
    asked = Asked(*jax.tree.map(np.asarray, (contexts, noise, fresh)))
    kept, fresh = jax.tree.map(np.asarray, kept), asked.proposal
    alike, off = _compare(kept, fresh)
    differing = np.flatnonzero(~alike | ~(off.max(axis=1) <= _TOLERANCE))
    if not len(differing):
        return float(off.max()), asked
    total = np.asarray(state.total)
    b = differing[total[differing].argmin()]
    row = loop.rows[of[b]]
    tokens = np.asarray(state.tokens)[b]
    output = tokens[len(row.prompt) : total[b]]
    kinds = np.asarray(state.kind)[b, len(row.prompt) : total[b]]
    kinds = ", ".join(decoding.Kind(int(k)).name.lower() for k in kinds)
    if alike[b]:
        node = off[b].argmax()

        def show(p):
            return f"draws draft {node + 1} from {short(p.probs[b, node])}"
    else:

        def show(p):
            return f"drafts {p.tokens[b, : p.n_draft[b]].tolist()}"

    raise CertificateError(
        f"drafter {system.drafter.name!r}: its state after commit is not that of a fresh "
        f"prefill of the same tokens: it {show(kept)}, and after a fresh prefill it "
        f"{show(fresh)}, {where(row, output, K)}; these tokens were {kinds}. If it is meant to "
        "remember more than the row's text, pass has_memory=True; if it remembers other "
        "outputs, it must say so itself (Drafter.has_memory, host_drafter(num_updates=...))"
    )


def check_stateless(loop: Loop, asked: Asked) -> None:
    """Compares what is proposed after some texts with what was, before much was decoded.

    Raises:
      CertificateError: the drafts differ, so the drafter remembers what it does not say.
    """
    _, after = _propose_afresh(loop.system, loop.params, asked.contexts, asked.gumbel)
    for name in ("tokens", "n_draft", "probs", "parents"):
        before = getattr(asked.proposal, name)
        if before is not None and not np.array_equal(before, getattr(after, name)):
            raise CertificateError(
                f"drafter {loop.system.drafter.name!r} proposed different drafts for the same "
                "texts later on, so it remembers earlier outputs. Declare it (Drafter.has_memory, "
                "host_drafter(num_updates=...)), or outputs are biased where a seed is reused"
            )


def check_alone(loop: Loop, asked: Asked) -> int:
    """Compares what is proposed after some texts with what is in batches of one.

    Returns:
      How many texts.

    Raises:
      CertificateError: the drafts differ, or their distributions.
    """
    count = min(_ALONE, len(asked.gumbel))
    parents = Drafting(loop.system, loop.params, loop.rows).parents
    for b in range(count):
        context, gumbel, row = jax.tree.map(lambda x: x[b : b + 1], tuple(asked))
        _, alone = _propose_afresh(loop.system, loop.params, context, gumbel)
        alone = jax.tree.map(np.asarray, alone)
        alike, off = _compare(alone, row)
        is_drawn = (alone.tokens == row.tokens).all()
        if alone.probs is not None:  # a near tie is drawn either way
            is_drawn |= matches_report(alone, gumbel, parents).all()
        if not (alike.all() and (off <= _TOLERANCE).all() and is_drawn):
            tokens, length, *_ = context
            raise CertificateError(
                f"drafter {loop.system.drafter.name!r} proposes other drafts in a batch of one "
                f"than in a larger batch, after the tokens {tokens[0, : length[0] + 1].tolist()} "
                f"(K={loop.system.num_draft})"
            )
    return count


@functools.partial(bounded_jit, static_argnames="system")
def propose_next(system: decoding.System, params, state: decoding.DecodeState, gumbel):
    """Returns what the drafter proposes next after a state, with given noise.

    Args:
      system: target, drafter, rule and K.
      params: ``{"target": ..., "draft": ...}``.
      state: of all rows.
      gumbel: f32[B,K,V], the noise.
    """
    context = system.context(
        state.tokens,
        state.length,
        state.draft_sampler,
        state.sampler.seed,
        is_greedy=None,  # also where no rule would read it, the report is compared
    )
    context = context._replace(is_coupled=False, has_probs=True, gumbel=gumbel)
    return decoding.propose(params["draft"], state.draft, context, system)[0]


_propose_afresh = bounded_jit(propose_afresh, static_argnames="system")


def _compare(a: Proposal, b: Proposal) -> tuple[np.ndarray, np.ndarray]:
    """bool[B], whether as much is offered, the same if nothing is reported; f64[B,K], how far apart
    the reports are.
    """
    B, K = a.tokens.shape
    offered = [np.asarray(proposal.is_offered) for proposal in (a, b)]
    alike = (offered[0] == offered[1]).all(axis=1)
    is_offered = offered[0] & offered[1]
    if a.probs is not None:
        # After a near tie two chains go on from different drafts: compare up to there.
        same = np.cumprod(a.tokens == b.tokens, axis=1)
        same = np.concatenate([np.ones((B, 1), bool), same[:, :-1] > 0], axis=1)
        return alike, np.where(is_offered & same, np.abs(a.probs - b.probs).max(axis=2), 0.0)
    alike &= ((a.tokens == b.tokens) | ~is_offered).all(axis=1)
    if a.parents is not None:
        alike &= ((a.parents == b.parents) | ~is_offered).all(axis=1)
    return alike, np.zeros((B, K))
