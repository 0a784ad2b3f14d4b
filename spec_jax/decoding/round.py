"""The loop: draft, verify, accept, commit.

Invariants.
  1. The target's cache holds ``length`` tokens, all of them fed; ``tokens[b, length[b]]``
     is the one pending token, emitted and not fed.
  2. A round commits ``n_accept + 1`` tokens, 1..K+1 (of a tree of drafts, one path from the
     root), for every active row, fewer where a stop token or the limit cuts them. A finished
     row changes nothing.
  3. Every output token has one ``kind``: emitted = first + accepted + corrected + bonus.
  4. For a lossless rule the joint law of the emitted tokens is the target's, whatever the
     drafter, K and the batch; with the match rule the tokens equal plain decoding's.

Plain decoding is this loop with K = 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec_jax import rng
from spec_jax.contracts import (
    Context,
    ForwardOutput,
    Noise,
    Proposal,
    Rule,
    TargetScores,
    Verdict,
)
from spec_jax.decoding.state import DecodeState, Finish, Kind, System, append, apply_limits
from spec_jax.decoding.validate import has_faulty_scores, validate_proposal
from spec_jax.errors import ConfigError
from spec_jax.sampling import Counts, Sampler, is_sampling, process


def decode_round(params, state: DecodeState, system: System) -> DecodeState:
    """One round: draft, verify, accept, commit.

    Args:
      params: ``{"target": ..., "draft": ...}``.
      state: of every row; rows may be at different lengths.
      system: target, drafter, rule and K.
    """
    context = system.context(
        state.tokens, state.length, state.draft_sampler, state.counts, state.sampler.seed
    )
    proposal, fault, draft, output, logits = draft_and_score(
        params, state.target, state.draft, context, system
    )
    state, verdict, n_emit = accept(state, proposal, logits, fault, system)
    with jax.named_scope("commit"):
        features, path = output.features, verdict.path
        if features is not None and path is not None:
            features = jnp.take_along_axis(features, path[:, :, None], axis=1)
        commit = system.drafter.commit
        return state.replace(
            target=output.cache.commit(n_emit, path),
            draft=commit(params["draft"], draft, verdict.tokens, n_emit, features, path),
        )


class Scored(NamedTuple):
    """A proposal and the target's view of it.

    Attributes:
      proposal: made harmless to feed.
      fault: i32[B], a Finish for each row whose proposal was not, else RUNNING.
      draft: the drafter's state.
      output: the target's, over [pending | drafts].
      logits: f32[B,K+1,V], the target's, raw.
    """

    proposal: Proposal
    fault: jax.Array
    draft: Any
    output: ForwardOutput
    logits: jax.Array


def draft_and_score(params, cache, draft, context: Context, system: System) -> Scored:
    """The first half of a round. The certificate calls this very function.

    Args:
      params: ``{"target": ..., "draft": ...}``.
      cache: the target's, of ``context.length`` tokens.
      draft: the drafter's state.
      context: what the drafter may look at.
      system: target, drafter, rule and K.

    Raises:
      ConfigError: at tracing, drafts for a target that cannot rewind.
    """
    if system.num_draft > 0 and not system.target.can_rewind:
        raise ConfigError(
            f"the target cannot forget rejected drafts, and K is {system.num_draft}: it needs K = 0"
        )
    with jax.named_scope("draft"):
        proposal, draft = system.drafter.propose(params["draft"], draft, context, system.num_draft)
        proposal, fault = validate_proposal(proposal, system, context.length.shape[0])
    paths = proposal.paths
    seen = {} if paths is None else {"window_mask": paths}
    output, logits = score(
        params["target"], cache, context.tokens, context.length, proposal.tokens, system, **seen
    )
    return Scored(proposal, fault, draft, output, logits)


def score(
    params, cache, tokens: jax.Array, length: jax.Array, drafts: jax.Array, system: System, **seen
) -> tuple[ForwardOutput, jax.Array]:
    """The target's pass over [pending | drafts], and f32[B,T+1,V], its raw logits.

    Args:
      params: the target's.
      cache: of ``length`` tokens.
      tokens: i32[B,M], of which ``tokens[b, length[b]]`` is pending.
      length: i32[B].
      drafts: i32[B,T].
      system: whose target it is.
      **seen: ``window_mask`` of a tree.
    """
    with jax.named_scope("verify"):
        pending = jnp.take_along_axis(tokens, length[:, None], axis=1)
        window = jnp.concatenate([pending, drafts], axis=1)
        output = system.target.forward(params, window, cache, **seen)
        return output, system.target.unembed(params, output.hidden)


def apply_rule(
    rule: Rule,
    logits: jax.Array,
    sampler: Sampler,
    counts: Counts,
    proposal: Proposal,
    noise: Noise,
) -> tuple[TargetScores, Verdict]:
    """Scores every node and lets the rule decide. The certificate calls this very function.

    Args:
      rule: of acceptance.
      logits: f32[B,K+1,V], the target's, raw.
      sampler: the target's, by row.
      counts: of prompt and output, the pending token included.
      proposal: what was drafted.
      noise: what the rule consumes.
    """
    paths = proposal.paths
    processed = process(
        logits, sampler, counts, proposal.tokens, None if paths is None else paths[:, :, 1:],
        is_argmax=rule.is_greedy,
    )
    scores = TargetScores(logits=logits, processed=processed)
    return scores, rule.accept(scores, proposal, noise)


def round_noise(
    rule: Rule, sampler: Sampler, start: jax.Array, num_draft: int, vocab_size: int,
    depth: int | None = None,
) -> Noise:
    """The noise of the round that begins behind ``start`` i32[B] fed tokens.

    A coupled rule gets plain decoding's own noise at each position; every other rule fresh
    noise of this round, because it conditions on draws past the first rejection.

    Args:
      rule: of acceptance.
      sampler: the target's.
      start: i32[B].
      num_draft: K.
      vocab_size: V.
      depth: of the tree that the drafts are; None: they are a chain.
    """
    seed, B = sampler.seed, start.shape[0]
    depth = num_draft if depth is None else depth
    if rule.is_coupled:
        at = lambda i: rng.gumbel(rng.keys(seed, rng.Stream.TARGET, start + 1 + i), vocab_size)
        make = lambda: jax.vmap(at, out_axes=1)(jnp.arange(depth + 1))
        shape = (B, depth + 1, vocab_size)
    else:
        make = lambda: rng.gumbel(rng.keys(seed, rng.Stream.REPLACE, start), vocab_size)[:, None]
        shape = (B, 1, vocab_size)
    gumbel = jax.lax.cond(is_sampling(sampler), make, lambda: jnp.zeros(shape, jnp.float32))
    coin = lambda i: rng.uniform(rng.keys(seed, rng.Stream.ACCEPT, start, i + 1), 1)[:, 0]
    return Noise(jax.vmap(coin, out_axes=1)(jnp.arange(num_draft)), gumbel)


def accept(
    state: DecodeState, proposal: Proposal, logits: jax.Array, fault: jax.Array, system: System,
    most: jax.Array | None = None,
) -> tuple[DecodeState, Verdict, jax.Array]:  # fmt: skip
    """Lets the rule decide and writes down what is emitted; the caches are the caller's.

    Args:
      state: before the round.
      proposal: made harmless to feed.
      logits: f32[B,K+1,V], the target's, raw.
      fault: i32[B], a Finish for each row whose proposal was not, else RUNNING.
      system: target, drafter, rule and K.
      most: i32[B], tokens that a row emits at most, 1..K+1; None: no bound.

    Returns:
      The state, the verdict, and i32[B], how many tokens each row has emitted.
    """
    rule = system.rule
    with jax.named_scope("accept"):
        total = state.length + 1
        noise = round_noise(
            rule, state.sampler, state.length, system.num_draft, system.target.vocab_size,
            proposal.depth,
        )
        scores, verdict = apply_rule(rule, logits, state.sampler, state.counts, proposal, noise)
        is_faulty = has_faulty_scores(rule, scores, proposal, verdict)
        fault = jnp.where(is_faulty, Finish.NAN_TARGET, fault)
        n = verdict.n_accept + 1 if most is None else jnp.minimum(verdict.n_accept + 1, most)
        n_emit, finish = apply_limits(state, verdict.tokens, total, n, fault)
        index = jnp.arange(verdict.tokens.shape[1])
        own = jnp.where(proposal.has_children(verdict.last), Kind.CORRECTED, Kind.BONUS)
        kind = jnp.where(index < verdict.n_accept[:, None], Kind.ACCEPTED, own[:, None])
        offered = jnp.where(index == 0, proposal.levels[:, None], -1)
        record = {"tokens": verdict.tokens, "kind": kind, "offered": offered}
        if system.has_expected:
            record["expected"] = _expected(rule, scores, proposal, verdict)
        return append(state, record, total, n_emit).replace(finish=finish), verdict, n_emit


def _expected(rule: Rule, scores: TargetScores, proposal: Proposal, verdict: Verdict):
    """f32[B,K+1], the rule's closed-form acceptance at the positions it judged, else NaN."""
    B, K = proposal.tokens.shape
    per_node = jax.vmap(jax.vmap(rule.expected_acceptance))
    value = per_node(scores.probs[:, :-1], proposal.probs, proposal.tokens)
    judged = jnp.minimum(verdict.n_accept + 1, proposal.n_draft)[:, None]
    value = jnp.where(jnp.arange(K) < judged, value, jnp.nan)
    return jnp.concatenate([value, jnp.full((B, 1), jnp.nan)], axis=1)
