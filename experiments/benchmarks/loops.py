"""Timers of generations, of rounds, of the rest of a round, and of plain decoding.

Each is a function without arguments that runs once and returns milliseconds; compilation
and prefill lie outside of what it times.
"""

from __future__ import annotations

import functools
import operator
import time
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import decoding
from spec_jax.config import SamplerConfig
from spec_jax.contracts import Context, Drafter, ForwardOutput, Model, Proposal
from spec_jax.decoding import DecodeState, System
from spec_jax.drafters.model_free import NO_DRAFT
from spec_jax.engine.request import make_request
from spec_jax.engine.stats import Stats, row_stats
from spec_jax.evaluation.bench import cast
from spec_jax.evaluation.timing import Timer, loop_timer
from spec_jax.sampling import argmax, make_sampler

ROUNDS = 64  # in one call, so that the dispatch does not count
_NO_LIMIT = 2**31 - 1


def start(
    system: System,
    params,
    prompts: Sequence[Sequence[int]],
    slots: int,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
) -> DecodeState:
    """Prefills one batch of prompts for greedy decoding with any K.

    Args:
      system: Target and drafter.
      params: ``{"target": ..., "draft": ...}``.
      prompts: The prompts as ids.
      slots: S, enough for prompt, output and the last window.
      max_new_tokens: New tokens of every row.
      stop_tokens: The tokens that end a row.
    """
    sampler = make_sampler(SamplerConfig(), len(prompts), system.target.vocab_size)
    *arrays, slots, _ = make_request(
        system, prompts, max_new_tokens, sampler, sampler, stop_tokens=stop_tokens, slots=slots
    )
    return jax.block_until_ready(decoding.prefill(params, *arrays, system=system, slots=slots))


class GenerateTimer:
    """Times ``decoding.generate`` from prefilled states to their end.

    Attributes:
      tokens: The output ids of every row of the last run, with prefill's token.
      stats: The counts of all rows of the last run.
      cpu_ms: Processor time of a unit in the last run, in milliseconds.
    """

    def __init__(
        self,
        system: System,
        params,
        states: Sequence[DecodeState],
        *,
        max_rounds: int = _NO_LIMIT,
        unit: str = "token",
    ):
        """Compiles and runs once.

        Args:
          system: Target, drafter, rule and K.
          params: The parameters of both models.
          states: The states of ``start``, one for each batch; they are copied, not consumed.
          max_rounds: The maximum rounds of each generation.
          unit: The unit of the times: a "token" (without prefill's) or a "round".
        """
        self._system = system
        self._params = params
        self._states = states
        self._max_rounds = max_rounds
        self._is_round = unit == "round"
        self()

    def __call__(self) -> float:
        seconds = cpu_seconds = num_rounds = 0
        self.tokens = []
        rows = []
        for state in self._states:
            carry = jax.block_until_ready(jax.tree.map(jnp.copy, state))
            stop = jnp.zeros_like(carry.finish)
            max_rounds = jnp.int32(self._max_rounds)
            begin = time.perf_counter()
            cpu_begin = time.process_time()
            final, chunk = decoding.generate(
                self._params, carry, stop, max_rounds, system=self._system
            )
            jax.block_until_ready(chunk)
            seconds += time.perf_counter() - begin
            cpu_seconds += time.process_time() - cpu_begin
            num_rounds += int(chunk.rounds)
            tokens, kind, offered = map(np.asarray, (final.tokens, final.kind, final.offered))
            for row, (first, end) in enumerate(zip(final.prompt_length, chunk.total)):
                kept = slice(int(first), int(end))
                self.tokens.append(tokens[row, kept].tolist())
                record = (kind[row, kept], offered[row, kept])
                finish = int(final.finish[row])
                rows.append(row_stats(*record, self._system.depth, finish=finish))
        self.stats = functools.reduce(operator.add, rows, Stats())
        if self._is_round and num_rounds == 0:
            raise ValueError("no round was run: the states have no room for one")
        count = num_rounds if self._is_round else self.stats.emitted - self.stats.first
        self.cpu_ms = cpu_seconds * 1e3 / max(count, 1)
        return seconds * 1e3 / max(count, 1)


@functools.partial(
    jax.jit, static_argnames=("model", "padding"), donate_argnames=("tokens", "cache")
)
def _plain(params, tokens, cache, total, limit, stop_tokens, *, model: Model, padding: int):
    """Decodes greedily, one token per pass, without counts and statistics.

    A pass feeds ``padding`` tokens, of which the first counts; the slots of the others are
    overwritten.
    """
    rows = jnp.arange(tokens.shape[0])
    M = tokens.shape[1]

    def step(carry):
        tokens, cache, last, total, is_done = carry
        output = model.forward(params, jnp.repeat(last[:, None], padding, axis=1), cache)
        logits = model.unembed(params, output.hidden)
        last = argmax(logits[:, 0])
        tokens = tokens.at[rows, jnp.where(is_done, M, total)].set(last, mode="drop")
        n = (~is_done).astype(jnp.int32)
        total = total + n
        is_done |= (last[:, None] == stop_tokens).any(axis=1) | (total >= limit)
        return tokens, output.cache.commit(n), last, total, is_done

    last = tokens[rows, total - 1]
    is_done = (last[:, None] == stop_tokens).any(axis=1) | (total >= limit)
    carry = (tokens, cache, last, total, is_done)
    tokens, cache, _, total, _ = jax.lax.while_loop(lambda c: ~c[-1].all(), step, carry)
    return tokens, cache, total


