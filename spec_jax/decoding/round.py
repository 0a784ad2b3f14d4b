"""One round of speculative decoding: draft, verify, accept, commit.

Invariants.
  1. The target's cache holds ``length`` tokens, all of them fed; ``tokens[b, length[b]]``
     is the one pending token, emitted and not fed.
  2. A round commits ``n_accept + 1`` tokens of every active row, 1..K+1, or fewer where a stop
     token, the limit or a fault cuts them. In a tree of drafts they are one path from the root. A
     finished row changes nothing.
  3. Every output token has one ``kind``: emitted = first + accepted + corrected + bonus.
  4. For a lossless rule the joint distribution of the emitted tokens is the target's, whatever
     the drafter, K and the batch; with the match rule the tokens equal plain decoding's.

Plain decoding is this round with K = 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spec_jax import rng
from spec_jax.contracts import Context, Noise, Proposal, Round, Rule, TargetScores, Verdict
from spec_jax.decoding.calls import blame, call_accept, call_forward, call_unembed, check_proposal
from spec_jax.decoding.observers import see_round
from spec_jax.decoding.state import DecodeState, Kind, System, append, apply_limits
from spec_jax.decoding.validate import find_fault, validate_proposal, validate_verdict
from spec_jax.errors import ConfigError
from spec_jax.sampling import Sampler, UpdateCounter, process
from spec_jax.sharding import SAMPLED_ROWS, constrain, shard_map_rows


def decode_round(params: dict[str, Any], state: DecodeState, system: System) -> DecodeState:
    """Runs one round for every row; rows may be at different lengths.

    Example:
      ```python
      import jax.numpy as jnp

      import spec_jax
      from spec_jax import decoding
      from spec_jax.sampling import make_sampler
      from spec_jax.testing import mock_model

      target = mock_model(vocab_size=8)  # or spec_jax.load_model("zoo/target")
      draft = mock_model(vocab_size=8, seed=1)

      decoder = spec_jax.SpeculativeDecoder(target, draft)
      system, params = decoder.system(), decoder.params(batch=1)
      sampler = make_sampler(spec_jax.SamplerConfig(), 1, 8)
      prompts = jnp.zeros((1, 16), jnp.int32).at[0, :3].set(jnp.array([1, 2, 3]))
      rows = jnp.array([3]), jnp.array([7]), jnp.zeros((1, 0), jnp.int32)  # lengths, limits, stops
      state = decoding.prefill(params, prompts, *rows, sampler, sampler, system=system, slots=128)
      state = decoding.decode_round(params, state, system)  # ``generate`` loops over it
      print(state.tokens[0, :7])
      ```

    Args:
      params: ``{"target": ..., "draft": ...}``.
      state: the state of all rows.
      system: target, drafter, rule and K.

    Returns:
      The state after the round.

    Raises:
      ConfigError, ShapeError: while tracing, the drafter or the rule breaks its contract.
    """
    proposal, state = draft(params, state, system)
    scores, state = verify(params["target"], state, proposal, system)
    verdict = accept(state, proposal, scores, system)
    return commit(params["draft"], state, proposal, scores, verdict, system)


def draft(params: Any, state: DecodeState, system: System) -> tuple[Proposal, DecodeState]:
    """Asks the drafter for K tokens per row.

    Args:
      params: ``{"target": ..., "draft": ...}``; the target's are for drafters that read it.
      state: the state of all rows.
      system: target, drafter, rule and K.

    Returns:
      The proposal, made safe to feed to the target, and the state with the drafter's new state.

    Raises:
      ConfigError: while tracing, K is above 0 and the target cannot rewind, or the proposal lacks
        what the rule needs.
      ShapeError: while tracing, the proposal has other shapes or dtypes than the contract's.
    """
    memory = system.drafter.memory
    if memory is not None and memory.read is not None:
        num_updates = memory.read(params["draft"], state.draft)
        state = state.with_update_count(UpdateCounter.MEMORY, num_updates)
    rows = (state.tokens, state.length, state.draft_sampler, state.sampler.seed)
    context = system.context(*rows, state.sampler.is_greedy, params["target"], state.target)
    proposal, drafter_state = propose(params["draft"], state.draft, context, system)
    if proposal.num_updates is not None:
        state = state.with_update_count(UpdateCounter.MEMORY, proposal.num_updates)
    return proposal, state.replace(draft=drafter_state)


def propose(
    params: Any, drafter_state: Any, context: Context, system: System
) -> tuple[Proposal, Any]:
    """Drafts as ``draft`` does, but for a given context; the certificate calls it too.

    Args:
      params: the draft's parameters.
      drafter_state: the drafter's state.
      context: what the drafter may look at.
      system: target, drafter, rule and K.
    """
    if system.num_draft > 0 and not system.target.can_rewind:
        raise ConfigError(
            f"the target cannot forget rejected drafts, and K is {system.num_draft}: it needs K = 0"
        )
    K = system.num_draft
    owner = f"propose of drafter {system.drafter.name!r}"
    with jax.named_scope("draft"):
        with blame(owner, context=context, num_draft=K, state=drafter_state):
            result = system.drafter.propose(params, drafter_state, context, K)
        batch = len(context.length)
        check_proposal(system.drafter, result, batch, K, system.target.vocab_size)
        proposal, drafter_state = result
        total = context.length + 1
        if system.drafted_until is not None:
            # Rows that are too long for the drafter are offered nothing. What it returned there is
            # not read, so it is no fault either.
            has_room = total <= system.drafted_until
            is_sound = proposal.is_sound
            proposal = proposal.replace(
                n_draft=jnp.where(has_room, proposal.n_draft, 0),
                is_sound=None if is_sound is None else is_sound | ~has_room,
            )
        return validate_proposal(proposal, system, context.is_greedy), drafter_state


def verify(
    params: Any, state: DecodeState, proposal: Proposal, system: System
) -> tuple[TargetScores, DecodeState]:
    """Runs the target once over the pending token and all drafts, and scores every node.

    Args:
      params: the target's parameters.
      state: the state of all rows.
      proposal: the drafts.
      system: target, drafter, rule and K.

    Returns:
      The scores, and the state with the drafts in the window of the target's cache. ``commit``
      keeps the accepted drafts.
    """
    logits, features, cache = target_pass(
        params, state.target, state.tokens, proposal.tokens, system, proposal.paths
    )
    scores = score(logits, state.sampler, proposal, is_argmax=system.reads_argmax)
    return scores.replace(features=features), state.replace(target=cache)


def target_pass(
    params: Any,
    cache: Any,
    tokens: jax.Array,
    drafts: jax.Array,
    system: System,
    window_mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, Any]:
    """Feeds the pending token and the drafts to the target.

    Args:
      params: the target's parameters.
      cache: the target's cache, with ``length`` tokens in each row.
      tokens: i32[B,M], of which ``tokens[b, length[b]]`` is pending.
      drafts: i32[B,T].
      system: has the target.
      window_mask: bool[B,T+1,T+1], which tokens of the window each node of a tree sees; None for
        a chain.

    Returns:
      The raw logits f32[B,T+1,V], the tapped features dtype[B,T+1,E] or None, and the cache with
      the window written.
    """
    with jax.named_scope("verify"):
        pending = jnp.take_along_axis(tokens, cache.length[:, None], axis=1)
        window = jnp.concatenate([pending, drafts], axis=1)
        mask = {} if window_mask is None else {"window_mask": window_mask}
        output = call_forward(system.target, params, window, cache, **mask)
        logits = call_unembed(system.target, params, output.hidden)
        return logits, output.features, output.cache


def score(
    logits: jax.Array, sampler: Sampler, proposal: Proposal, *, is_argmax: bool = False
) -> TargetScores:
    """Applies the target's sampling parameters at every node.

    Args:
      logits: f32[B,K+1,V], the target's raw logits.
      sampler: the target's sampler, by row.
      proposal: the drafts.
      is_argmax: only the argmax is needed, as by a greedy rule.
    """
    with jax.named_scope("verify"):
        paths = proposal.paths
        is_before = None if paths is None else paths[:, :, 1:]
        processed = process(logits, sampler, proposal.tokens, is_before, is_argmax=is_argmax)
        is_finite = constrain(jnp.isfinite(processed.max(axis=-1)), "batch")
        return TargetScores(logits=logits, processed=processed, is_finite=is_finite)


def accept(state: DecodeState, proposal: Proposal, scores: TargetScores, system: System) -> Verdict:
    """Lets the rule decide which drafts are accepted, with the noise of this round.

    Args:
      state: the state of all rows.
      proposal: the drafts.
      scores: the target's scores of every node.
      system: target, drafter, rule and K.

    Returns:
      The verdict, made safe to commit.

    Raises:
      ConfigError, ShapeError: while tracing, the verdict has other types, shapes or dtypes than
        the contract's.
    """

    def decide(sampler, length, proposal, scores):
        noise = round_noise(
            system.rule, sampler, length, system.num_draft, system.target.vocab_size, proposal.depth
        )
        verdict = call_accept(system.rule, scores, proposal, noise)
        if system.num_draft == 0 and (system.rule.is_greedy or system.rule.is_coupled):
            return verdict.replace(fault=jnp.zeros_like(length))  # plain decoding: its own token
        return validate_verdict(verdict, proposal, scores, system)

    with jax.named_scope("accept"):
        # An argmax is found where the logits lie; all else takes whole rows.
        run = decide if system.rule.is_greedy else shard_map_rows(decide, SAMPLED_ROWS)
        verdict = run(state.sampler, state.length, proposal, scores.replace(features=None))
        # All layers of the next pass read what follows from it, so it is gathered here, once.
        small = {name: getattr(verdict, name) for name in ("n_accept", "tokens", "path", "fault")}
        return verdict.replace(**jax.tree.map(lambda x: constrain(x, "batch"), small))


def commit(
    params: Any,
    state: DecodeState,
    proposal: Proposal,
    scores: TargetScores,
    verdict: Verdict,
    system: System,
) -> DecodeState:
    """Records the emitted tokens and commits them in both caches; rejected drafts are forgotten.

    Args:
      params: the draft's parameters.
      state: the state of all rows, with the window in the target's cache.
      proposal: the drafts.
      scores: the target's scores of every node.
      verdict: the rule's verdict.
      system: target, drafter, rule and K.
    """
    with jax.named_scope("commit"):
        state, n_emit = emit(state, proposal, scores, verdict, system)
        features = scores.features
        path = verdict.path
        if features is not None and path is not None:
            features = jnp.take_along_axis(features, path[:, :, None], axis=1)
        tokens = verdict.tokens
        given = {"tokens": tokens, "n": n_emit, "features": features, "path": path}
        owner = f"commit of drafter {system.drafter.name!r}"
        with blame(owner, **given, state=state.draft):
            drafter_state = system.drafter.commit(params, state.draft, *given.values())
        return state.replace(target=state.target.commit(n_emit, path), draft=drafter_state)


def emit(
    state: DecodeState,
    proposal: Proposal,
    scores: TargetScores,
    verdict: Verdict,
    system: System,
    max_emit: jax.Array | None = None,
) -> tuple[DecodeState, jax.Array]:
    """Appends the accepted drafts and the target's token, cut by stop tokens, limits and faults.

    Args:
      state: the state of all rows; its caches are not changed.
      proposal: the drafts.
      scores: the target's scores of every node.
      verdict: the rule's verdict.
      system: target, drafter, rule and K.
      max_emit: i32[B], maximum tokens that a row emits, 1..K+1; None means unbounded.

    Returns:
      The state, and how many tokens each row has emitted, i32[B].
    """
    total = state.length + 1
    fault, num_before = find_fault(scores, proposal, verdict)
    n = verdict.n_accept + 1
    n = n if max_emit is None else jnp.minimum(n, max_emit)
    n_emit, finish = apply_limits(state, verdict.tokens, total, n, fault, num_before)
    if proposal.is_sound is not None:
        is_nan = state.is_active & ~proposal.is_sound
        state = state.replace(nan_drafts=state.nan_drafts + is_nan)
    index = jnp.arange(verdict.tokens.shape[1])
    rejected = proposal.first_child(verdict.last)
    own = jnp.where(rejected >= 0, Kind.CORRECTED, Kind.BONUS)
    kind = jnp.where(index < verdict.n_accept[:, None], Kind.ACCEPTED, own[:, None])
    offered = jnp.where(index == 0, proposal.levels[:, None], -1)
    rejected = jnp.where(index == verdict.n_accept[:, None], rejected[:, None], -1)
    record = {"tokens": verdict.tokens, "kind": kind, "offered": offered, "rejected": rejected}
    round_ = Round(proposal, scores, verdict, total, n_emit)
    seen = see_round(system, state.seen, round_)
    return append(state, record, total, n_emit).replace(finish=finish, seen=seen), n_emit


def round_noise(
    rule: Rule,
    sampler: Sampler,
    start: jax.Array,
    num_draft: int,
    vocab_size: int,
    depth: int | None = None,
) -> Noise:
    """Makes the noise of the round that begins after ``start`` fed tokens.

    A coupled rule gets the noise of plain decoding at each position. Every other rule gets fresh
    noise for this round, because it conditions on draws past the first rejection. Where drafts or K
    depend on earlier outputs, rounds of K = 0 have fresh noise too (see ``Sampler.update_counts``).

    Args:
      rule: the acceptance rule.
      sampler: the target's sampler.
      start: i32[B], tokens fed.
      num_draft: K.
      vocab_size: V.
      depth: the depth of the drafts' tree; None for a chain.
    """
    depth = num_draft if depth is None else depth
    if sampler.temperature is None:
        num_rows = depth + 1 if rule.is_coupled else 1
        gumbel = jnp.zeros((len(start), num_rows, vocab_size), jnp.float32)
    elif rule.is_coupled:

        def at(i):
            return rng.gumbel(sampler.keys(rng.Purpose.TARGET, start + 1 + i), vocab_size)

        gumbel = jax.vmap(at, out_axes=1)(jnp.arange(depth + 1))
    else:
        gumbel = rng.gumbel(sampler.keys(rng.Purpose.REPLACE, start), vocab_size)[:, None]
    return Noise(rng.uniform(sampler.keys(rng.Purpose.ACCEPT, start), num_draft), gumbel)
