"""The parts of an overlapped tick that run on the device: draft a block, score, accept.

See ``overlap`` for the algorithm and its invariants.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax import decoding
from spec_jax.compilation import bounded_jit
from spec_jax.contracts import Prompt, Proposal
from spec_jax.decoding import DecodeState, System
from spec_jax.decoding.calls import blame, call_prefill
from spec_jax.models.caches.rolling import check_rewind
from spec_jax.sampling import Sampler
from spec_jax.sharding import constrain_state, replicate


@flax.struct.dataclass
class Verified:
    """Outcome of one verified chain, sent to the draft's devices."""

    tokens: jax.Array  # i32[B,K+1], emitted, of which the first n_emit count
    n_emit: jax.Array  # i32[B]
    is_whole: jax.Array  # bool[B], every draft of the chain was accepted and emitted, up to d_1


@flax.struct.dataclass
class DraftSide:
    """The draft's side: what is committed, and its own tokens after it."""

    tokens: jax.Array  # i32[B,M+K], prompt and output
    length: jax.Array  # i32[B], tokens fed to the target
    sampler: Sampler
    request: jax.Array  # u32[B], the target's seed of each row
    is_greedy: jax.Array  # bool[B], rows whose target takes the argmax
    ahead: Proposal  # tokens alone
    block: Proposal  # tokens alone, drafted last
    draft: Any  # the drafter's state, of ``length + ahead.n_draft`` tokens


@functools.partial(bounded_jit, static_argnames=("system", "slots"))
def prefill_draft(
    params, prompts, tokens, length, sampler, request, is_greedy, *, system: System, slots: int
) -> tuple[DraftSide, Verified]:
    """Feeds the prompts to the draft.

    Args:
      params: the draft's parameters.
      prompts: i32[B,T], right-padded.
      tokens: i32[B,M], prompt and first token.
      length: i32[B], tokens fed to the target.
      sampler: the draft's sampler, after the first token.
      request: u32[B], the target's seed of each row.
      is_greedy: bool[B], rows whose target takes the argmax.
      system: target, drafter, rule and K.
      slots: the target's number of slots.

    Returns:
      The draft's side before the first tick, and an outcome that changes nothing.
    """
    B, _ = tokens.shape
    K = system.num_draft
    drafter = system.drafter
    first = jnp.take_along_axis(tokens, length[:, None], axis=1)[:, 0]
    # K slots more: a block follows what is ahead.
    prompt = Prompt(prompts, length, first, chunk=system.prefill_chunk)
    draft = call_prefill(drafter, params, prompt, slots + K)
    check_rewind(draft, 2 * K)  # up to K - 1 that are ahead, after a block of K + 1

    def none():
        return Proposal(jnp.zeros((B, K), jnp.int32), jnp.zeros((B,), jnp.int32))

    tokens = jnp.pad(tokens, ((0, 0), (0, K)))
    side = DraftSide(tokens, length, sampler, request, is_greedy, none(), none(), draft)
    outcome = Verified(
        jnp.zeros((B, K + 1), jnp.int32), jnp.zeros((B,), jnp.int32), jnp.zeros((B,), bool)
    )
    return constrain_state((side, outcome))


@functools.partial(bounded_jit, static_argnames="system", donate_argnames="side")
def draft_ahead(
    params, side: DraftSide, outcome: Verified, *, system: System
) -> tuple[Proposal, DraftSide]:
    """Takes in the outcome of the last tick, then drafts a block after what is ahead.

    Args:
      params: the draft's.
      side: from the last tick; donated.
      outcome: of the last tick.
      system: target, drafter, rule and K.

    Returns:
      The block, made safe to feed, and the side.
    """
    side = _follow_outcome(params, side, outcome, system.drafter)
    ahead = side.ahead
    view = decoding.append(side, {"tokens": ahead.tokens}, side.length + 1, ahead.n_draft)
    context = system.context(
        view.tokens, side.length + ahead.n_draft, view.sampler, side.request, side.is_greedy
    )
    block, draft = decoding.propose(params, side.draft, context, system)
    block = block.replace(num_updates=None)  # read by no rule that runs with a memory here
    side = side.replace(draft=draft, block=Proposal(block.tokens, block.n_draft))
    return constrain_state((block, side))


