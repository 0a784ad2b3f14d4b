"""The benchmark's part "llama110m": a large shape, random weights and synthetic acceptance.

Timers are functions without arguments that run once and return milliseconds; compilation and
prefill lie outside of what they time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.shapes import DTYPES, facts, random_model
from experiments.benchmarks.table import Line, Result, listed
from experiments.run import cli
from spec_jax import decoding
from spec_jax.config import SamplerConfig, SpeculativeConfig
from spec_jax.contracts import Model
from spec_jax.decoding import DecodeState
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.request import make_request
from spec_jax.engine.stats import row_stats
from spec_jax.errors import ConfigError
from spec_jax.evaluation.bench import in_dtype
from spec_jax.evaluation.passes import round_timer
from spec_jax.evaluation.timing import Timer, loop_timer, measure_all
from spec_jax.sampling import argmax, make_sampler

ROUNDS = 64  # in one call, so that the dispatch does not count
_NO_LIMIT = 2**31 - 1


def start(
    decoder: SpeculativeDecoder,
    prompt: Sequence[int],
    slots: int,
    max_new_tokens: int,
    stop_tokens: Sequence[int] = (),
) -> DecodeState:
    """Prefills a prompt for greedy decoding.

    Args:
      decoder: Target and drafter.
      prompt: The prompt as ids.
      slots: S, enough for prompt, output and the last window.
      max_new_tokens: New tokens.
      stop_tokens: The tokens that end the output.
    """
    system = decoder.system()
    sampler = make_sampler(SamplerConfig(), 1, system.target.vocab_size)
    *arrays, slots, _ = make_request(
        system, [prompt], max_new_tokens, sampler, sampler, stop_tokens=stop_tokens, slots=slots
    )
    prefill = functools.partial(decoding.prefill, system=system, slots=slots)
    return jax.block_until_ready(prefill(decoder.params(1), *arrays))


class GenerateTimer:
    """Times ``decoding.generate`` from a prefilled prompt to its end, in milliseconds a token.

    With ``max_rounds`` it ends after so many rounds, and the time is that of a round.

    Attributes:
      tokens: The output of the last run, with prefill's token.
      stats: Its counts.
    """

    def __init__(self, decoder: SpeculativeDecoder, state: DecodeState, max_rounds: int = 0):
        self._decoder = decoder
        self._state = state  # it is copied, not consumed
        self._max_rounds = max_rounds
        self()

    def __call__(self) -> float:
        system = self._decoder.system()
        carry = jax.block_until_ready(jax.tree.map(jnp.copy, self._state))
        rounds = jnp.int32(self._max_rounds or _NO_LIMIT)
        begin = time.perf_counter()
        final, chunk = decoding.generate(
            self._decoder.params(1), carry, jnp.zeros_like(carry.finish), rounds, system=system
        )
        jax.block_until_ready(chunk)
        seconds = time.perf_counter() - begin
        new = slice(int(final.prompt_length[0]), int(chunk.total[0]))
        tokens, kind, offered = (
            np.asarray(x)[0, new] for x in (final.tokens, final.kind, final.offered)
        )
        self.tokens = tokens.tolist()
        self.stats = row_stats(kind, offered, system.depth, finish=int(final.finish[0]))
        emitted = self.stats.emitted - self.stats.first
        return seconds * 1e3 / max(int(chunk.rounds) if self._max_rounds else emitted, 1)


@functools.partial(jax.jit, static_argnames="model", donate_argnames=("tokens", "cache"))
def _plain(params, tokens, cache, total, limit, stop_tokens, *, model: Model):
    """Decodes one row greedily, one token per pass, without counts and statistics."""

    def is_done(last, total):
        return (last == stop_tokens).any() | (total >= limit).all()

    def step(carry):
        tokens, cache, last, total = carry
        output = model.forward(params, last[:, None], cache)
        last = argmax(model.unembed(params, output.hidden)[:, 0])
        tokens = tokens.at[0, total].set(last)
        return tokens, output.cache.commit(jnp.ones_like(total)), last, total + 1

    carry = (tokens, cache, tokens[0, total - 1], total)
    tokens, cache, _, total = jax.lax.while_loop(lambda carry: ~is_done(*carry[2:]), step, carry)
    return tokens, total, cache


class PlainTimer:
    """Times a loop of passes, written for the purpose, in milliseconds per token.

    Attributes:
      tokens: See ``GenerateTimer``.
    """

    def __init__(self, model: Model, params, state: DecodeState):
        self._model = model
        self._params = params
        self._state = state
        self()

    def __call__(self) -> float:
        s = self._state
        first = s.prompt_length + 1
        carry = jax.block_until_ready(jax.tree.map(jnp.copy, (s.tokens, s.target, first)))
        begin = time.perf_counter()
        out, end, _ = jax.block_until_ready(
            _plain(self._params, *carry, s.limit, s.stop_tokens, model=self._model)
        )
        seconds = time.perf_counter() - begin
        self.tokens = np.asarray(out)[0, int(first[0]) - 1 : int(end[0])].tolist()
        return seconds * 1e3 / max(int(end[0] - first[0]), 1)


def read_timer(num_bytes: int, calls: int = 4) -> Timer:
    """Returns the timer of reading that many bytes of memory once, in order, in milliseconds."""
    x = jnp.ones((-(-num_bytes // (4 * 4096)), 4096), jnp.float32)
    read = jax.jit(lambda x: x.max(axis=1))
    return loop_timer(lambda _: [jax.block_until_ready(read(x)) for _ in range(calls)], None, calls)


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    cli.require_positive(config, "slots prompt_tokens new_tokens k repeats", "llama110m")
    c = config.llama110m
    need = c.prompt_tokens + c.new_tokens + c.k + 1
    if need > c.slots:
        raise ConfigError(f"llama110m.slots is {c.slots}; prompt and output need {need}")


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times plain decoding, speculative decoding, a round and the passes of the round."""
    bars, config = config.bars, config.llama110m
    target = random_model("target", config.target, config.seed)
    draft = random_model("draft", config.draft, config.seed + 1)
    draw = np.random.default_rng(config.seed)
    prompt = draw.integers(target.model.vocab_size, size=config.prompt_tokens).tolist()
    K = config.k
    chain = SpeculativeConfig(
        num_speculative_tokens=K,
        rejection_sampling_strategy="synthetic",
        synthetic_conditional_rates=(config.conditional_rate,) * K,
    )
    decoder = SpeculativeDecoder(target, draft, chain)
    plain = {d: SpeculativeDecoder(in_dtype(target, d)) for d in DTYPES}
    passes = functools.partial(
        round_timer, target, draft, slots=config.slots, batch=1, iterations=ROUNDS
    )
    longest = config.slots - len(prompt) - K - 1

    def generate(decoder, new_tokens=config.new_tokens, max_rounds=0):
        state = start(decoder, prompt, config.slots, new_tokens)
        return lambda: GenerateTimer(decoder, state, max_rounds)

    def plain_loop(decoder):
        state = start(decoder, prompt, config.slots, config.new_tokens)
        return lambda: PlainTimer(target.model, decoder.params(1)["target"], state)

    makers = {"speculative": generate(decoder)}
    read = {}
    for d in DTYPES:
        params = plain[d].params(1)["target"]
        # All but the embedding, of which a pass takes a row.
        weights = {n: w for n, w in params.items() if n != "embed" or "head" not in params}
        read[d] = sum(w.nbytes for w in jax.tree.leaves(weights))
        makers[f"plain {d}"] = plain_loop(plain[d])
        makers[f"plain K=0 {d}"] = generate(plain[d])
        makers[f"weights {d}"] = functools.partial(read_timer, read[d])
    makers |= {  # a round and its passes, each a jitted loop; "passes" are those of a round in one
        "target": functools.partial(passes, num_draft=0, num_passes=0),
        "verify": functools.partial(passes, num_draft=K, num_passes=0),
        "passes": functools.partial(passes, num_draft=K, num_passes=K),
        "round": generate(decoder, longest, ROUNDS),
    }
    timers, times = measure_all("llama110m", makers, config.repeats)
    stats = timers["speculative"].stats
    fastest = min(DTYPES, key=lambda d: float(np.median(times[f"plain {d}"])))
    accepted = ", ".join(f"{rate:.2f}" for rate in stats.acceptance_by_position)
    of = f"K={K}"
    lines = [
        Line(
            f"{of}: verify pass of {K + 1} tokens / pass of one",
            times["verify"] / times["target"],
            bar=bars.verify,
        ),
        Line(
            f"{of}: a drafted token / pass of one",
            (times["passes"] - times["verify"]) / K / times["target"],
            bar=bars.draft,
            note="what drafting adds to a loop of verify passes",
        ),
        Line(
            f"{of}: round / its passes in a loop of their own",
            times["round"] / times["passes"],
            bar=bars.round,
        ),
        Line(
            f"{of}: speed-up",
            times[f"plain {fastest}"] / times["speculative"],
            note=f"over the plain loop in {fastest}; tau {stats.tau:.2f}, accepted {accepted}",
        ),
    ]
    lines += [
        Line(f"{of}: {what}", times[name], "ms")
        for name, what in {
            "target": "pass of one token",
            "verify": f"pass of {K + 1} tokens",
            "passes": "all passes of a round",
            "round": "round",
        }.items()
    ]
    for d in DTYPES:
        rate = read[d] / 1e6 / np.median(times[f"weights {d}"])
        lines += [
            Line(
                f"plain decoding in {d} / reading the weights once",
                times[f"plain {d}"] / times[f"weights {d}"],
                bar=bars.memory,
                note=f"{read[d] / 1e6:.0f} MB at {rate:.0f} GB/s",
            ),
            Line(
                f"decoding.generate at K=0 / a plain loop, {d}",
                times[f"plain K=0 {d}"] / times[f"plain {d}"],
                bar=bars.no_draft,
                note="what one program for everything costs where nothing is drafted",
            ),
            Line(f"plain loop, {d}", times[f"plain {d}"], "ms"),
        ]
    return Result(
        lines,
        {
            "target": facts(target, config.target),
            "draft": facts(draft, config.draft),
            "weights": "random",
            "stats": stats.to_dict(),
            "times_ms": listed(times),
        },
    )
