"""Runs the rounds of adaptive decoding: K is chosen by ``policy`` for each chunk of rounds.

A compiled program has a fixed K, so K changes between chunks. The state has the same shapes for
every K and is donated from one chunk to the next.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding, processes
from spec_jax.compilation import NamedProgram, add_span, bounded_jit
from spec_jax.contracts import Rule
from spec_jax.decoding import Chunk, DecodeState, Kind, System
from spec_jax.drafters.model_free import without_drafts
from spec_jax.engine.adaptive.policy import RoundCosts, Tuner
from spec_jax.rules import GREEDY, MATCH
from spec_jax.sampling import UpdateCounter
from spec_jax.sharding import constrain, constrain_state

_TIMED_ROUNDS = 4
_TIMED_REPEATS = 2
_UNBOUNDED = np.iinfo(np.int32).max
CATCH_UP = 32  # tokens of one catch-up pass, where the slots allow it


def system_of(system: System, num_draft: int) -> System:
    """The system with another K; at K = 0 it decodes plainly and skips the drafter."""
    if num_draft > 0:
        return system._replace(num_draft=num_draft)
    return system._replace(
        drafter=without_drafts(system.drafter), rule=plain_rule(system.rule.is_greedy), num_draft=0
    )


def name_of_round(system: System, batch: int) -> str:
    """What is compiled, for people."""
    K = system.num_draft
    return f"the round of {f'K={K}' if K else 'plain decoding'} for batch {batch}"


def plain_rule(is_greedy: bool) -> Rule:
    """The rule of plain decoding: argmax, or a sample from the target's distribution."""
    return GREEDY if is_greedy else MATCH


@functools.partial(bounded_jit, static_argnames=("system",), donate_argnames=("state",))
def catch_up(params, state: DecodeState, *, system: System) -> DecodeState:
    """Feeds the draft the tokens that it has skipped. Donates the state."""
    width = system.lookahead_slots  # the free slots after the committed tokens
    draft = system.drafter.sync.catch_up(
        params["draft"], state.draft, state.tokens, state.length, width
    )
    return state.replace(draft=draft)


@functools.partial(bounded_jit, donate_argnames=("state",))
def count_tuner(state: DecodeState, num_updates: jax.Array) -> DecodeState:
    """Makes the noise of the next rounds independent of what K is chosen by. Donates the state."""
    return constrain_state(state.with_update_count(UpdateCounter.TUNER, num_updates))


@bounded_jit
def count_tokens(state: DecodeState) -> jax.Array:
    """i32[B], tokens of the prompt and the output so far."""
    return state.total


@bounded_jit
def shortest_row(state: DecodeState) -> jax.Array:
    """i32[], tokens of the prompt and the output so far, of the active row with the fewest."""
    return constrain(jnp.where(state.is_active, state.total, _UNBOUNDED).min())


@functools.partial(bounded_jit, static_argnames=("max_draft",))
def drafts_since(
    state: DecodeState, since: jax.Array, drafted_until: jax.Array, *, max_draft: int
) -> jax.Array:
    """Returns i32[2,max_draft], drafts reached and accepted, by position and summed over rows.

    A position is reached where the row has a token of the round: the draft, or the target's own,
    also if no draft was offered there. So neither positions that were cut count, nor rounds that
    begin after more than ``drafted_until`` tokens, which had no room for drafts.

    Args:
      state: the state after the rounds.
      since: i32[B], tokens of each row before them.
      drafted_until: i32[], see ``System``.
      max_draft: the largest K.
    """
    index = jnp.arange(state.kind.shape[1])
    begin = jax.lax.cummax(jnp.where(state.offered >= 0, index, -1), axis=1)
    is_new = (index >= since[:, None]) & (state.kind != Kind.NONE) & (begin <= drafted_until)
    counted = jnp.stack([is_new, is_new & (state.kind == Kind.ACCEPTED)])
    position = jnp.where(counted, index - begin, max_draft)  # max_draft is out of range: dropped
    count = jax.vmap(lambda at: jnp.zeros((max_draft,), jnp.int32).at[at].add(1, mode="drop"))
    return constrain(count(position))


class AdaptiveState:
    """What adaptive decoding has learned: acceptance, and times by batch size and slots.

    Concurrent calls may share it: its values are replaced, never changed. When two calls observe at
    the same time, the counts of the later one are kept. Times are measured, not learned from
    outputs, so they are not counted as updates.

    Args:
      buckets: the Ks to choose among, in ascending order.

    Attributes:
      tuner: the tuner of the last call.
      costs: measured times by ``(rule, B, slots)``. A key that is present is not measured again.
    """

    def __init__(self, buckets: Sequence[int]):
        self.buckets = tuple(buckets)
        self.tuner = Tuner.fresh(self.buckets[-1])
        self.costs: dict[tuple[str, int, int], RoundCosts] = {}
        self.lock = threading.Lock()


