"""The cost of one pass of a model, and the speed-up that costs and acceptance predict."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common.timing import Timer, interleave, loop_timer
from spec_jax.contracts import Drafter, Model
from spec_jax.drafters.common.head import Head, head_drafter
from spec_jax.drafters.standalone.model import FIRST_TOKENS
from spec_jax.engine import stats
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.meshes import mesh_of, use_mesh
from spec_jax.models.params import Params
from spec_jax.sampling import argmax
from spec_jax.sharding import constrain_state

ITERATIONS = 64  # passes in one timed call, so that a dispatch does not count
REPEATS = 7


@functools.partial(
    jax.jit, static_argnames=("model", "iterations", "scored"), donate_argnames=("tokens", "cache")
)
def _run_passes(params, tokens, cache, seen, *, model: Model, iterations: int, scored: int):
    def one_pass(_, carry):
        tokens, cache = carry
        output = model.forward(params, tokens, cache, window_mask=seen)
        logits = model.unembed(params, output.hidden[:, -scored:])
        # The next pass reads this one's output, so the compiler can neither drop nor overlap one.
        best = argmax(logits)
        return tokens.at[:, -scored:].set(best), output.cache

    return constrain_state(jax.lax.fori_loop(0, iterations, one_pass, (tokens, cache)))


def pass_timer(
    model: Model, params: Params, width: int, slots: int, batch: int, iterations: int = ITERATIONS,
    scored: int | None = None, seen: jax.Array | None = None,
) -> Timer:
    """Compiles a loop of passes and returns its timer, in milliseconds per pass.

    A pass is forward, unembedding and argmax of ``width`` tokens per row with a half-full cache,
    which the loop carries and the call donates, as in decoding.

    Args:
      model: The target or the draft.
      params: Its weights.
      width: T, tokens per row; K + 1 for a verify pass.
      slots: S, the slots of the cache.
      batch: B, rows.
      iterations: Passes in one call.
      scored: How many of the last tokens are unembedded; by default all. The first pass of a
        draft feeds two tokens and scores one.
      seen: bool[1,T,T], which tokens of a tree each token attends to; None for a chain.
    """
    scored = width if scored is None else scored
    run = functools.partial(_run_passes, model=model, iterations=iterations, scored=scored)
    with use_mesh(mesh_of(params)):
        cache = model.init_cache(params, batch, slots)
        cache = cache.commit(jnp.full((batch,), (slots - width) // 2, jnp.int32))
        cache = model.open_window(cache, width)  # nothing is committed, so it is never closed
        carry = constrain_state((jnp.zeros((batch, width), jnp.int32), cache))
    return loop_timer(lambda carry: run(params, *carry, seen), carry, iterations, mesh_of(params))


@functools.partial(
    jax.jit, static_argnames=("head", "children", "iterations"), donate_argnames="carry"
)
def _run_head(params, carry, seen, *, head: Head, children: int, iterations: int):
    def one_pass(_, carry):
        x, best, score, cache = carry
        g = head.recycle(params, x)
        x, cache = head.feed(params, g, best[:, :, 0], cache, 0, seen)
        x, logits = x.astype(carry[0].dtype), head.unembed(params, x)
        if seen is None:
            return x, argmax(logits)[:, :, None], score, cache
        logp = jax.nn.log_softmax(logits, axis=-1)
        # All of the best are carried: if only one is read, XLA sorts the whole vocabulary.
        score, best = jax.lax.top_k(logp + score[:, :, :1], children)
        return x, best, score, cache

    return constrain_state(jax.lax.fori_loop(0, iterations, one_pass, carry))


def head_timer(
    head: Head, params: Params, slots: int, batch: int = 1, width: int = 1, children: int = 1,
) -> Timer:
    """Compiles a loop of a head's passes with their scores and returns its timer, in milliseconds.

    Args:
      head: The functions of the head.
      params: ``{"head": ..., "target": ...}``.
      slots: The slots of the cache, which is half full.
      batch: B, rows.
      width: Drafts per row and pass; 1 for a chain.
      children: The number of children of each draft of a tree.
    """
    mesh = mesh_of(params)
    with use_mesh(mesh):
        cache = head.init_cache(params, batch, slots)
        dtype = jax.tree.leaves(cache)[0].dtype
        cache = cache.commit(jnp.full((batch,), slots // 2, jnp.int32))
        x, best = jnp.ones((batch, width, head.width), dtype), (batch, width, children)
        carry = constrain_state((x, jnp.zeros(best, jnp.int32), jnp.zeros(best), cache))
    seen = None if width == 1 else jnp.eye(width, dtype=bool)[None]
    run = functools.partial(_run_head, head=head, children=children, iterations=ITERATIONS)
    return loop_timer(lambda carry: run(params, carry, seen), carry, ITERATIONS, mesh)


@functools.partial(
    jax.jit, static_argnames=("drafter", "unembed", "iterations"), donate_argnames="carry"
)
def _run_refresh(params, carry, features, n, *, drafter: Drafter, unembed, iterations: int):
    def one_refresh(_, carry):
        state, tokens = carry
        # The features depend on the state before, so they are joined again each time.
        now = features + (1e-9 * state.last.mean()).astype(features.dtype)
        state = drafter.commit(params, state, tokens, n, now, None)
        if unembed is not None:
            tokens = tokens.at[:, 0].set(argmax(unembed(params, state.last)))
        return state, tokens

    return constrain_state(jax.lax.fori_loop(0, iterations, one_refresh, carry))


def refresh_timer(
    drafter: Drafter, target: Model, params: Params, width: int, slots: int, batch: int = 1,
    head: Head | None = None,
) -> Timer:  # fmt: skip
    """Compiles a loop of a head's refreshes and returns its timer, in milliseconds.

    Args:
      drafter: The drafter of the head.
      target: The target's functions, with any taps.
      params: ``{"head": ..., "target": ...}``.
      width: Pairs per row that the head reads; it keeps none of them.
      slots: The slots of the cache, which is half full.
      batch: B, rows.
      head: The functions of the head, to score the first draft too, which the last pair predicts.
    """
    mesh = mesh_of(params)
    with use_mesh(mesh):
        state = drafter.init(params, batch, slots)
        half, none = (jnp.full((batch,), n, jnp.int32) for n in (slots // 2, 0))
        tokens = jnp.zeros((batch, width), jnp.int32)
        hidden = jax.eval_shape(target.forward, params["target"], tokens).hidden
        features = jnp.ones((*hidden.shape[:2], len(drafter.taps) * hidden.shape[2]), hidden.dtype)
        state = state.replace(cache=state.cache.commit(half))
        carry = constrain_state((state, tokens))
    run = functools.partial(
        _run_refresh, drafter=drafter, unembed=head and head.unembed, iterations=ITERATIONS
    )
    return loop_timer(lambda carry: run(params, carry, features, none), carry, ITERATIONS, mesh)


def draft_timer(
    draft: LoadedModel | LoadedHead, target: LoadedModel, slots: int, batch: int
) -> Timer | None:
    """Returns the timer of a draft pass of one token per row; None if no such pass can be timed."""
    params = draft.decoding_params(batch)
    if isinstance(draft, LoadedModel):
        return pass_timer(draft.model, params, 1, slots, batch)
    head = draft.head(target.model)
    if head is None:
        return None
    params = {"head": params, "target": target.decoding_params(batch)}
    return head_timer(head, params, slots, batch)


def first_timer(
    draft: LoadedModel | LoadedHead, target: LoadedModel, slots: int, batch: int, k: int
) -> Timer | None:
    """Returns the timer of the first pass of a round of k drafts, which scores the first draft.

    A draft model feeds two tokens per row. A head's first pass is its refresh, which feeds k + 1
    pairs. None if no such pass can be timed.

    Args:
      draft: What drafts.
      target: The target.
      slots: The slots of the caches.
      batch: B, rows.
      k: Drafted tokens per round.
    """
    layout = target.decoding_params((k + 1) * batch)
    params = draft.draft_params(layout, batch, k)
    if isinstance(draft, LoadedModel):
        return pass_timer(draft.model, params, FIRST_TOKENS, slots, batch, scored=1)
    head = draft.head(target.model)
    if head is None:
        return None
    drafter = head_drafter(head)
    return refresh_timer(drafter, target.model, params, k + 1, slots, batch, head)


def first_width(draft: LoadedModel | LoadedHead, k: int) -> int:
    """Returns the tokens per row that ``first_timer`` feeds."""
    return FIRST_TOKENS if isinstance(draft, LoadedModel) else k + 1


class Costs(NamedTuple):
    """Costs of passes that were measured together.

    Attributes:
      plain_ms: Milliseconds of a target pass of one token per row.
      draft_ms: Milliseconds of a draft pass of one token per row, by method.
      verify_ms: Milliseconds of a target pass by its width, with that of width 1.
      slots: The slots of the caches.
      batch: The number of rows.
      first_ms: Milliseconds of the first pass of a round by its width, by method: of a head, the
        refresh; see ``first_timer``.
    """

    plain_ms: float
    draft_ms: dict[str, float]
    verify_ms: dict[int, float]
    slots: int
    batch: int
    first_ms: dict[str, dict[int, float]] | None = None

    @classmethod
    def measure(cls, timers: Mapping[tuple[str, int], Timer], *, slots: int, batch: int) -> Costs:
        """Runs timers of passes in turns.

        Args:
          timers: By name: ("target", width); (method, 1) for a draft pass; (method, width) for the
            first pass of a round, which is wider.
          slots: The slots of the caches.
          batch: The number of rows.
        """
        found = {name: float(np.median(ms)) for name, ms in interleave(timers, REPEATS).items()}
        verify_ms = {width: ms for (role, width), ms in sorted(found.items()) if role == "target"}
        drafts = {name: ms for name, ms in found.items() if name[0] != "target"}
        draft_ms = {role: ms for (role, width), ms in drafts.items() if width == 1}
        first_ms: dict[str, dict[int, float]] = {}
        for (role, width), ms in sorted(drafts.items()):
            if width > 1:
                first_ms.setdefault(role, {})[width] = ms
        return cls(verify_ms[1], draft_ms, verify_ms, slots, batch, first_ms)

    def draft_cost(self, method: str, k: int = 0) -> float:
        """Returns the cost of one drafted token in plain passes; NaN if it was not measured.

        Args:
          method: What drafts. Copied tokens count as free.
          k: Drafted tokens per round: the mean of them, of which the first takes a wider pass,
            linear between the widths that were measured; 0: the cost of the other passes.
        """
        if method in ("ngram", "suffix"):
            return 0.0
        pass_ms = self.draft_ms.get(method, float("nan"))
        first_ms = (self.first_ms or {}).get(method)
        if k and first_ms:
            pass_ms += (_between(first_ms, k + 1) - pass_ms) / k
        return pass_ms / self.plain_ms

    def verify_cost(self, k: int) -> float:
        """Returns the cost of a pass of k + 1 tokens in plain passes; linear between widths."""
        return _between(self.verify_ms, k + 1) / self.plain_ms


def _between(by_width: Mapping[int, float], width: int) -> float:
    times = {int(w): ms for w, ms in by_width.items()}  # as text in a report
    widths = sorted(times)
    return float(np.interp(width, widths, [times[w] for w in widths]))


def predict(costs: Costs, result: dict, k: int | None = None) -> float:
    """Returns the speed-up that a result's acceptance predicts, for its own K or a smaller one.

    A rate is the probability that a token is drafted and accepted, since a drafter that copies
    tokens does not always have any.

    Args:
      costs: The costs of the passes.
      result: An entry of a report's ``results``.
      k: Drafted tokens per round; by default the result's.

    Returns:
      The speed-up; NaN for a tree, whose passes were not measured.
    """
    if result.get("tree"):
        return float("nan")
    k = result["k"] if k is None else k
    if k == 0:
        return 1.0
    before = [result["rounds"], *result["drafted_at"]]
    rates = [
        rate * offered / earlier if earlier else float("nan")
        for rate, offered, earlier in zip(result["acceptance_by_position"], before[1:], before)
    ]
    return stats.predicted_speedup(
        rates[:k], costs.draft_cost(result["method"], k), costs.verify_cost(k)
    )