def _follow_outcome(params, side: DraftSide, outcome: Verified, drafter) -> DraftSide:
    """Applies an outcome: the side's own block is ahead now, or is dropped and forgotten."""
    ahead = remaining_ahead(side.block, outcome.is_whole)
    gained = outcome.n_emit + ahead.n_draft - side.ahead.n_draft
    # The tokens gained are the whole block, or the target's own after all that was ahead.
    own = jnp.take_along_axis(outcome.tokens, side.ahead.n_draft[:, None], axis=1)
    tokens = jnp.where(outcome.is_whole[:, None], side.block.tokens, own)
    n = jnp.maximum(gained, 0)
    with blame(f"commit of drafter {drafter.name!r}", tokens=tokens, n=n, state=side.draft):
        draft = drafter.commit(params, side.draft, tokens, n, None, None)
    with blame(f"rewind of drafter {drafter.name!r}", state=draft):
        draft = drafter.sync.rewind(draft, jnp.maximum(-gained, 0))
    side = decoding.append(side, {"tokens": outcome.tokens}, side.length + 1, outcome.n_emit)
    return side.replace(length=side.length + outcome.n_emit, ahead=ahead, draft=draft)


@functools.partial(bounded_jit, static_argnames="system", donate_argnames="state")
def score_ahead(
    params, state: DecodeState, ahead: jax.Array, *, system: System
) -> tuple[DecodeState, jax.Array, jax.Array | None]:
    """Runs the target over [pending | ahead].

    Args:
      params: the target's.
      state: donated.
      ahead: i32[B,K], of which the last column never counts.
      system: target, drafter, rule and K.

    Returns:
      The state with the window in its cache, f32[B,K,V] raw logits, and features or None.
    """
    logits, features, cache = decoding.target_pass(
        params, state.target, state.tokens, ahead[:, :-1], system
    )
    return constrain_state(state.replace(target=cache)), logits, features


@functools.partial(bounded_jit, static_argnames="system", donate_argnames=("state", "ahead"))
def accept_chain(
    state: DecodeState,
    ahead: Proposal,
    block: Proposal,
    logits: jax.Array,
    features: jax.Array | None,
    *,
    system: System,
) -> tuple[DecodeState, Proposal, Verified, jax.Array]:
    """Ends a tick: the rule decides on [ahead | the block's first draft], and the target commits.

    Args:
      state: with the window in its cache; donated.
      ahead: what the window holds; donated.
      block: what was drafted after it.
      logits: f32[B,K,V], of the window.
      features: dtype[B,K,E], of the window, which observers may read; None if there are none.
      system: target, drafter, rule and K.

    Returns:
      The state, what is ahead now, the outcome, and i32[], the rows that are active.
    """
    num_rows = ahead.n_draft + 1
    # There is no score after a whole chain: a copy of the one before stands there.
    rows = jnp.minimum(jnp.arange(system.num_draft + 1), ahead.n_draft[:, None])

    def of_rows(x):
        return jnp.take_along_axis(x, rows[:, :, None], axis=1)

    logits, features = jax.tree.map(of_rows, (logits, features))
    chain = join_chain(ahead, block)
    scores = decoding.score(logits, state.sampler, chain, is_argmax=system.reads_argmax)
    verdict = decoding.accept(state, chain, scores, system)
    scores = scores.replace(features=features)
    state, n_emit = decoding.emit(state, chain, scores, verdict, system, num_rows)
    is_whole = (verdict.n_accept == num_rows) & (n_emit == num_rows)
    state = state.replace(target=state.target.commit(n_emit))
    outcome = Verified(verdict.tokens, n_emit, is_whole)
    ahead = remaining_ahead(block, is_whole)
    num_active = replicate(state.is_active.sum(dtype=jnp.int32))
    return *constrain_state((state, ahead, outcome)), num_active


def join_chain(ahead: Proposal, block: Proposal) -> Proposal:
    """Joins [ahead | the block's first draft, where it has one] in K columns."""
    is_ahead = jnp.arange(ahead.tokens.shape[1]) < ahead.n_draft[:, None]

    def join(a, b):
        return jnp.where(is_ahead if a.ndim == 2 else is_ahead[:, :, None], a, b[:, :1])

    def without(proposal):
        return proposal.replace(n_draft=None, fault=None, is_sound=None)

    chain = jax.tree.map(join, without(ahead), without(block))
    n_draft = ahead.n_draft + jnp.minimum(block.n_draft, 1)
    return chain.replace(n_draft=n_draft, fault=block.fault, is_sound=block.is_sound)


def remaining_ahead(block: Proposal, is_whole: jax.Array) -> Proposal:
    """What is ahead after a tick: all but the block's first draft, or nothing."""
    without = block.replace(n_draft=None, fault=None, is_sound=None)
    moved = jax.tree.map(lambda x: jnp.roll(x, -1, axis=1), without)
    n_draft = jnp.where(is_whole, block.n_draft - 1, 0)
    return moved.replace(n_draft=n_draft, fault=block.fault, is_sound=block.is_sound)