def read_timer(num_bytes: int, calls: int = 4) -> Timer:
    """Returns the timer of reading that many bytes of memory once, in order, in milliseconds."""
    x = jnp.ones((-(-num_bytes // (4 * 4096)), 4096), jnp.float32)
    read = jax.jit(lambda x: x.max(axis=1))
    return loop_timer(lambda _: [jax.block_until_ready(read(x)) for _ in range(calls)], None, calls)


class PlainTimer:
    """Times the fastest plain loop that we can write, in milliseconds per token.

    Attributes:
      tokens: See ``GenerateTimer.tokens``.
    """

    def __init__(
        self, model: Model, params, states: Sequence[DecodeState], *, dtype="float32", padding=1
    ):
        self._model = model
        self._params = cast(params, dtype)
        self._padding = padding
        self._states = [(s.tokens, cast(s.target, dtype), s) for s in states]
        self()

    def __call__(self) -> float:
        seconds = 0.0
        count = 0
        self.tokens = []
        for tokens, cache, s in self._states:
            total = s.prompt_length + 1
            carry = jax.block_until_ready(jax.tree.map(jnp.copy, (tokens, cache, total)))
            begin = time.perf_counter()
            out, _, end = _plain(
                self._params,
                *carry,
                s.limit,
                s.stop_tokens,
                model=self._model,
                padding=self._padding,
            )
            jax.block_until_ready((out, end))
            seconds += time.perf_counter() - begin
            count += int((end - total).sum())
            for row, (first, last) in enumerate(zip(s.prompt_length, end)):
                self.tokens.append(np.asarray(out)[row, int(first) : int(last)].tolist())
        return seconds * 1e3 / max(count, 1)


@flax.struct.dataclass
class _Length:
    """The cache of a model that computes nothing."""

    length: jax.Array  # i32[B]

    def commit(self, n, path=None):
        return self.replace(length=self.length + n)


@functools.cache
def free_drafter(vocab_size: int) -> Drafter:
    """Returns a drafter that computes nothing: the draft at each position is the position."""

    def propose(params, state, context: Context, num_draft: int):
        tokens = (context.length[:, None] + jnp.arange(num_draft, dtype=jnp.int32)) % vocab_size
        n_draft = jnp.full(context.length.shape, num_draft, jnp.int32)
        return Proposal(tokens, n_draft, is_sound=n_draft > 0), state

    return NO_DRAFT._replace(name="free", propose=propose)


@functools.cache
def _free_system(system: System) -> System:
    """Returns the same rule and K with a target and a drafter that compute nothing.

    The target's logits are a parameter to which the tokens add a little, so that the compiler
    cannot share work between rounds.
    """
    V = system.target.vocab_size
    target = Model(
        vocab_size=V,
        max_length=system.target.max_length,
        init_cache=lambda params, batch, slots: _Length(jnp.zeros((batch,), jnp.int32)),
        forward=lambda params, tokens, cache, **_: ForwardOutput(
            tokens[:, :, None].astype(jnp.float32), cache
        ),
        unembed=lambda params, hidden: params["logits"][:, : hidden.shape[1]] + 1e-9 * hidden,
    )
    return system._replace(target=target, drafter=free_drafter(V))


def rest_timer(system: System, slots: int, batch: int = 1) -> GenerateTimer:
    """Returns the timer of a round without its passes: noise, rule, limits, append, commit.

    It times ``decoding.generate`` itself, with models that compute nothing.
    """
    if system.rule.needs_probs or system.rule.needs_logits:
        raise ValueError(
            f"rule {system.rule.name!r} reads draft distributions; a free draft has none"
        )
    free = _free_system(system)
    shape = (batch, system.num_draft + 1, system.target.vocab_size)
    params = {"target": {"logits": jax.random.normal(jax.random.key(0), shape)}, "draft": None}
    room = ROUNDS * (system.num_draft + 1)
    begin = max(1, min(16, slots - room - system.num_draft - 1))
    max_new_tokens = slots - begin - system.num_draft - 1
    state = start(free, params, [[1] * begin] * batch, slots, max_new_tokens)
    return GenerateTimer(free, params, [state], max_rounds=ROUNDS, unit="round")
