"""Rounds with the K that pays best: ``adaptive``'s choice, run on the device.

A program has a fixed K, so K changes between chunks of rounds; the state is the same for all of
them and is donated from one to the next.
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

from spec_jax import decoding
from spec_jax.config import SpeculativeConfig
from spec_jax.decoding import Chunk, DecodeState, Kind, System
from spec_jax.drafters.model_free import without_drafts
from spec_jax.engine.adaptive.policy import Costs, Tuner
from spec_jax.rules import MATCH, make_rule

_WARM_ROUNDS = 4  # of one timing
_WARM_REPEATS = 2
CATCH_UP = 32  # tokens a pass, where the slots allow it


def system_of(system: System, num_draft: int) -> System:
    """The system with another K; without drafts a plain rule draws, and the drafter rests."""
    if num_draft > 0:
        return system._replace(num_draft=num_draft)
    return system._replace(
        drafter=without_drafts(system.drafter), rule=plain_rule(system.rule.is_greedy), num_draft=0,
        has_expected=False,
    )  # fmt: skip


def plain_rule(is_greedy: bool):
    """The rule of plain decoding: argmax, or a draw from the target's law."""
    greedy = SpeculativeConfig(rejection_sampling_strategy="greedy")
    return make_rule(greedy) if is_greedy else MATCH


@functools.partial(jax.jit, static_argnames=("system",), donate_argnames=("state",))
def catch_up(params, state: DecodeState, *, system: System) -> DecodeState:
    """Feeds the draft what rounds without drafts have committed. Donates the state."""
    width = system.lookahead_slots  # behind the committed tokens there are so many slots
    draft = system.drafter.catch_up(
        params["draft"], state.draft, state.tokens, state.length, width
    )
    return state.replace(draft=draft)


@jax.jit
def count_tokens(state: DecodeState) -> jax.Array:
    """i32[B], tokens of prompt and output so far."""
    return state.prompt_length + (state.kind != Kind.NONE).sum(axis=1)


@functools.partial(jax.jit, static_argnames=("most",))
def accepted_since(state: DecodeState, since: jax.Array, *, most: int) -> jax.Array:
    """Drafts accepted behind ``since`` (i32[B]) tokens, by position: i32[most]."""
    index = jnp.arange(state.kind.shape[1])
    begin = jax.lax.cummax(jnp.where(state.offered >= 0, index, -1), axis=1)
    is_new = (index >= since[:, None]) & (state.kind == Kind.ACCEPTED)
    position = jnp.where(is_new, index - begin, most)
    return jnp.zeros((most,), jnp.int32).at[position].add(1, mode="drop")


class Memory:
    """What a decoder has learned: acceptance, and costs by batch and slots.

    Calls that run at once may share it: values are replaced, never changed, and of two that
    observe at the same time the later one's counts stay.

    Args:
      buckets: the Ks to choose among, in ascending order.

    Attributes:
      tuner: the last call's.
      costs: by ``(rule, B, slots)``; what is there is not measured again.
    """

    def __init__(self, buckets: Sequence[int]):
        self.buckets = tuple(buckets)
        self.tuner = Tuner.fresh(self.buckets[-1])
        self.costs: dict[tuple[str, int, int], Costs] = {}
        self.lock = threading.Lock()


