"""The benchmark's part "llama110m": a large shape, random weights and synthetic acceptance."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.loops import GenerateTimer, read_timer, start
from experiments.benchmarks.rounds import (
    DTYPES,
    PLAIN,
    Pair,
    Rounds,
    fastest,
    generate_timer,
    plain_lines,
    plain_timer,
    round_lines,
    try_plain,
)
from experiments.benchmarks.shapes import (
    check_slots,
    facts,
    listed,
    random_pair,
    random_prompt,
    synthetic_chain,
)
from experiments.benchmarks.table import Line, Result
from experiments.run import cli
from spec_jax.evaluation.timing import measure_all


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
    pair, slots = Pair(target, draft, config.slots), config.slots
    prompt = random_prompt(target, config)
    chain = synthetic_chain(config.k, config.conditional_rate)
    rounds = Rounds.of(target, draft, chain, prompt, slots)
    tried = try_plain("llama110m", pair, [prompt], config.plain_tokens, config.repeats)
    variant, plain_system = fastest(tried), pair.system()
    fastest_in = {dtype: fastest(tried, dtype) for dtype in DTYPES}
    states, plain_states = (
        [start(s, pair.params(None), [prompt], slots, config.new_tokens)]
        for s in (rounds.system, plain_system)
    )
    num_bytes = {dtype: _bytes_read(pair.params(1, dtype)["target"]) for dtype in DTYPES}
    timers, times = measure_all(
        "llama110m",
        {
            **{
                f"plain {d}": functools.partial(plain_timer, pair, plain_states, v)
                for d, v in fastest_in.items()
            },
            **{
                f"plain K=0 {d}": functools.partial(
                    generate_timer, plain_system, pair.params(1, d), plain_states, d
                )
                for d in DTYPES
            },
            **{f"weights {d}": functools.partial(read_timer, n) for d, n in num_bytes.items()},
            "speculative": lambda: GenerateTimer(rounds.system, rounds.params, states),
            **rounds.makers(),
        },
        config.repeats,
    )
    stats, dtype = timers["speculative"].stats, PLAIN[variant].dtype
    times["plain"] = times[f"plain {dtype}"]
    lines = [
        *round_lines(times, stats, rounds, bars, variant, verify_bar=bars.verify),
        *(
            Line(
                f"plain decoding in {d} / reading the weights once",
                times[f"plain {d}"] / times[f"weights {d}"],
                bar=bars.memory,
                note=f"{fastest_in[d]}; {num_bytes[d] / 1e6:.0f} MB at "
                f"{num_bytes[d] / 1e6 / np.median(times[f'weights {d}']):.0f} GB/s",
            )
            for d in DTYPES
        ),
        *plain_lines(
            tried, {d: times[f"plain K=0 {d}"] / times[f"plain {d}"] for d in DTYPES}, bars
        ),
    ]
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
