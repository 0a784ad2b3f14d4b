"""Rollouts inside a user's own ``jax.jit``: samples of a policy, and their log-probabilities.

For reinforcement learning. ``rollout`` is a pure function of the weights, so a step that samples,
scores and updates is one ``jax.jit``, and new weights compile nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.config.checks import check, check_integer, is_integer, is_list
from spec_jax.contracts import Observer, Round
from spec_jax.decoding import LOGPROBS, Finish, Kind, Record, System
from spec_jax.decoding.observers import put
from spec_jax.errors import ConfigError, PromptError, ShapeError
from spec_jax.meshes import has_explicit_axes
from spec_jax.sampling import Samplers, make_samplers
from spec_jax.shapes import check_shapes
from spec_jax.sharding import constrain, take_rows


class Counts(NamedTuple):
    """What decoding did for each row.

    Attributes:
      output: i32[B], output tokens.
      rounds: i32[B], target passes after prefill; tau is ``(output - 1) / rounds``.
      drafted: i32[B], drafts offered, of a tree its levels.
      accepted: i32[B], drafts accepted.
      finish: i32[B], a ``decoding.Finish``; any but STOP_TOKEN and LENGTH is a fault.
      passes: i32[], rounds that were run for the batch.
    """

    output: jax.Array
    rounds: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    finish: jax.Array
    passes: jax.Array


class Rollout(NamedTuple):
    """The result of ``rollout``; S is the width of the prompts and ``max_new_tokens`` together.

    Attributes:
      tokens: i32[B,S], prompt and output, left-aligned, then 0.
      is_output: bool[B,S], which of them are output.
      logprobs: f32[B,S], of output tokens under the distribution that they were drawn from, after
        temperature and filters, in nats; 0 elsewhere. This is the behaviour policy, whose ratio to
        a new policy importance sampling needs.
      model_logprobs: f32[B,S], the same by the model, before temperature and filters.
      counts: what decoding did.
      features: dtype[B,S,E], the target's tapped states at every token but the last; None if not
        asked for.
    """

    tokens: jax.Array
    is_output: jax.Array
    logprobs: jax.Array
    model_logprobs: jax.Array
    counts: Counts
    features: jax.Array | None


def rollout(
    params: dict[str, Any],
    prompts: jax.Array,
    lengths: jax.Array,
    samplers: Samplers,
    seeds: jax.Array,
    *,
    system: System,
    max_new_tokens: int,
    samples: int = 1,
    stop_tokens: Sequence[int] = (),
    draft_samplers: Samplers | None = None,
    stages: Sequence[tuple[int, int]] = (),
    has_features: bool = False,
) -> Rollout:
    """Samples outputs of prompts; pure, for use inside ``jax.jit``.

    With the rules "match" and "greedy" the tokens are those of plain decoding with the same seeds;
    with other lossless rules they have the same distribution. A row's tokens depend on its prompt
    and its seed, so give every step its own seeds.

    Example:
      ```python
      import functools

      import jax
      import jax.numpy as jnp

      import spec_jax
      from spec_jax.testing import mock_model

      target = mock_model(vocab_size=8)  # or spec_jax.load_model("zoo/target")
      config = spec_jax.SpeculativeConfig("ngram", 2)
      warm = spec_jax.SamplerConfig(temperature=1.0)
      decoder = spec_jax.SpeculativeDecoder(target, config=config, target_sampler=warm)
      sample = functools.partial(
          spec_jax.rollout, system=decoder.system(), max_new_tokens=4, samples=2
      )

      @jax.jit
      def step(policy, step):
          prompts, lengths = jnp.array([[1, 2, 3], [4, 5, 0]]), jnp.array([3, 2])
          seeds = 4 * step + jnp.arange(4)
          return sample({"target": policy, "draft": None}, prompts, lengths, warm, seeds)

      found = step(target.params, 0)
      print(found.tokens, found.logprobs.sum(axis=1))
      ```

    Args:
      params: ``{"target": ..., "draft": ...}``; of a head the latter is ``{"head": ..., "target":
        ...}`` with the same target, of "ngram" None, of "suffix" a ``History``'s.
      prompts: i32[P,T], right-padded with any valid id.
      lengths: i32[P], their lengths without padding, 1 or more; all T, and no tracer, of a target
        that cannot rewind.
      samplers: how tokens are drawn; one config for all rows or one for each. Their own seeds are
        not read.
      seeds: integers [B] of any dtype, B = P * samples, modulo 2**32.
      system: target, drafter, rule and K, from ``SpeculativeDecoder.system()``.
      max_new_tokens: maximum output tokens of a row.
      samples: neighbouring rows that share a prompt, which the target is fed once.
      stop_tokens: ids at which a row ends.
      draft_samplers: how drafts are drawn; None: as the tokens.
      stages: pairs ``(rows, num_draft)`` of falling rows, for long tails: as soon as at most
        ``rows`` rows run, they go on alone, with another K. Each is compiled, and changes shapes,
        so rounding too.
      has_features: whether to return the features that the drafter taps.

    Raises:
      ShapeError: an array has another shape, or stages are not of falling rows.
      PromptError: ids or lengths, where they are known while tracing, are out of range.
      ConfigError: an option is out of range, params lack a part, an array lies on a mesh of
        explicit axes, stages change the K of a tree, prompts and output are longer than the target
        can hold, or features are asked for and the target taps none.
    """
    check_integer("max_new_tokens", max_new_tokens, 1)
    check_integer("samples", samples, 1)
    is_complete = isinstance(params, dict) and {"target", "draft"} <= params.keys()
    keys = [*params] if isinstance(params, dict) else params
    check(is_complete, "params", keys, 'a dict with "target" and "draft", which may be None')
    arrays = {"prompts": prompts, "lengths": lengths, "seeds": seeds}
    for name, x in arrays.items():
        arrays[name] = x if isinstance(x, jax.Array) else np.asarray(x)
        if not jnp.issubdtype(arrays[name].dtype, jnp.integer):
            raise ShapeError(f"{name} has dtype {arrays[name].dtype}; expected integers")
    prompts, lengths, seeds = arrays.values()
    if has_explicit_axes((params, arrays)):
        raise ConfigError(
            "an array lies on a mesh of explicit axes; expected automatic ones, as "
            "spec_jax.make_mesh makes them"
        )
    P, T = check_shapes(prompts=(prompts, "P T")).values()
    B = P * samples
    S = T + max_new_tokens
    check_shapes({"P": P, "B": B}, lengths=(lengths, "P"), seeds=(seeds, "B"))
    _check_range("prompts", prompts, 0, system.target.last_id)
    _check_range("lengths", lengths, 1, T)
    stop_tokens = np.asarray(stop_tokens, np.int64).reshape(-1)
    _check_range("stop_tokens", stop_tokens, 0, system.target.last_id)
    if not system.target.can_rewind and (isinstance(lengths, jax.core.Tracer) or min(lengths) < T):
        raise ConfigError(
            "the target keeps a state that cannot discard padding; expected prompts of one length "
            f"{T}, and lengths that are known while tracing"
        )
    prompts = jnp.asarray(prompts)
    lengths = jnp.asarray(lengths)
    if S > system.target.max_length:
        raise ConfigError(
            f"prompts of {T} tokens and {max_new_tokens} new ones are {S}; the target holds "
            f"{system.target.max_length}: shorten the prompts or lower max_new_tokens"
        )
    are_pairs = is_list(stages) and all(is_list(x) and len(x) == 2 for x in stages)
    is_fit = are_pairs and all(is_integer(x, 0) for pair in stages for x in pair)
    check(is_fit, "stages", stages, "pairs (rows, num_draft): ((32, 4), (16, 6))")
    if system.drafter.shape.tree is not None and {K for _, K in stages} - {system.num_draft}:
        raise ConfigError(f"stages change K; expected {system.num_draft}, which the tree fixes")
    widths = [B, *(rows for rows, _ in stages)]
    if any(after < 1 or after >= before for before, after in zip(widths, widths[1:])):
        raise ShapeError(f"stages have rows {widths[1:]}; expected falling numbers below {B}")
    systems = [system, *(system._replace(num_draft=K) for _, K in stages)]
    slots = -(-(S + max(x.lookahead_slots for x in systems)) // 128) * 128
    V = system.target.vocab_size
    temperature = system.drafter.defaults.draft_temperature
    seeds = jnp.asarray(seeds.astype(jnp.uint32))
    drawn = make_samplers(samplers, draft_samplers, B, V, seeds, temperature)
    fed = decoding.feed(params["target"], prompts, lengths, system, slots)
    observers = (*system.observers, LOGPROBS)
    if has_features:
        if fed[2] is None:
            raise ConfigError("has_features is set, and the system's target taps no states")
        observers += (_features(fed[2].shape[-1], str(fed[2].dtype)),)
    rows = jnp.repeat(jnp.arange(P), samples)
    tokens = prompts[rows]
    begins = lengths[rows]
    stop_ids = jnp.tile(jnp.asarray([*stop_tokens, -1], jnp.int32), (B, 1))
    request = (tokens, begins, begins + max_new_tokens, stop_ids, *drawn)
    system = system._replace(observers=observers)
    options = {"slots": slots, "samples": samples, "fed": fed}
    state = decoding.prefill(params, *request, system=system, **options)
    found = None
    places = jnp.arange(B)
    passes = jnp.int32(0)
    for stage, (now, narrower) in enumerate(zip(systems, [*widths[1:], 0])):
        if stage > 0:  # the rows that run, and others if there are fewer
            chosen = jnp.argsort(~state.is_active, stable=True)[: widths[stage]]
            places = places[chosen]
            state = take_rows(state, chosen)
        running = jnp.full(len(state.finish), Finish.RUNNING, jnp.int32)
        now = now._replace(observers=observers)
        state, chunk = decoding.generate(
            params, state, running, max_new_tokens, narrower + 1, system=now
        )
        passes += chunk.rounds
        last = Record.of(state)
        if found is not None:
            last = jax.tree.map(lambda x, new, to=places: x.at[to].set(new), found, last)
        found = last
    return _collect(found, passes, S, fed[2][rows] if has_features else None)


def _check_range(name: str, x: jax.Array | np.ndarray, low: int, high: int) -> None:
    """Raises PromptError if a value that is known is not in ``low`` to ``high``."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
        return
    x = np.asarray(x)
    wrong = x[(x < low) | (x > high)]
    if wrong.size:
        raise PromptError(f"{name} has {wrong[0]}; expected {low} to {high}")


