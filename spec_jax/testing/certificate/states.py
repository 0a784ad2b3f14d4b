"""What a drafter keeps: its states against a fresh prefill of the same tokens, and its memory.

Where a drafter learns from earlier outputs, the noise that judges its drafts must not be the noise
that made these outputs. Enumeration forces the noise, so it does not see whether noise is used
twice: prompts are decoded again with the same seeds.
"""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from spec_jax import decoding
from spec_jax.compilation import bounded_jit
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context, Drafter, Memory, Proposal
from spec_jax.testing.certificate import forcing
from spec_jax.testing.certificate.loop import Loop, joint
from spec_jax.testing.certificate.records import ALPHA, CertificateError, short, where
from spec_jax.testing.oracles import Row, goodness_of_fit, toy_logits

_ALONE = 50  # places whose drafts are drawn in batches of one
_TOLERANCE = 1e-4  # on probabilities of a state that has been fed token by token
_NUM_TOKENS = 3  # whose joint distribution is tested, of a drafter with a memory
_NUM_CALLS = 3


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
    kept = forcing.propose_next(system, loop.params, state, noise)
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
        "outputs, it must say so itself (Drafter.memory, host_drafter(num_updates=...))"
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
                "texts later on, so it remembers earlier outputs. Declare it (Drafter.memory, "
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
    parents = forcing.Drafting(loop.system, loop.params, loop.rows).parents
    for b in range(count):
        context, gumbel, row = jax.tree.map(lambda x: x[b : b + 1], tuple(asked))
        _, alone = _propose_afresh(loop.system, loop.params, context, gumbel)
        alone = jax.tree.map(np.asarray, alone)
        alike, off = _compare(alone, row)
        is_drawn = (alone.tokens == row.tokens).all()
        if alone.probs is not None:  # a near tie is drawn either way
            is_drawn |= forcing.matches_report(alone, gumbel, parents).all()
        if not (alike.all() and (off <= _TOLERANCE).all() and is_drawn):
            tokens, length, *_ = context
            raise CertificateError(
                f"drafter {loop.system.drafter.name!r} proposes other drafts in a batch of one "
                f"than in a larger batch, after the tokens {tokens[0, : length[0] + 1].tolist()} "
                f"(K={loop.system.num_draft})"
            )
    return count


_propose_afresh = bounded_jit(forcing.propose_afresh, static_argnames="system")


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
    system: decoding.System, params: dict[str, Any], memory: Memory | None, *, rows: int = 2048
) -> tuple[float, int]:
    """Tests three calls with the same prompts and seeds, between which the drafter learns.

    Each row has a memory of its own, or, if the drafter keeps its memory to itself, a prompt of
    its own, so that what it learns from one row is not blurred by the others.

    Args:
      system: a toy target, drafter, rule and K; the drafter has a memory.
      params: ``{"target": ..., "draft": ...}``, of which the draft's are replaced by the memory's.
      memory: what learns from outputs, copied for each row; None: the drafter does so by itself.
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
    logits_of = functools.partial(toy_logits, params["target"])
    loop = Loop(system, params, prompts, _NUM_TOKENS, slots, logits_of)
    expected = joint(Row(last, warm, warm), 1, _NUM_TOKENS, logits_of)
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
