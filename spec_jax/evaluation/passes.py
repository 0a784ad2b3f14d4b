"""Timers of the passes of a round, each a compiled loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Drafter, Head, Model, Prompt
from spec_jax.decoding import System
from spec_jax.drafters import registry
from spec_jax.drafters.common.head import head_drafter
from spec_jax.drafters.loaded import draft_params, head_of
from spec_jax.engine.build import make_drafter, tapped_model
from spec_jax.evaluation.timing import Timer, loop_timer
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.meshes import mesh_of, use_mesh
from spec_jax.models.params import Params
from spec_jax.rules import GREEDY
from spec_jax.sampling import argmax, make_sampler
from spec_jax.sharding import constrain_state

ITERATIONS = 64  # in one timed call, so that a dispatch does not count


class TimedPass(NamedTuple):
    """A pass in a timed loop.

    Attributes:
      run: ``(params, token, carry) -> (token, carry)``. It reads the token i32[B] that the step
        before it returned, so the compiler can neither drop nor overlap a pass.
      params: The weights that it reads.
      carry: What it reads and changes: a cache that is half full, and its tokens.
    """

    run: Callable[[Any, jax.Array, Any], tuple[jax.Array, Any]]
    params: Params
    carry: Any


def steps_timer(steps: Sequence[TimedPass], batch: int, iterations: int = ITERATIONS) -> Timer:
    """Compiles a loop of steps, one after the other; returns its timer, in ms per iteration.

    Args:
      steps: The steps of an iteration.
      batch: B, the rows of each.
      iterations: The number of iterations in a call.
    """
    params = [step.params for step in steps]
    carries = [step.carry for step in steps]

    def body(params, carry):
        token, *carries = carry
        for i, step in enumerate(steps):
            token, carries[i] = step.run(params[i], token, carries[i])
        return token, *carries

    @functools.partial(jax.jit, donate_argnums=1)
    def run(params, carry):
        return constrain_state(
            jax.lax.fori_loop(0, iterations, lambda _, carry: body(params, carry), carry)
        )

    mesh = mesh_of(params)
    with use_mesh(mesh):
        carry = constrain_state((jnp.zeros((batch,), jnp.int32), *carries))
    return loop_timer(functools.partial(run, params), carry, iterations, mesh)


def repeated(step: TimedPass, count: int) -> TimedPass:
    """Returns a step that runs ``step`` ``count`` times in a loop, as a chain is drafted."""

    def run(params, token, carry):
        def again(_, state):
            return step.run(params, *state)

        return jax.lax.fori_loop(0, count, again, (token, carry))

    return step._replace(run=run)


def model_step(
    model: Model, params: Params, width: int, slots: int, batch: int, scored: int | None = None
) -> TimedPass:
    """Returns a pass of a model: forward, unembedding and argmax of ``width`` tokens per row.

    Args:
      model: The target or the draft.
      params: Its weights.
      width: T, tokens per row; K + 1 for a verify pass.
      slots: S, the slots of the cache.
      batch: B, rows.
      scored: How many of the last tokens are unembedded; by default all. The first pass of a
        draft feeds two tokens and scores one.
    """
    scored = width if scored is None else scored

    def run(params, token, carry):
        tokens, cache = carry
        tokens = tokens.at[:, 0].set(token)
        output = model.forward(params, tokens, cache)
        best = argmax(model.unembed(params, output.hidden[:, -scored:]))
        return best[:, -1], (tokens.at[:, -scored:].set(best), output.cache)

    with use_mesh(mesh_of(params)):
        cache = model.init_cache(params, batch, slots)
        cache = cache.commit(jnp.full((batch,), (slots - width) // 2, jnp.int32))
        cache = model.open_window(cache, width)  # nothing is committed, so it is never closed
        tokens = jnp.zeros((batch, width), jnp.int32)
    return TimedPass(run, params, (tokens, cache))


def head_step(head: Head, params: Params, slots: int, batch: int) -> TimedPass:
    """Returns a pass of a head with its scores, after the first of a round.

    Args:
      head: The functions of the head.
      params: ``{"head": ..., "target": ...}``.
      slots: The slots of the cache.
      batch: B, rows.
    """

    def run(params, token, carry):
        x, cache = carry
        fed, cache = head.feed(params, head.recycle(params, x), token[:, None], cache, 0, None)
        x = fed.astype(x.dtype)
        return argmax(head.unembed(params, x))[:, 0], (x, cache)

    with use_mesh(mesh_of(params)):
        cache = head.init_cache(params, batch, slots)
        dtype = jax.tree.leaves(cache)[0].dtype
        cache = cache.commit(jnp.full((batch,), slots // 2, jnp.int32))
        x = jnp.ones((batch, 1, head.width), dtype)
    return TimedPass(run, params, (x, cache))


def refresh_step(
    head: Head, target: Model, params: Params, width: int, slots: int, batch: int
) -> TimedPass:
    """Returns the refresh of a head after a verify pass, and the first draft that it predicts.

    Of the pairs that it reads it keeps none.

    Args:
      head: The functions of the head.
      target: The target's functions, with any taps.
      params: ``{"head": ..., "target": ...}``.
      width: Pairs per row that the head reads.
      slots: The slots of the cache.
      batch: B, rows.
    """
    drafter = head_drafter(head)

    def run(params, token, carry):
        state, tokens, features, n = carry
        # The features depend on the state before, so they are joined again each time.
        now = features + (1e-9 * state.last.mean()).astype(features.dtype)
        state = drafter.commit(params, state, tokens.at[:, 0].set(token), n, now, None)
        return argmax(head.unembed(params, state.last)), (state, tokens, features, n)

    with use_mesh(mesh_of(params)):
        state = drafter.init(params, batch, slots)
        half, none = (jnp.full((batch,), n, jnp.int32) for n in (slots // 2, 0))
        tokens = jnp.zeros((batch, width), jnp.int32)
        features = _features(target, params, tokens, drafter)
        state = state.replace(cache=state.cache.commit(half))
    return TimedPass(run, params, (state, tokens, features, none))


def _features(target: Model, params: Params, tokens: jax.Array, drafter: Drafter) -> jax.Array:
    """dtype[B,T,E], ones in place of the target's states that a drafter reads."""

    def run(weights):
        cache = target.init_cache(weights, len(tokens), 1)
        return target.forward(weights, tokens[:, :1], cache).hidden

    hidden = jax.eval_shape(run, params["target"])
    return jnp.ones((*tokens.shape, len(drafter.shape.taps) * hidden.shape[2]), hidden.dtype)