def _collect(found: Record, passes: jax.Array, width: int, features: jax.Array | None) -> Rollout:
    """Returns the first ``width`` columns of a record; ``features`` are those of the prompts."""
    is_output = found.kind != Kind.NONE
    counts = Counts(
        is_output.sum(axis=1, dtype=jnp.int32),
        (found.offered >= 0).sum(axis=1, dtype=jnp.int32),
        jnp.maximum(found.offered, 0).sum(axis=1, dtype=jnp.int32),
        (found.kind == Kind.ACCEPTED).sum(axis=1, dtype=jnp.int32),
        found.finish,
        passes,
    )
    if features is not None:
        is_prompt = jnp.arange(features.shape[1]) < found.prompt_length[:, None]
        begun = jnp.where(is_prompt[..., None], features, 0)
        seen = found.seen["features"]
        features = seen.at[:, : begun.shape[1]].add(begun)[:, :width]
    logprobs = found.seen["logprobs"]
    arrays = (found.tokens, is_output, logprobs.processed, logprobs.raw)
    rows = (constrain(x[:, :width], "batch") for x in arrays)
    return Rollout(*rows, counts, features)


@functools.cache
def _features(width: int, dtype: str) -> Observer:
    """Returns the observer of the target's states at the tokens that rounds feed."""

    def init(batch: int, slots: int) -> jax.Array:
        return jnp.zeros((batch, slots, width), np.dtype(dtype))

    def update(seen: jax.Array, of: Round) -> jax.Array:
        states = jnp.take_along_axis(of.scores.features, of.nodes[:, :, None], axis=1)
        return put(seen, of.columns - 1, states)  # row i belongs to the token before token i

    return Observer("features", init, update)
