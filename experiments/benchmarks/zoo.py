"""The benchmark's part "zoo": the zoo's pair on held-out functions, with real acceptance."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping

import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.loops import GenerateTimer, cast, start
from experiments.benchmarks.rounds import (
    PLAIN,
    Pair,
    fastest,
    plain_lines,
    plain_timer,
    round_lines,
    round_makers,
    try_plain,
)
from experiments.benchmarks.shapes import listed, random_model
from experiments.common import cli
from experiments.common.prompts import load_prompts
from experiments.common.timing import Line, Result, measure_all
from spec_jax import zoo
from spec_jax.config import SpeculativeConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.loading import LoadedModel, load_model

DTYPES = ("float32", "bfloat16")
_BUCKET = 128  # slots are a multiple of it, as in the decoder


def load(name: str, shape: ConfigDict, seed: int) -> LoadedModel:
    """Loads a model by name or path; an untrained zoo model has random weights."""
    path = zoo.path(name)
    if path is not None and not (path / "config.json").exists():
        return random_model(f"{name} (random weights: it is not trained yet)", shape, seed)
    return load_model(name)


def load_pair(config: ConfigDict) -> tuple[Pair, list[list[int]]]:
    """Returns the pair and its prompts as ids, which are random without a tokenizer."""
    target = load(config.target, config.target_shape, config.seed)
    draft = load(config.draft, config.draft_shape, config.seed + 1)
    if target.tokenizer is None:
        draw = np.random.default_rng(config.seed)
        sizes = draw.integers(1, config.max_prompt_tokens + 1, config.num_prompts)
        prompts = [draw.integers(target.model.vocab_size, size=n).tolist() for n in sizes]
    else:
        encode = SpeculativeDecoder(target).encode
        texts = [p.text for p in load_prompts(config.data, config.num_prompts, config.seed)]
        prompts = [encode(text)[-config.max_prompt_tokens :] for text in texts]
    room = max(map(len, prompts)) + config.new_tokens + max(config.ks) + 1
    return Pair(target, draft, -(-room // _BUCKET) * _BUCKET), prompts


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    c = config.zoo
    names = "num_prompts max_prompt_tokens new_tokens plain_tokens repeats"
    cli.require_positive(config, names, "zoo")
    cli.require(c.ks and min(c.ks) >= 1, config, "zoo.ks", "integers of 1 or more")
    for batch in c.batches:
        if batch < 1 or c.num_prompts % batch:
            raise ConfigError(
                f"zoo.batches holds {batch}; expected divisors of num_prompts {c.num_prompts}"
            )


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times plain decoding and every K in both dtypes, then a round of the best and its parts.

    ``best_k`` of the record is the fastest K by dtype.
    """
    bars, config = config.bars, config.zoo
    pair, prompts = load_pair(config)
    systems = {k: pair.system(SpeculativeConfig(num_speculative_tokens=k)) for k in config.ks}
    plain_system = pair.system()

    def states(system, batch):
        groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        params, stops = pair.params(None), pair.target.stop_tokens
        return [start(system, params, g, pair.slots, config.new_tokens, stops) for g in groups]

    def timer(system, num_rows, dtype, begin):
        in_dtype = lambda s: s.replace(target=cast(s.target, dtype), draft=cast(s.draft, dtype))
        return GenerateTimer(system, pair.params(num_rows, dtype), [*map(in_dtype, begin)])

    tried = try_plain("zoo", pair, prompts[:1], config.plain_tokens, config.repeats)
    variant, fastest_in = fastest(tried), {d: fastest(tried, d) for d in DTYPES}
    plain_states, own_states = states(plain_system, 1), states(systems[config.ks[0]], 1)
    plain = functools.partial(plain_timer, pair, plain_states)
    by_k, times = measure_all("zoo, every K", {
        "plain": lambda: plain(variant),
        **{
            (k, d): functools.partial(timer, systems[k], k + 1, d, own_states)
            for k, d in itertools.product(systems, DTYPES)
        },
    }, config.repeats)  # fmt: skip
    del by_k["plain"]
    gain = lambda key: float(np.median(times["plain"] / times[key]))
    best_in = {d: max(((k, d) for k in systems), key=gain) for d in DTYPES}
    best, dtype = max(best_in.values(), key=gain)

    timers, parts = measure_all("zoo, the best K", {
        **{v: functools.partial(plain, v) for v in {variant, *fastest_in.values()}},
        "plain K=0": lambda: timer(plain_system, 1, PLAIN[variant].dtype, plain_states),
        **{f"speculative {d}": functools.partial(by_k.get, key) for d, key in best_in.items()},
        **round_makers(pair, systems[best], sorted(prompts, key=len)[len(prompts) // 2], dtype),
    }, config.repeats)  # fmt: skip
    parts |= {f"plain {d}": parts[v] for d, v in fastest_in.items()} | {"plain": parts[variant]}
    parts["speculative"] = parts[f"speculative {dtype}"]
    batched = {}
    for batch in config.batches:
        rows, system = batch * (best + 1), systems[best]
        _, batched[batch] = measure_all(f"zoo, batch {batch}", {
            "plain": lambda: plain_timer(pair, states(plain_system, batch), variant),
            "speculative": lambda: timer(system, rows, dtype, states(system, batch)),
        }, config.repeats)  # fmt: skip

    # Tokens are compared within a dtype: rounding to bfloat16 moves near ties.
    want = {d: timers[v].tokens for d, v in fastest_in.items()}
    stats = {key: t.stats for key, t in by_k.items()}
    same = {
        key: sum(a == b for a, b in zip(t.tokens, want[key[1]], strict=True))
        for key, t in by_k.items()
    }
    note = lambda key: (
        f"tau {stats[key].tau:.2f}, accepted {stats[key].acceptance_rate:.0%}, "
        f"{same[key]} of {len(prompts)} rows identical to plain {key[1]}"
    )
    lines = [
        Line(
            f"standalone at its best K={best}, {dtype} / fastest plain loop",
            parts["plain"] / parts["speculative"], bar=bars.speedup, is_upper=False,
            note=f"over {variant}; {note((best, dtype))}",
        ),
        *(
            Line(
                f"the best K={key[0]} of {d} / fastest plain loop of {d}",
                parts[f"plain {d}"] / parts[f"speculative {d}"],
                note=f"over {fastest_in[d]}; {note(key)}",
            )
            for d, key in best_in.items()
        ),
        Line(
            f"draft pass / target pass, {dtype}", parts["draft"] / parts["target"], bar=bars.draft
        ),
        *round_lines(parts, stats[best, dtype], best, bars, variant, dtype),
        *(
            Line(f"speed-up, K={key[0]}, {key[1]}", times["plain"] / times[key], note=note(key))
            for key in by_k
        ),
        *(
            Line(f"speed-up, batch {b}, K={best}, {dtype}", t["plain"] / t["speculative"])
            for b, t in batched.items()
        ),
        *(Line(f"plain, batch {b}", 1e3 / t["plain"], "tok/s") for b, t in batched.items()),
        *plain_lines(tried),
    ]  # fmt: skip
    label = lambda key: key if isinstance(key, str) else f"K={key[0]}, {key[1]}"
    named = lambda values: {label(key): value for key, value in values.items()}
    record = {
        "target": {"name": pair.target.name, "parameters": pair.target.num_params},
        "draft": {"name": pair.draft.name, "parameters": pair.draft.num_params},
        "best_k": {d: k for k, d in best_in.values()}, "best_dtype": dtype, "slots": pair.slots,
        "prompt_tokens": [len(p) for p in prompts],
        "stats": named({key: counts.to_dict() for key, counts in stats.items()}),
        "identical_rows": named(same),
        "times_ms": listed(named(times | {f"parts {n}": v for n, v in parts.items()} | tried)),
    }  # fmt: skip
    if any(math.isnan(rate) for rate in stats[best, dtype].acceptance_by_position):
        record["warning"] = "some positions were never reached: their acceptance counts as 0"
    return Result(lines, record)
