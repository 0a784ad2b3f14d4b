"""``prefill`` prompts, ``generate`` rounds until every row has finished, ``insert`` new rows."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import rng
from spec_jax.compilation import bounded_jit
from spec_jax.contracts import Prompt
from spec_jax.decoding.calls import blame, call_forward, call_prefill, call_unembed, check_state
from spec_jax.decoding.observers import see_first
from spec_jax.decoding.round import decode_round
from spec_jax.decoding.state import (
    BatchCarry,
    Chunk,
    DecodeState,
    Finish,
    Kind,
    Record,
    System,
    append,
    apply_limits,
)
from spec_jax.errors import ShapeError
from spec_jax.models.chunks import over_chunks
from spec_jax.sampling import Sampler, argmax, process, sample
from spec_jax.shapes import check_shapes
from spec_jax.sharding import constrain, constrain_state, replicate, take_rows

_PASSES = (512, 128, 32)  # tokens of a pass over prompts on a CPU, where each token costs
_UNPADDED = (512, 64, 8, 1)  # likewise, of prompts that cannot be padded
_DRAFT_PASS = 128  # likewise, of the draft's, which are of one size
_MIN_FILLED = 0.625  # of a pass with padding; less is fed in shorter passes


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
    samples: int = 1,
    fed: Any = None,
) -> DecodeState:
    """Feeds the prompts, right-padded to one width, and samples each row's first token.

    The caller ensures ``1 <= lengths <= T <= slots`` and
    ``limit + system.lookahead_slots <= slots``; the latter is checked where ``limit`` is known.

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
      print(state.tokens[0, :4])  # the prompt and its first token
      ```

    Args:
      params: ``{"target": ..., "draft": ...}``.
      tokens: i32[B,T], padded with any valid id.
      lengths: i32[B], the prompts' lengths without padding.
      limit: i32[B], maximum tokens of prompt and output, above ``lengths``.
      stop_tokens: i32[B,X], -1 for none.
      sampler: the target's sampler.
      draft_sampler: the draft's sampler, whose seed is folded into the target's (see ``rng``).
      system: target, drafter, rule and K.
      slots: S and M.
      samples: how many neighbouring rows share a prompt, which is fed to the target once.
      fed: the result of ``feed``; None: prompts are fed here. A target that cannot rewind must not
        see padding: all ``lengths`` are equal, and within a caller's ``jax.jit``, where they are
        unknown, T.

    Raises:
      ShapeError: an array has another number of rows, ``samples`` does not divide the rows, the
        prompts are wider than the cache, the cache has too few slots for the limit, or
        ``system.prefill_chunk`` is below 1.
    """
    B, T = tokens.shape
    check_shapes(
        {"B": B},
        lengths=(lengths, "B"),
        limit=(limit, "B"),
        stop_tokens=(stop_tokens, "B X"),
        seed=(sampler.seed, "B"),
        draft_seed=(draft_sampler.seed, "B"),
    )
    if T > slots:
        raise ShapeError(f"tokens has shape {tokens.shape}, so T={T}; slots are {slots}")
    if system.prefill_chunk < 1:
        raise ShapeError(f"prefill_chunk is {system.prefill_chunk}; expected 1 or more tokens")
    _check_room(limit, system.lookahead_slots, slots)
    if samples < 1 or B % samples:
        raise ShapeError(f"samples is {samples}; expected a divisor of the {B} rows")
    # Programs that are compiled only for what they depend on: drafters, rules and Ks share them.
    if fed is None:
        fed = feed(params["target"], tokens[::samples], lengths[::samples], system, slots)
    cache, logits = fed[:2] if samples == 1 else _repeat_rows(fed[:2], count=samples)
    request = (tokens, lengths, limit, stop_tokens, sampler, draft_sampler)
    state, first = init_state(*request, logits, is_argmax=system.rule.is_greedy, slots=slots)
    prompts = (tokens, lengths, first, fed[2])
    chunk = system.prefill_chunk
    if _costs_by_token():
        chunk = min(chunk, _DRAFT_PASS)
    draft = _prefill_draft(
        params["draft"], *prompts, drafter=system.drafter, slots=slots, chunk=chunk, samples=samples
    )
    state = state.replace(target=cache, draft=draft)
    if system.observers:
        seen = see_first(tokens, lengths, logits, state, system=system, slots=slots)
        state = state.replace(seen=seen)
    if not system.needs_update_counts:
        return state
    return state.replace(
        sampler=state.sampler.counting_updates(),
        draft_sampler=state.draft_sampler.counting_updates(),
    )


def _check_room(limit, lookahead: int, slots: int) -> None:
    """Refuses a cache with too few slots for the longest row, where its limit is known."""
    if isinstance(limit, jax.core.Tracer) or not getattr(limit, "is_fully_addressable", True):
        return
    longest = int(np.max(limit))
    if longest + lookahead > slots:
        raise ShapeError(
            f"limit is {longest}, and a round may write {lookahead} more slots; slots are {slots}, "
            f"expected {longest + lookahead} or more"
        )


def _costs_by_token() -> bool:
    """Whether each token of a pass over prompts costs, as on a CPU.

    On an accelerator a pass costs a read of the weights, so chunks are not split there.
    """
    return jax.default_backend() == "cpu"


def pass_sizes(system: System) -> list[int]:
    """Returns how many tokens of a row a pass over prompts may have, the largest first.

    A few sizes serve prompts of every length, so few programs are compiled.

    Args:
      system: the target, and the tokens of a chunk.
    """
    sizes = _UNPADDED
    if system.target.can_rewind:
        sizes = _PASSES if _costs_by_token() else ()
    chunk = system.prefill_chunk
    return [chunk, *(size for size in sizes if size < chunk)]


def passes_of(longest: int, width: int, system: System) -> Iterator[tuple[int, int]]:
    """Yields where each pass over prompts begins, and how many tokens it feeds.

    What is fed follows the longest prompt, not the width. A target that cannot rewind must not see
    padding; any other sees some, in place of more passes.

    Args:
      longest: tokens of the longest prompt.
      width: T, the width of the prompts with padding.
      system: the target, and the tokens of a chunk.
    """
    least = _MIN_FILLED if system.target.can_rewind else 1
    sizes = pass_sizes(system)
    begin = 0
    while begin < longest:
        size = next((n for n in sizes if longest - begin >= least * n), sizes[-1])
        size = min(size, width - begin)
        yield begin, size
        begin += size


def feed_in_passes(params, tokens, lengths, system, slots) -> Iterator[tuple[int, Any]]:
    """Feeds prompts to the target; yields after each pass how far they are fed, and ``fed``.

    Args:
      params: the target's parameters.
      tokens: i32[B,T], the prompts.
      lengths: i32[B], their lengths without padding.
      system: the target, and the tokens of a chunk.
      slots: S.
    """
    tokens, lengths = np.asarray(tokens), np.asarray(lengths)
    T = tokens.shape[1]
    fed = None
    for begin, size in passes_of(int(lengths.max()), T, system):
        part = tokens[:, begin : begin + size]
        n = np.clip(lengths - begin, 0, size).astype(np.int32)
        if fed is None:
            sizes = dict(batch=len(tokens), slots=slots, num_tokens=T)
            fed = _start_chunks(params, target=system.target, **sizes)
        fed = _feed_chunk(params, fed, part, n, np.int32(begin), target=system.target)
        yield begin + size, fed


def feed(params, tokens, lengths, system, slots):
    """Feeds prompts to the target, each in passes of its own length.

    One pass feeds prompts that are padded to a few tokens, and prompts of which a caller's
    ``jax.jit`` does not know the lengths.

    Args:
      params: the target's parameters.
      tokens: i32[B,T], the prompts.
      lengths: i32[B], their lengths without padding.
      system: the target, and the tokens of a chunk.
      slots: S.

    Returns:
      The prompts' cache, logits f32[B,1,V] at the last position, and the features.
    """
    target = system.target
    T = tokens.shape[1]
    is_known = not any(isinstance(x, jax.core.Tracer) for x in (tokens, lengths))
    if not is_known or target.can_rewind and T <= _PASSES[-1]:
        sizes = {"slots": slots, "chunk": system.prefill_chunk}
        return prefill_target(params, tokens, lengths, target=target, **sizes)
    *_, (_, fed) = feed_in_passes(params, tokens, lengths, system, slots)
    return finish_feeding(params, fed, system)


def finish_feeding(params, fed, system):
    """Returns what ``feed`` does, given the result of the last pass."""
    cache, last, features = fed
    return cache, _unembed(params, last, target=system.target), features


@functools.partial(bounded_jit, static_argnames=("target", "slots", "chunk"))
def prefill_target(params, tokens, lengths, *, target, slots, chunk=None):
    """Feeds prompts to the target.

    Args:
      params: the target's parameters.
      tokens: i32[B,T], the prompts.
      lengths: i32[B], their lengths without padding.
      target: the model.
      slots: S.
      chunk: tokens of a row in a pass; None: all in one pass.

    Returns:
      The prompts' cache, logits f32[B,1,V] at the last position, and the features.
    """
    with jax.named_scope("prefill"):
        fed = target.init_cache(params, len(tokens), slots), None, None
        T = tokens.shape[1]
        if chunk is not None and T > chunk:
            fed = _before_chunks(params, len(tokens), target, slots, T)
        step = functools.partial(_feed, params, target)
        cache, last, features = over_chunks(step, fed, (tokens,), lengths, chunk)
        return cache, call_unembed(target, params, last), features


def _feed(params, target, fed, begin, n, tokens):
    """Feeds a chunk of prompts, of which the first n (i32[B]) tokens count, see ``over_chunks``.

    ``fed`` has the cache, the last token's state dtype[B,1,D], and the features dtype[B,T,E].
    """
    cache, last, features = fed
    output = call_forward(target, params, tokens, cache)
    ends = jnp.take_along_axis(output.hidden, (n - 1)[:, None, None], axis=1)
    cache = constrain_state(output.cache.commit(n))
    if last is None:
        return cache, ends, output.features
    if features is not None:
        put = jax.lax.dynamic_update_slice_in_dim
        features = constrain(put(features, output.features, begin, axis=1), "batch")
    return cache, jnp.where((n > 0)[:, None, None], ends, last), features


def _before_chunks(params, batch, target, slots, num_tokens):
    """Returns ``fed`` before the first of several chunks: empty, in its final shapes."""
    cache = target.init_cache(params, batch, slots)
    tokens = jax.ShapeDtypeStruct((batch, 1), jnp.int32)
    one = jax.eval_shape(target.forward, params, tokens, cache)

    def empty(like, width):
        return jnp.zeros((batch, width, like.shape[-1]), like.dtype)

    features = None if one.features is None else empty(one.features, num_tokens)
    return constrain_state(cache), empty(one.hidden, 1), features


_start_chunks = bounded_jit(
    _before_chunks, static_argnames=("batch", "target", "slots", "num_tokens")
)


@functools.partial(bounded_jit, static_argnames="target", donate_argnames="fed")
def _feed_chunk(params, fed, tokens, n, begin, *, target):
    with jax.named_scope("prefill"):
        return _feed(params, target, fed, begin, n, tokens)


@functools.partial(bounded_jit, static_argnames="target")
def _unembed(params, last, *, target):
    return call_unembed(target, params, last)


@functools.partial(bounded_jit, static_argnames="count")
def _repeat_rows(fed, *, count):
    """Returns ``fed`` with every row ``count`` times."""
    return constrain_state(take_rows(fed, jnp.repeat(jnp.arange(len(fed[1])), count)))


@functools.partial(bounded_jit, static_argnames=("is_argmax", "slots"))
def init_state(
    tokens, lengths, limit, stop_tokens, sampler, draft_sampler, logits, *, is_argmax, slots
) -> tuple[DecodeState, jax.Array]:
    """Samples the first token of each row.

    Args:
      tokens: i32[B,T], the prompts.
      lengths: i32[B], their lengths without padding.
      limit: i32[B], maximum tokens of prompt and output.
      stop_tokens: i32[B,X], -1 for none.
      sampler: the target's sampler.
      draft_sampler: the draft's sampler.
      logits: f32[B,1,V], the target's, after the prompts.
      is_argmax: the rule takes the argmax.
      slots: M.

    Returns:
      The state without caches, and the tokens i32[B].
    """
    B, T = tokens.shape
    V = logits.shape[-1]
    is_prompt = jnp.arange(T) < lengths[:, None]
    draft_sampler = draft_sampler.replace(seed=rng.draft_seeds(sampler.seed, draft_sampler.seed))
    sampler, draft_sampler = (x.start(tokens, lengths, V) for x in (sampler, draft_sampler))
    processed = process(logits, sampler, is_argmax=is_argmax)[:, 0]
    if sampler.temperature is None:
        first = argmax(processed)
    else:
        first = sample(processed, rng.gumbel(sampler.keys(rng.Purpose.TARGET, lengths), V))
    empty = jnp.zeros((B, slots), jnp.int32)
    state = DecodeState(
        tokens=empty.at[:, :T].set(jnp.where(is_prompt, tokens, 0)),
        kind=empty.astype(jnp.int8),
        offered=jnp.full((B, slots), -1, jnp.int16),
        rejected=empty - 1,
        nan_drafts=jnp.zeros((B,), jnp.int32),
        prompt_length=lengths,
        limit=limit,
        finish=jnp.zeros((B,), jnp.int32),
        stop_tokens=stop_tokens,
        target=None,
        draft=None,
        sampler=sampler,
        draft_sampler=draft_sampler,
    )
    is_bad = ~jnp.isfinite(processed.max(axis=-1))
    fault = jnp.where(is_bad, Finish.NAN_TARGET, Finish.RUNNING)
    n_emit, finish = apply_limits(state, first[:, None], lengths, 1, fault)
    record = {"tokens": first[:, None], "kind": jnp.full((B, 1), Kind.FIRST)}
    state = append(state, record, lengths, n_emit).replace(finish=finish)
    return constrain_state(state), first


@functools.partial(bounded_jit, static_argnames=("drafter", "slots", "chunk", "samples"))
def _prefill_draft(params, tokens, lengths, first, features, *, drafter, slots, chunk, samples):
    """Returns the drafter's state after the prompts and each row's ``first`` token.

    A drafter that taps the target is fed a prompt of several samples once, up to its last token;
    that token, whose successor differs by sample, is committed as by a round without drafts.
    """
    with jax.named_scope("prefill_draft"):
        if samples == 1 or not drafter.shape.taps:
            prompt = Prompt(tokens, lengths, first, features, chunk)
            return constrain_state(call_prefill(drafter, params, prompt, slots))
        tokens = tokens[::samples]
        before = lengths[::samples] - 1
        pending = jnp.take_along_axis(tokens, before[:, None], axis=1)[:, 0]
        state = call_prefill(
            drafter, params, Prompt(tokens, before, pending, features, chunk), slots
        )
        last = jnp.take_along_axis(features, before[:, None, None], axis=1)
        rows = jnp.repeat(jnp.arange(len(before)), samples)
        state, last = take_rows((state, last), rows)
        one = jnp.ones_like(first)
        return constrain_state(drafter.commit(params, state, first[:, None], one, last, None))


@functools.partial(bounded_jit, static_argnames=("system",), donate_argnames=("state",))
def generate(
    params,
    state: DecodeState,
    stop: jax.Array,
    max_rounds: jax.Array,
    min_active: jax.Array | int = 1,
    *,
    system: System,
) -> tuple[DecodeState, Chunk]:
    """Runs rounds until every row has finished, at most ``max_rounds``. Donates the state.

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
      state, _ = decoding.generate(params, state, jnp.array([0]), 4, system=system)
      print(state.tokens[0, :7])
      ```

    Args:
      params: ``{"target": ..., "draft": ...}``.
      state: the state from ``prefill`` or from the last call.
      stop: i32[B], a Finish for rows that end before the first round, RUNNING for the others.
      max_rounds: i32[], maximum number of rounds; a stream calls again with the returned state.
      min_active: i32[], 1 or more. The call returns as soon as fewer rows are active, so that
        finished rows can be replaced (see ``insert``).
      system: target, drafter, rule and K.
    """
    state = state.replace(finish=jnp.where(state.is_active, stop, state.finish))

    def num_active(state):
        return state.is_active.sum(dtype=jnp.int32)

    def has_work(carry):
        rounds, _, state = carry
        return (rounds < max_rounds) & (num_active(state) >= min_active)

    def one_round(carry):
        rounds, row_rounds, state = carry
        # Without it the samplers' states would be split as the rows that are sampled are.
        samplers = constrain_state((state.sampler, state.draft_sampler))
        state = state.replace(sampler=samplers[0], draft_sampler=samplers[1])
        active = num_active(state)
        after = decode_round(params, state, system)
        owner = f"propose and commit of drafter {system.drafter.name!r}"
        check_state(owner, state.draft, after.draft)
        return rounds + 1, row_rounds + active, constrain_state(after)

    carry = (jnp.int32(0), jnp.int32(0), state)
    rounds, row_rounds, state = jax.lax.while_loop(has_work, one_round, carry)
    return constrain_state(state), read_chunk(state, rounds, row_rounds)


def read_chunk(state: DecodeState, rounds: jax.Array, row_rounds: jax.Array) -> Chunk:
    """Copies the arrays that a caller reads out of the state."""
    chunk = Chunk(jnp.copy(state.tokens), state.total, jnp.copy(state.finish), rounds, row_rounds)
    return replicate(chunk)


@bounded_jit
def read_row(state: DecodeState, row: jax.Array) -> Record:
    """Copies the output of row ``row`` (i32[]), so that the state may be donated."""
    return replicate(jax.tree.map(lambda x: x[row], Record.of(state)))


@bounded_jit
def read_rows(state: DecodeState) -> Record:
    """Copies the output of all rows."""
    return replicate(jax.tree.map(jnp.copy, Record.of(state)))


def insert(
    state: DecodeState,
    row: int | jax.Array,
    other: DecodeState,
    index: int | jax.Array = 0,
    *,
    system: System,
) -> DecodeState:
    """Replaces row ``row`` by a freshly prefilled row. Donates the state.

    Args:
      state: the state of the batch.
      row: i32[], the number of a finished row; it is not checked inside of your ``jax.jit``.
      other: the result of ``prefill`` for rows with as many slots and stop tokens.
      index: i32[], which row of ``other`` to insert; not checked inside of your ``jax.jit`` either.
      system: target, drafter, rule and K.

    Raises:
      ShapeError: ``other`` has other sizes, or there is no such row.
    """
    sizes = check_shapes(tokens=(state.tokens, "B M"), stop_tokens=(state.stop_tokens, "B X"))
    one = {"M": sizes["M"], "X": sizes["X"]}
    given = check_shapes(one, tokens=(other.tokens, "N M"), stop_tokens=(other.stop_tokens, "N X"))
    for name, of, at, count in (
        ("row", "the batch", row, sizes["B"]),
        ("index", "what is inserted", index, given["N"]),
    ):
        if not isinstance(at, jax.core.Tracer) and not 0 <= int(at) < count:
            raise ShapeError(f"{name} is {int(at)}; {of} has rows 0 to {count - 1}")
    return _insert(state, jnp.int32(row), other, jnp.int32(index), system=system)


@functools.partial(bounded_jit, static_argnames=("system",), donate_argnames=("state",))
def _insert(state, row, other, index, *, system):
    if len(other.limit) > 1:
        other = take_rows(other, index[None])
    owner = f"insert_row of drafter {system.drafter.name!r}"
    with blame(owner, state=state.draft, row=row, other=other.draft):
        draft = system.drafter.insert_row(state.draft, row, other.draft)
    check_state(owner, state.draft, draft)

    def put(full, one):
        return full.at[row].set(one[0])

    own = {
        "target": state.target.insert_row(row, other.target),
        "draft": draft,
        "sampler": state.sampler.insert_row(row, other.sampler),
        "draft_sampler": state.draft_sampler.insert_row(row, other.draft_sampler),
        "seen": {
            name: seen
            if isinstance(seen, BatchCarry)
            else jax.tree.map(put, seen, other.seen[name])
            for name, seen in state.seen.items()
        },
    }
    rest = [name for name in state.__dataclass_fields__ if name not in own]
    changed = {name: jax.tree.map(put, getattr(state, name), getattr(other, name)) for name in rest}
    return constrain_state(state.replace(**own, **changed))
