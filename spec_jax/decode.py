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

import functools
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
from spec_jax.errors import ConfigError, ShapeError
from spec_jax.sampling import Counts, Sampler, is_sampling, process, sample
from spec_jax.shapes import check_shapes
from spec_jax.state import Chunk, DecodeState, Finish, Kind, Record, System, append, cut


def judge(
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
    return scores, rule.verify(scores, proposal, noise)


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
        proposal, fault = checked(proposal, system, context.length.shape[0])
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
        scores, verdict = judge(rule, logits, state.sampler, state.counts, proposal, noise)
        fault = jnp.where(_is_bad(rule, scores, proposal, verdict), Finish.NAN_TARGET, fault)
        n = verdict.n_accept + 1 if most is None else jnp.minimum(verdict.n_accept + 1, most)
        n_emit, finish = cut(state, verdict.tokens, total, n, fault)
        index = jnp.arange(verdict.tokens.shape[1])
        own = jnp.where(proposal.has_children(verdict.last), Kind.CORRECTED, Kind.BONUS)
        kind = jnp.where(index < verdict.n_accept[:, None], Kind.ACCEPTED, own[:, None])
        offered = jnp.where(index == 0, proposal.levels[:, None], -1)
        record = {"tokens": verdict.tokens, "kind": kind, "offered": offered}
        if system.has_expected:
            record["expected"] = _expected(rule, scores, proposal, verdict)
        return append(state, record, total, n_emit).replace(finish=finish), verdict, n_emit


def _is_bad(rule: Rule, scores: TargetScores, proposal: Proposal, verdict: Verdict) -> jax.Array:
    """bool[B], the target's logits were not finite at a node that the rule has read."""
    index = jnp.arange(scores.processed.shape[1])
    if rule.is_joint:
        is_read = index <= proposal.n_draft[:, None]
    elif verdict.path is None:
        is_read = index <= verdict.n_accept[:, None]
    else:
        is_read = jnp.take_along_axis(proposal.paths, verdict.last[:, None, None], axis=1)[:, 0]
    is_finite = jnp.isfinite(scores.processed.max(axis=-1))
    return (~is_finite & is_read).any(axis=1)


def checked(proposal: Proposal, system: System, batch: int) -> tuple[Proposal, jax.Array]:
    """Makes a faulty proposal harmless to feed, and names the fault of each row.

    Raises:
      ShapeError: at tracing, an array of another shape than the contract's.
      ConfigError: at tracing, the rule needs what the drafter does not give.
    """
    drafter, rule, V = system.drafter, system.rule, system.target.vocab_size
    sizes = {"B": batch, "K": system.num_draft, "V": V}
    if proposal.parents is not None:
        check_shapes(sizes, parents=(proposal.parents, "B K"))
        if system.has_expected:
            raise ConfigError("has_expected is set; expected acceptance is known of chains alone")
        if not rule.has_trees:
            raise ConfigError(
                f"rule {rule.name!r} judges chains; drafter {drafter.name!r} proposes trees"
            )
    check_shapes(sizes, tokens=(proposal.tokens, "B K"), n_draft=(proposal.n_draft, "B"))
    for name in ("probs", "logits"):
        array = getattr(proposal, name)
        if array is not None:
            check_shapes(sizes, **{name: (array, "B K V")})
    is_unknown = rule.needs_probs and drafter.is_sampled and proposal.probs is None
    if is_unknown or (rule.needs_logits and proposal.logits is None):
        what = "probs" if is_unknown else "logits"
        raise ConfigError(
            f"rule {rule.name!r} judges drafts by their {what}, which drafter {drafter.name!r} "
            f"did not put into its Proposal"
        )
    offered = proposal.is_offered
    is_valid = (proposal.tokens >= 0) & (proposal.tokens <= system.target.last_id)
    if proposal.parents is not None:
        is_before = (proposal.parents >= 0) & (proposal.parents <= jnp.arange(system.num_draft))
        parents = jnp.where(is_before, proposal.parents, 0)
        proposal = proposal.replace(parents=parents)
        is_valid &= is_before & proposal.paths[:, 1:, 0]
    n_draft = jnp.clip(proposal.n_draft, 0, system.num_draft)
    is_invalid = (offered & ~is_valid).any(axis=1) | (proposal.n_draft != n_draft)
    fault = jnp.where(is_invalid, Finish.INVALID_DRAFT, Finish.RUNNING)
    if proposal.is_sound is not None:
        fault = jnp.where(proposal.is_sound, fault, Finish.NAN_DRAFT)
    tokens = jnp.where(is_valid, proposal.tokens, 0)
    return proposal.replace(tokens=tokens, n_draft=n_draft), fault


def _expected(rule: Rule, scores: TargetScores, proposal: Proposal, verdict: Verdict):
    """f32[B,K+1], the rule's closed-form acceptance at the positions it judged, else NaN."""
    B, K = proposal.tokens.shape
    per_node = jax.vmap(jax.vmap(rule.expected_acceptance))
    value = per_node(scores.probs[:, :-1], proposal.probs, proposal.tokens)
    judged = jnp.minimum(verdict.n_accept + 1, proposal.n_draft)[:, None]
    value = jnp.where(jnp.arange(K) < judged, value, jnp.nan)
    return jnp.concatenate([value, jnp.full((B, 1), jnp.nan)], axis=1)


def prefill(
    params,
    tokens: jax.Array,
    lengths: jax.Array,
    limit: jax.Array,
    stop_tokens: jax.Array,
    sampler: Sampler,
    draft_sampler: Sampler,
    *,
    system: System,
    slots: int,
) -> DecodeState:
    """Feeds the prompts, right-padded to one width, and samples each row's first token.

    The caller keeps ``1 <= lengths <= T <= slots`` and ``limit + system.slack <= slots``.

    Args:
      params: ``{"target": ..., "draft": ...}``.
      tokens: i32[B,T], padded with any valid id.
      lengths: i32[B], true lengths.
      limit: i32[B], most tokens of prompt and output, above ``lengths``.
      stop_tokens: i32[B,X], -1 for none.
      sampler: the target's.
      draft_sampler: the draft's.
      system: target, drafter, rule and K.
      slots: S and M.

    Raises:
      ShapeError: an array of another number of rows, or prompts wider than the cache.
    """
    B, T = tokens.shape
    check_shapes(
        {"B": B}, lengths=(lengths, "B"), limit=(limit, "B"), stop_tokens=(stop_tokens, "B X"),
        seed=(sampler.seed, "B"), draft_seed=(draft_sampler.seed, "B"),
    )
    if T > slots:
        raise ShapeError(f"tokens has shape {tokens.shape}, so T={T}; slots are {slots}")
    # Three programs, each of just what it depends on: drafters, rules and every K share them.
    cache, logits, features = _prefill_target(
        params["target"], tokens, lengths, target=system.target, slots=slots
    )
    state, first = _begin(
        tokens, lengths, limit, stop_tokens, sampler, draft_sampler, logits,
        is_argmax=system.rule.is_greedy, slots=slots,
    )
    draft = _prefill_draft(
        params["draft"], tokens, lengths, first, features, drafter=system.drafter, slots=slots
    )
    expected = jnp.full((B, slots), jnp.nan) if system.has_expected else None
    return state.replace(target=cache, draft=draft, expected=expected)


@functools.partial(jax.jit, static_argnames=("target", "slots"))
def _prefill_target(params, tokens, lengths, *, target, slots):
    """The cache of the prompts, f32[B,1,V] behind each of them, and what the drafter reads."""
    with jax.named_scope("prefill"):
        cache = target.init_cache(params, tokens.shape[0], slots)
        output = target.forward(params, tokens, cache)
        last = jnp.take_along_axis(output.hidden, (lengths - 1)[:, None, None], axis=1)
        return output.cache.commit(lengths), target.unembed(params, last), output.features


@functools.partial(jax.jit, static_argnames=("is_argmax", "slots"))
def _begin(
    tokens, lengths, limit, stop_tokens, sampler, draft_sampler, logits, *, is_argmax, slots
) -> tuple[DecodeState, jax.Array]:
    """The state with each row's first token, its caches left out; and that token, i32[B]."""
    (B, T), V = tokens.shape, logits.shape[-1]
    is_prompt = jnp.arange(T) < lengths[:, None]
    seen = jnp.zeros((B, V), bool).at[
        jnp.arange(B)[:, None], jnp.where(is_prompt, tokens, V)
    ].set(True, mode="drop")
    counts = Counts(prompt=seen, output=jnp.zeros((B, V), jnp.int32))
    processed = process(logits, sampler, counts, is_argmax=is_argmax)[:, 0]
    gumbel = jax.lax.cond(
        is_sampling(sampler),
        lambda: rng.gumbel(rng.keys(sampler.seed, rng.Stream.TARGET, lengths), V),
        lambda: jnp.zeros((B, V), jnp.float32),
    )
    first = sample(processed, gumbel)
    empty = jnp.zeros((B, slots), jnp.int32)
    state = DecodeState(
        tokens=empty.at[:, :T].set(jnp.where(is_prompt, tokens, 0)),
        kind=empty.astype(jnp.int8),
        offered=jnp.full((B, slots), -1, jnp.int16),
        prompt_length=lengths,
        limit=limit,
        finish=jnp.zeros((B,), jnp.int32),
        stop_tokens=stop_tokens,
        target=None,
        draft=None,
        sampler=sampler,
        draft_sampler=draft_sampler,
        counts=counts,
        expected=None,
    )
    is_bad = ~jnp.isfinite(processed.max(axis=-1))
    fault = jnp.where(is_bad, Finish.NAN_TARGET, Finish.RUNNING)
    n_emit, finish = cut(state, first[:, None], lengths, 1, fault)
    record = {"tokens": first[:, None], "kind": jnp.full((B, 1), Kind.FIRST)}
    return append(state, record, lengths, n_emit).replace(finish=finish), first


@functools.partial(jax.jit, static_argnames=("drafter", "slots"))
def _prefill_draft(params, tokens, lengths, first, features, *, drafter, slots):
    """The drafter's state behind the prompts and each row's ``first`` token."""
    with jax.named_scope("prefill_draft"):
        draft = drafter.init(params, tokens.shape[0], slots)
        return drafter.prefill(params, draft, tokens, lengths, first, features)


@functools.partial(jax.jit, static_argnames=("system",), donate_argnames=("state",))
def generate(
    params, state: DecodeState, stop: jax.Array, max_rounds: jax.Array,
    min_active: jax.Array | int = 1, *, system: System,
) -> tuple[DecodeState, Chunk]:
    """Runs rounds until every row has finished, or ``max_rounds`` of them. Donates the state.

    Args:
      params: ``{"target": ..., "draft": ...}``.
      state: from ``prefill`` or from the last call.
      stop: i32[B], a Finish for rows to end before the first round, RUNNING for the others.
      max_rounds: i32[], stop after so many rounds; streaming calls again with the state.
      min_active: i32[], 1 or more: stop as soon as fewer rows are active, so that finished
        rows can be replaced (see ``admit``).
      system: target, drafter, rule and K.
    """  # fmt: skip
    state = state.replace(finish=jnp.where(state.is_active, stop, state.finish))
    num_active = lambda state: state.is_active.sum(dtype=jnp.int32)

    def has_work(carry):
        rounds, _, state = carry
        return (rounds < max_rounds) & (num_active(state) >= min_active)

    def one_round(carry):
        rounds, row_rounds, state = carry
        return rounds + 1, row_rounds + num_active(state), decode_round(params, state, system)

    carry = (jnp.int32(0), jnp.int32(0), state)
    rounds, row_rounds, state = jax.lax.while_loop(has_work, one_round, carry)
    return state, read_chunk(state, rounds, row_rounds)


def read_chunk(state: DecodeState, rounds: jax.Array, row_rounds: jax.Array) -> Chunk:
    """What a caller reads of the state, apart from it."""
    total = state.prompt_length + (state.kind != Kind.NONE).sum(axis=1)
    return Chunk(jnp.copy(state.tokens), total, jnp.copy(state.finish), rounds, row_rounds)


@jax.jit
def read_row(state: DecodeState, row: jax.Array) -> Record:
    """What row ``row`` (i32[]) has produced, apart from the state, which may then be donated."""
    return jax.tree.map(lambda x: x[row], Record.of(state))


def admit(
    state: DecodeState, row: int | jax.Array, other: DecodeState, *, system: System
) -> DecodeState:
    """Puts a freshly prefilled request in the place of row ``row``. Donates the state.

    Args:
      state: of the batch.
      row: i32[], the slot of a finished row.
      other: ``prefill`` of one row with the same slots and as many stop tokens.
      system: target, drafter, rule and K.

    Raises:
      ShapeError: ``other`` is not one row of the same sizes, or there is no such row.
    """
    sizes = check_shapes(tokens=(state.tokens, "B M"), stop_tokens=(state.stop_tokens, "B X"))
    one = {"M": sizes["M"], "X": sizes["X"]}
    check_shapes(one, tokens=(other.tokens, "1 M"), stop_tokens=(other.stop_tokens, "1 X"))
    if not 0 <= int(row) < sizes["B"]:
        raise ShapeError(f"row is {int(row)}; the batch has rows 0 to {sizes['B'] - 1}")
    return _admit(state, jnp.int32(row), other, system=system)


@functools.partial(jax.jit, static_argnames=("system",), donate_argnames=("state",))
def _admit(state, row, other, *, system):
    own = {
        "target": state.target.insert_row(row, other.target),
        "draft": system.drafter.insert_row(state.draft, row, other.draft),
        "sampler": state.sampler.insert_row(row, other.sampler),
        "draft_sampler": state.draft_sampler.insert_row(row, other.draft_sampler),
    }
    put = lambda full, one: full.at[row].set(one[0])
    rest = [name for name in state.__dataclass_fields__ if name not in own]
    changed = {
        name: jax.tree.map(put, getattr(state, name), getattr(other, name)) for name in rest
    }
    return state.replace(**own, **changed)