def drafting_step(system: System, params: Params, slots: int, batch: int) -> TimedPass:
    """Returns all that a drafter does in a round: it commits the last round, and drafts.

    Of what the target was fed nothing is kept, so every iteration drafts after as many tokens.

    Args:
      system: The target, the drafter and K.
      params: The drafter's.
      slots: The slots of the cache.
      batch: B, rows.
    """
    drafter = system.drafter
    K = system.num_draft
    half = slots // 2

    def run(params, token, carry):
        state, tokens, sampler, features, cache = carry
        tokens = tokens.at[:, half].set(token)
        length, none = (jnp.full((batch,), n, jnp.int32) for n in (half, 0))
        new = features[:, : K + 1] + (1e-9 * token.mean()).astype(features.dtype)
        fed = jax.lax.dynamic_slice_in_dim(tokens, half, K + 1, axis=1)
        state = drafter.commit(params, state, fed, none, new, None)
        rows = (tokens, length, sampler, sampler.seed, sampler.is_greedy)
        context = system.context(*rows, params["target"], cache)
        proposal, state = drafter.propose(params, state, context, K)
        return proposal.tokens[:, -1], (state, tokens, sampler, features, cache)

    def begin(params):
        tokens = jnp.zeros((batch, slots), jnp.int32)
        features = _features(system.target, params, tokens, drafter)
        state = drafter.init(params, batch, slots)
        prompt = tokens[:, :half]
        length = jnp.full((batch,), half, jnp.int32)
        prompt = Prompt(prompt, length, tokens[:, 0], features[:, :half])
        state = drafter.prefill(params, state, prompt)
        cache = None
        if drafter.shape.reads_target:
            cache = system.target.init_cache(params["target"], batch, slots).commit(length)
        return state, tokens, features[:, : K + 1], cache

    with use_mesh(mesh_of(params)):
        state, tokens, features, cache = jax.jit(begin)(params)
        sampler = make_sampler(SamplerConfig(), batch, system.target.vocab_size)
    return TimedPass(run, params, (state, tokens, sampler, features, cache))


def round_timer(
    target: LoadedModel,
    draft: LoadedModel | LoadedHead | None,
    num_draft: int,
    num_passes: int,
    slots: int,
    batch: int,
    iterations: int = ITERATIONS,
) -> Timer:
    """Returns the timer of the passes of a round: the target's, and after it those of the draft.

    They stand in one loop, since a pass that stands alone finds its weights in the processor's
    caches, from which the others drive them out in a round.

    Args:
      target: The target, which is fed num_draft + 1 tokens per row.
      draft: What drafts; None if no pass does.
      num_draft: Drafted tokens per round.
      num_passes: Passes of the draft: the first, which scores the first draft, and others that
        feed one token per row. Where passes are timed together (see ``can_split``), any number but
        0 stands for all of them.
      slots: The slots of the caches.
      batch: B, rows.
      iterations: The number of rounds in a call.
    """
    params = target.cpu_layout.prepare((num_draft + 1) * batch)
    steps = [model_step(target.model, params, num_draft + 1, slots, batch)]
    if num_passes:
        params = draft_params(draft, params, batch, num_draft)
        if can_split(draft, target):
            first, later = _draft_steps(target, draft, params, num_draft, slots, batch)
            steps += [first, repeated(later, num_passes - 1)][:num_passes]
        else:
            config = SpeculativeConfig(draft.method, num_draft)
            model = tapped_model(target, draft)
            system = System(target.model, make_drafter(config, model, draft), GREEDY, num_draft)
            steps.append(drafting_step(system, params, slots, batch))
    return steps_timer(steps, batch, iterations)


def _draft_steps(target, draft, params, num_draft, slots, batch):
    """Returns the first pass of a round, and one of the others."""
    drafting = registry.find(draft.method).drafting
    if drafting.draft == "model":
        first = drafting.round_passes(draft.config, num_draft)[0]
        step = functools.partial(model_step, draft.model, params, slots=slots, batch=batch)
        return step(width=first.width, scored=first.scored), step(width=1, scored=1)
    head = head_of(draft, target.model)
    first = refresh_step(head, target.model, params, num_draft + 1, slots, batch)
    return first, head_step(head, params, slots, batch)


def can_split(draft: LoadedModel | LoadedHead, target: LoadedModel) -> bool:
    """Returns whether the first pass of a round can be timed apart from the others.

    It can where one model or one ``Head`` runs all of them, and the others feed a model one token.
    All passes of other drafters are timed together.
    """
    drafting = registry.find(draft.method).drafting
    if drafting.draft == "model":
        return all(one.width == 1 for one in drafting.round_passes(draft.config, 3)[1:])
    return head_of(draft, target.model) is not None