class AdaptiveRunner:
    """Runs chunks of rounds as ``decoding.generate`` does, and chooses K for each chunk.

    The first call for a batch size compiles the program of every K and times it on copies of the
    state, which are thrown away.

    Args:
      system: the system with the largest K.
      params_of: ``K -> {"target": ..., "draft": ...}``, the weights laid out for this K.
      adaptive: what has been learned so far; updated after each chunk.

    Attributes:
      plans: K and number of rounds of every chunk that was run.
    """

    def __init__(self, system: System, params_of: Callable[[int], dict], adaptive: AdaptiveState):
        self._systems = {k: system_of(system, k) for k in adaptive.buckets}
        self._params_of = params_of
        self._max_draft = max(adaptive.buckets)
        self._adaptive = adaptive
        sync = system.drafter.sync
        self._can_lag = 0 in adaptive.buckets and sync.catch_up is not None
        self._max_lag = sync.max_lag or math.inf
        self._lag = 0
        self.plans: list[tuple[int, int]] = []

    def __call__(
        self,
        state: DecodeState,
        stop: jax.Array,
        max_rounds: jax.Array | int,
        min_active: jax.Array | int = 1,
    ) -> tuple[DecodeState, Chunk]:
        """Chooses K and runs at most ``max_rounds`` rounds with it. Donates the state.

        Args:
          state, stop, max_rounds, min_active: the arguments of ``decoding.generate``.

        Returns:
          What ``decoding.generate`` returns.
        """
        if max_rounds == 0:  # only to end rows, or to read the state
            return self._generate(self._max_draft, state, stop, jnp.int32(0), min_active)
        adaptive = self._adaptive
        key = (self._systems[self._max_draft].rule.name, *state.tokens.shape)
        if key not in adaptive.costs:
            begin = time.time()
            with adaptive.lock:  # two calls that measure at once would slow each other down
                if key not in adaptive.costs:
                    state, adaptive.costs[key] = self._measure(state)
            add_span(begin, time.time())
        costs = adaptive.costs[key]
        (k, rounds), tuner = adaptive.tuner.choose(self._with_room(costs, state), self._lag)
        if state.sampler.update_counts is not None:
            state = count_tuner(state, jnp.uint32(tuner.num_updates))
        if self._lag and (k > 0 or self._lag >= self._max_lag):
            state, self._lag = self._catch_up(state), 0
        if k == 0:
            rounds = min(rounds, self._max_lag - self._lag)
        since = count_tokens(state)
        max_rounds = jnp.minimum(jnp.int32(max_rounds), rounds)
        state, chunk = self._generate(k, state, stop, max_rounds, min_active)
        until = self._systems[k].drafted_until
        until = jnp.int32(_UNBOUNDED if until is None else until)
        reached, accepted = np.asarray(
            drafts_since(state, since, until, max_draft=self._max_draft)
        ).tolist()
        rounds = int(chunk.rounds)
        adaptive.tuner = tuner.observe(k, rounds, reached, accepted, rounds * costs.round_ms[k])
        if k == 0 and self._can_lag:
            self._lag += rounds
        self.plans.append((k, rounds))
        return state, chunk

    def _with_room(self, costs: RoundCosts, state: DecodeState) -> RoundCosts:
        """The costs of the Ks that some row has room for; of the smallest K where none has any."""
        longest = self._systems[self._max_draft].drafter.max_length
        if longest is None or state.tokens.shape[1] <= longest:
            return costs
        room = longest - int(shortest_row(state))
        times = costs.round_ms
        fitting = {k: ms for k, ms in times.items() if k <= room}
        return costs._replace(round_ms=fitting or {min(times): times[min(times)]})

    def _generate(self, k, state, stop, max_rounds, min_active=1):
        system = self._systems[k]
        samplers = jax.tree.structure((state.sampler, state.draft_sampler))
        what = name_of_round(system, len(state.limit))
        with NamedProgram(what, system, samplers, state.stop_tokens.shape, state.tokens.shape):
            return decoding.generate(
                self._params_of(k), state, stop, max_rounds, jnp.int32(min_active), system=system
            )

    def _catch_up(self, state: DecodeState) -> DecodeState:
        system = self._systems[self._max_draft]
        return catch_up(self._params_of(system.lookahead_slots - 1), state, system=system)

    def _endless(self, state: DecodeState) -> DecodeState:
        """A copy in which every row is active, up to its last slots."""
        copy = jax.tree.map(jnp.copy, state)
        limit = state.tokens.shape[1] - self._systems[self._max_draft].lookahead_slots
        return copy.replace(
            limit=jnp.full_like(state.limit, limit),
            finish=jnp.zeros_like(state.finish),
            stop_tokens=jnp.full_like(state.stop_tokens, -1),
        )

    def _measure(self, state: DecodeState) -> tuple[DecodeState, RoundCosts]:
        """Compiles every program, then times a few rounds of each K on copies of the state."""
        go_on = jnp.zeros_like(state.finish)
        for k in self._systems:
            state, _ = self._generate(k, state, go_on, jnp.int32(0))
        if self._can_lag:
            state = self._catch_up(state)
        times = {k: math.inf for k in self._systems}
        catch_up_ms = math.inf if self._can_lag else 0.0
        for k in [*self._systems] * _TIMED_REPEATS:
            copy = jax.block_until_ready(self._endless(state))
            begin = time.perf_counter()
            copy, chunk = self._generate(k, copy, go_on, jnp.int32(_TIMED_ROUNDS))
            rounds = int(chunk.rounds)
            times[k] = min(times[k], (time.perf_counter() - begin) * 1e3 / rounds)
            if k == 0 and self._can_lag:
                begin = time.perf_counter()
                jax.block_until_ready(self._catch_up(copy))
                catch_up_ms = min(catch_up_ms, (time.perf_counter() - begin) * 1e3)
        # Clocks differ: every process chooses by the times of the first.
        times, catch_up_ms = processes.from_writer([list(times.items()), catch_up_ms])
        width = self._systems[self._max_draft].lookahead_slots
        return state, RoundCosts(dict(map(tuple, times)), catch_up_ms, width)
