"""The benchmark's part "llama110m": a large shape, random weights and synthetic acceptance."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.loops import (
    ROUNDS,
    GenerateTimer,
    PlainTimer,
    read_timer,
    rest_timer,
    start,
)
from experiments.benchmarks.shapes import (
    DTYPES,
    check_slots,
    facts,
    listed,
    random_pair,
    random_prompt,
    synthetic_chain,
)
from experiments.benchmarks.table import Line, Result
from experiments.run import cli
from spec_jax.decoding import DecodeState
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.stats import Stats, predicted_speedup
from spec_jax.evaluation.bench import cast, in_dtype
from spec_jax.evaluation.passes import round_timer
from spec_jax.evaluation.timing import measure_all
from spec_jax.loading import LoadedModel


class Plain(NamedTuple):
    """A variant of the plain loop.

    Attributes:
      dtype: Of the weights.
      padding: Tokens fed in a pass, of which one counts.
      is_laid_out: Whether weights lie as the decoder lays them out for one token a pass.
    """

    dtype: str
    padding: int = 1
    is_laid_out: bool = False


PLAIN = {  # the variants among which the fastest is chosen
    "float32": Plain("float32"),
    "float32 laid out": Plain("float32", is_laid_out=True),
    "float32 padded to two rows": Plain("float32", 2, is_laid_out=True),
    "bfloat16": Plain("bfloat16"),
    "bfloat16 laid out": Plain("bfloat16", is_laid_out=True),
    "bfloat16 padded to two rows": Plain("bfloat16", 2, is_laid_out=True),
}


def plain_timer(target: LoadedModel, states: Sequence[DecodeState], variant: str) -> PlainTimer:
    """Returns the timer of a variant of ``PLAIN``."""
    dtype, padding, is_laid_out = PLAIN[variant]
    params = in_dtype(target, dtype).cpu_layout.prepare(padding if is_laid_out else None)
    return PlainTimer(target.model, params, states, dtype=dtype, padding=padding)


def generate_timer(target: LoadedModel, states: Sequence[DecodeState], dtype: str) -> GenerateTimer:
    """Returns the timer of ``generate`` at K = 0 in a dtype, in ms a token."""
    decoder = SpeculativeDecoder(in_dtype(target, dtype))
    of_dtype = [s.replace(target=cast(s.target, dtype)) for s in states]
    return GenerateTimer(decoder.system(), decoder.params(1), of_dtype)


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    names = "slots prompt_tokens new_tokens plain_tokens k repeats"
    cli.require_positive(config, names, "llama110m")
    c = config.llama110m
    need = c.prompt_tokens + max(c.new_tokens, c.plain_tokens) + c.k + 1
    check_slots(config, "llama110m", need, "output")


def _bytes_read(params) -> int:
    """The weights of a target's pass: all but the embedding, of which it takes a row."""
    matrices = {name: w for name, w in params.items() if name != "embed" or "head" not in params}
    return sum(w.nbytes for w in jax.tree.leaves(matrices))


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times plain decoding, speculative decoding, a round and the parts of the round."""
    bars, config = config.bars, config.llama110m
    target, draft = random_pair(config)
    prompt = random_prompt(target, config)
    slots = config.slots
    K = config.k
    decoder = SpeculativeDecoder(target, draft, synthetic_chain(K, config.conditional_rate))
    plain_decoder = SpeculativeDecoder(target)
    system = decoder.system()

    def begin(made, n):
        return [start(made.system(), made.params(), [prompt], slots, n)]

    states = begin(plain_decoder, config.plain_tokens)
    makers = {name: functools.partial(plain_timer, target, states, name) for name in PLAIN}
    _, tried = measure_all("llama110m, plain loops", makers, config.repeats)

    def fastest(names):
        return min(names, key=lambda name: float(np.median(tried[name])))

    fastest_in = {d: fastest([n for n, plain in PLAIN.items() if plain.dtype == d]) for d in DTYPES}
    variant = fastest(PLAIN)
    states = begin(plain_decoder, config.new_tokens)
    read = {d: _bytes_read(in_dtype(target, d).cpu_layout.prepare(1)) for d in DTYPES}
    passes = functools.partial(round_timer, target, draft, slots=slots, batch=1, iterations=ROUNDS)

    def generate(new_tokens, **options):
        return GenerateTimer(system, decoder.params(1), begin(decoder, new_tokens), **options)

    long = slots - len(prompt) - K - 1
    makers = {"speculative": lambda: generate(config.new_tokens)}
    for d in DTYPES:
        makers[f"plain {d}"] = functools.partial(plain_timer, target, states, fastest_in[d])
        makers[f"plain K=0 {d}"] = functools.partial(generate_timer, target, states, d)
        makers[f"weights {d}"] = functools.partial(read_timer, read[d])
    makers |= {  # a round and its parts, each a jitted loop; "passes" are those of a round in one
        "target": functools.partial(passes, num_draft=0, num_passes=0),
        "verify": functools.partial(passes, num_draft=K, num_passes=0),
        "passes": functools.partial(passes, num_draft=K, num_passes=K),
        "rest": functools.partial(rest_timer, system, slots),
        "round": lambda: generate(long, max_rounds=ROUNDS, unit="round"),
    }
    timers, times = measure_all("llama110m", makers, config.repeats)
    stats = timers["speculative"].stats
    times["plain"] = times[f"plain {PLAIN[variant].dtype}"]
    lines = round_lines(times, stats, K, bars, variant)
    for d in DTYPES:
        megabytes = read[d] / 1e6
        rate = megabytes / np.median(times[f"weights {d}"])
        lines.append(
            Line(
                f"plain decoding in {d} / reading the weights once",
                times[f"plain {d}"] / times[f"weights {d}"],
                bar=bars.memory,
                note=f"{fastest_in[d]}; {megabytes:.0f} MB at {rate:.0f} GB/s",
            )
        )
        lines.append(
            Line(
                f"decoding.generate at K=0 / fastest plain loop, {d}",
                times[f"plain K=0 {d}"] / times[f"plain {d}"],
                bar=bars.no_draft,
                note="what one program for everything costs where nothing is drafted",
            )
        )
    lines += [Line(f"plain loop, {name}", ms, "ms") for name, ms in tried.items()]
    return Result(
        lines,
        {
            "target": facts(target, config.target),
            "draft": facts(draft, config.draft),
            "weights": "random",
            "stats": stats.to_dict(),
            "times_ms": listed(times | tried),
        },
    )


def round_lines(
    times: Mapping[str, np.ndarray], stats: Stats, K: int, bars: ConfigDict, plain_variant: str
) -> list[Line]:
    """Returns the lines of a round.

    Args:
      times: By repeat, of a round and its parts, and of whole generations: "plain" (the fastest
        loop) and "speculative", in ms a token.
      stats: Of the speculative generation.
      K: Drafted tokens a round.
      bars: Of the benchmark.
      plain_variant: The name of the fastest plain loop.
    """
    target, verify, passes, rest, plain = (
        times[name] for name in ("target", "verify", "passes", "rest", "plain")
    )
    rates = stats.acceptance_by_position
    drafting = passes - verify
    measured = plain / times["speculative"]
    # Of a token of the fastest plain loop; the rest of a round, which is measured here, counts.
    predicted = predicted_speedup(rates, drafting / K / plain, (verify + rest) / plain)
    accepted = ", ".join(f"{rate:.2f}" for rate in rates)
    of = f"K={K}"
    return [
        Line(
            f"{of}: verify pass of {K + 1} tokens / pass of one", verify / target, bar=bars.verify
        ),
        Line(
            f"{of}: a drafted token / pass of one",
            drafting / K / target,
            bar=bars.draft,
            note="what drafting adds to a loop of verify passes",
        ),
        Line(
            f"{of}: round / sum of its parts",
            times["round"] / (passes + rest),
            bar=bars.round,
            note="its passes in a loop of their own, and the rest",
        ),
        Line(
            f"{of}: speed-up",
            measured,
            note=f"over {plain_variant}; tau {stats.tau:.2f}, accepted {accepted}",
        ),
        Line(f"{of}: predicted speed-up", predicted, note="from acceptance and the parts"),
        Line(
            f"{of}: measured / predicted", measured / predicted, bar=bars.predicted, is_upper=False
        ),
        Line(f"{of}: pass of one token", target, "ms"),
        Line(f"{of}: pass of {K + 1} tokens", verify, "ms"),
        Line(f"{of}: all passes of a round", passes, "ms"),
        Line(f"{of}: rest of a round", rest, "ms", note="noise, rule, limits, commit"),
        Line(f"{of}: round", times["round"], "ms"),
    ]