class AdaptiveRunner:
    """Runs chunks of rounds like ``decoding.generate``, choosing K for each.

    The first call for a batch size compiles the program of every K and times it on copies of the
    state, which are thrown away.

    Args:
      system: of the largest K.
      params_of: ``K -> {"target": ..., "draft": ...}``, laid out for it.
      memory: what is known; updated.

    Attributes:
      plans: K and rounds of every chunk that was run.
    """

    def __init__(self, system: System, params_of: Callable[[int], dict], memory: Memory):
        self._systems = {k: system_of(system, k) for k in memory.buckets}
        self._params_of = params_of
        self._most = max(memory.buckets)
        self._memory = memory
        self._has_backlog = 0 in memory.buckets and system.drafter.catch_up is not None
        self._most_behind = system.drafter.max_lag or math.inf
        self._backlog = 0
        self.plans: list[tuple[int, int]] = []

    def __call__(
        self, state: DecodeState, stop: jax.Array, max_rounds: jax.Array | int,
        min_active: jax.Array | int = 1,
    ) -> tuple[DecodeState, Chunk]:
        """Runs the rounds of one choice, ``max_rounds`` at most. Donates the state.

        Args:
          state, stop, max_rounds, min_active: as ``decoding.generate`` takes them.
        """  # fmt: skip
        if max_rounds == 0:  # rows are ended, or looked at
            return self._generate(self._most, state, stop, jnp.int32(0), min_active)
        memory = self._memory
        key = (self._systems[self._most].rule.name, *state.tokens.shape)
        with memory.lock:  # two that measure at once would time each other
            if key not in memory.costs:
                state, memory.costs[key] = self._measure(state)
        costs = memory.costs[key]
        (k, rounds), tuner = memory.tuner.choose(costs, self._backlog)
        if self._backlog and (k > 0 or self._backlog >= self._most_behind):
            state, self._backlog = self._catch_up(state), 0
        if k == 0:
            rounds = min(rounds, self._most_behind - self._backlog)
        since = count_tokens(state)
        most = jnp.minimum(jnp.int32(max_rounds), rounds)
        state, chunk = self._generate(k, state, stop, most, min_active)
        accepted = np.asarray(accepted_since(state, since, most=self._most))
        rounds, row_rounds = int(chunk.rounds), int(chunk.row_rounds)
        memory.tuner = tuner.observe(
            k, rounds, row_rounds, accepted.tolist(), rounds * costs.round_ms[k]
        )
        if k == 0 and self._has_backlog:
            self._backlog += rounds
        self.plans.append((k, rounds))
        return state, chunk

    def _generate(self, k, state, stop, max_rounds, min_active=1):
        return decoding.generate(
            self._params_of(k), state, stop, max_rounds, jnp.int32(min_active),
            system=self._systems[k],
        )

    def _catch_up(self, state: DecodeState) -> DecodeState:
        system = self._systems[self._most]
        return catch_up(self._params_of(system.lookahead_slots - 1), state, system=system)

    def _endless(self, state: DecodeState) -> DecodeState:
        """A copy in which every row is active, up to its last slots."""
        copy = jax.tree.map(jnp.copy, state)
        most = state.tokens.shape[1] - self._systems[self._most].lookahead_slots
        return copy.replace(
            limit=jnp.full_like(state.limit, most), finish=jnp.zeros_like(state.finish),
            stop_tokens=jnp.full_like(state.stop_tokens, -1),
        )  # fmt: skip

    def _measure(self, state: DecodeState) -> tuple[DecodeState, Costs]:
        """Compiles everything, then times a few rounds of each K, each on a copy of the state."""
        go_on = jnp.zeros_like(state.finish)
        for k in self._systems:
            state, _ = self._generate(k, state, go_on, jnp.int32(0))
        if self._has_backlog:
            state = self._catch_up(state)
        times = {k: math.inf for k in self._systems}
        replay = math.inf if self._has_backlog else 0.0
        for k in [*self._systems] * _WARM_REPEATS:
            copy = jax.block_until_ready(self._endless(state))
            begin = time.perf_counter()
            copy, chunk = self._generate(k, copy, go_on, jnp.int32(_WARM_ROUNDS))
            rounds = int(chunk.rounds)
            times[k] = min(times[k], (time.perf_counter() - begin) * 1e3 / rounds)
            if k == 0 and self._has_backlog:
                begin = time.perf_counter()
                jax.block_until_ready(self._catch_up(copy))
                replay = min(replay, (time.perf_counter() - begin) * 1e3)
        return state, Costs(times, replay, self._systems[self._most].lookahead_slots)
