"""The benchmark's second part: the zoo pair on held-out functions, acceptance as it is."""

from __future__ import annotations

import itertools
import math

import numpy as np

from experiments.benchmarks.loops import GenerateTimer, cast, start
from experiments.benchmarks.rounds import (
    PLAIN,
    Pair,
    fastest,
    plain_lines,
    plain_timer,
    round_lines,
    round_timers,
    try_plain,
)
from experiments.benchmarks.synthetic import random_model
from experiments.common.prompts import load_prompts
from experiments.common.timing import Line, interleave, spread
from spec_jax import zoo
from spec_jax.config import SpeculativeConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedModel, load_model
from spec_jax.progress import Progress

DTYPES = ("float32", "bfloat16")
_BUCKET = 128  # slots are a multiple of it, as the decoder's are


def load(name: str, shape, seed: int) -> LoadedModel:
    """A model by name or path; a zoo model that has not been trained gets random weights."""
    path = zoo.path(name)
    if path is not None and not (path / "config.json").exists():
        return random_model(f"{name} (random weights: it is not trained yet)", shape, seed)
    return load_model(name)


def load_pair(config) -> tuple[Pair, list[list[int]]]:
    """The pair and its prompts as ids; random ids where the target has no tokenizer."""
    target = load(config.target, config.target_shape, config.seed)
    draft = load(config.draft, config.draft_shape, config.seed + 1)
    if target.tokenizer is None:
        draw = np.random.default_rng(config.seed)
        sizes = draw.integers(1, config.max_prompt_tokens + 1, config.num_prompts)
        prompts = [draw.integers(target.model.vocab_size, size=n).tolist() for n in sizes]
    else:
        encode = SpeculativeDecoder(target).encode
        texts = [p.text for p in load_prompts("", config.num_prompts, config.seed)]
        prompts = [encode(text)[-config.max_prompt_tokens :] for text in texts]
    room = max(map(len, prompts)) + config.new_tokens + max(config.ks) + 1
    return Pair(target, draft, -(-room // _BUCKET) * _BUCKET), prompts


def measure(part: str, config, bars) -> tuple[list[Line], dict]:
    """Times plain decoding and every K in both dtypes, then a round of the best and its parts.

    Args:
      part: its name in the table.
      config: see configs/benchmark.py.
      bars: ``verify``, ``round``, ``predicted``, ``speedup`` and ``draft``.

    Returns:
      The lines, and what the record keeps beside them, ``best_k`` by dtype among it.
    """
    pair, prompts = load_pair(config)
    stops = pair.target.stop_tokens
    systems = {
        k: pair.system(SpeculativeConfig(num_speculative_tokens=k)) for k in config.ks
    }
    plain_system = pair.system()

    def states(system, batch):
        groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        params = pair.params(None)
        return [start(system, params, g, pair.slots, config.new_tokens, stops) for g in groups]

    total = 13 + config.repeats * (3 + len(config.batches)) + len(DTYPES) * len(config.ks)
    with Progress(total, part) as bar:
        tried = try_plain(pair, prompts[:1], config.plain_tokens, config.repeats, bar.step)
        variants = {"plain": fastest(tried)}
        variants |= {f"plain {d}": fastest(tried, d) for d in DTYPES}
        plain_states, own_states = states(plain_system, 1), states(systems[config.ks[0]], 1)
        by_variant = {v: plain_timer(pair, plain_states, v) for v in {*variants.values()}}
        bar.step("compiled plain")
        timer = lambda system, num_rows, dtype, begin: GenerateTimer(
            system, pair.params(num_rows, dtype), _cached_in(begin, dtype)
        )
        zero = timer(plain_system, 1, PLAIN[variants["plain"]].dtype, plain_states)
        bar.step("compiled plain K=0")
        by_k = {}
        for k, dtype in itertools.product(systems, DTYPES):
            by_k[k, dtype] = timer(systems[k], k + 1, dtype, own_states)
            bar.step(f"compiled K={k}, {dtype}")
        times = interleave(
            {"plain": by_variant[variants["plain"]]} | by_k, config.repeats, bar.step
        )
        gain = lambda key: float(np.median(times["plain"] / times[key]))
        best_in = {d: max(((k, d) for k in systems), key=gain) for d in DTYPES}
        best, dtype = max(best_in.values(), key=gain)

        timers = by_variant | {"plain K=0": zero}
        timers |= {f"speculative {d}": by_k[key] for d, key in best_in.items()}
        middle = sorted(prompts, key=len)[len(prompts) // 2]
        timers |= round_timers(pair, systems[best], middle, bar.step, dtype)
        parts = interleave(timers, config.repeats, bar.step)
        parts |= {name: parts[variant] for name, variant in variants.items()}
        parts["speculative"] = parts[f"speculative {dtype}"]
        batched = {}
        for batch in config.batches:
            pairs = {
                "plain": plain_timer(pair, states(plain_system, batch), variants["plain"]),
                "speculative": timer(
                    systems[best], batch * (best + 1), dtype, states(systems[best], batch)
                ),
            }
            batched[batch] = interleave(pairs, config.repeats, bar.step)

    # Tokens are compared within a dtype: rounding to bfloat16 moves near ties.
    want = {d: by_variant[variants[f"plain {d}"]].tokens for d in DTYPES}
    line = lambda what, values, *args, **options: Line(part, what, spread(values), *args, **options)
    note = lambda key: (
        f"tau {by_k[key].stats.tau:.2f}, accepted {by_k[key].stats.acceptance_rate:.0%}, "
        f"{_num_equal(by_k[key].tokens, want[key[1]])} of {len(prompts)} rows identical to plain "
        f"{key[1]}"
    )
    lines = [
        line(
            f"standalone at its best K={best}, {dtype} / fastest plain loop",
            parts["plain"] / parts["speculative"], bar=bars.speedup, is_upper=False,
            note=f"over {variants['plain']}; {note((best, dtype))}",
        ),
        *(
            line(
                f"the best K={key[0]} of {d} / fastest plain loop of {d}",
                parts[f"plain {d}"] / parts[f"speculative {d}"],
                note=f"over {variants[f'plain {d}']}; {note(key)}",
            )
            for d, key in best_in.items()
        ),
        line(
            f"draft pass / target pass, {dtype}", parts["draft"] / parts["target"], bar=bars.draft
        ),
        *round_lines(part, parts, by_k[best, dtype].stats, best, bars, variants["plain"], dtype),
        *(
            line(f"speed-up, K={key[0]}, {key[1]}", times["plain"] / times[key], note=note(key))
            for key in by_k
        ),
        *(
            line(f"speed-up, batch {b}, K={best}, {dtype}", t["plain"] / t["speculative"])
            for b, t in batched.items()
        ),
        *(
            line(f"plain, batch {b}", 1e3 / t["plain"], "tok/s") for b, t in batched.items()
        ),
        *plain_lines(part, tried),
    ]  # fmt: skip
    all_times = times | {f"parts {n}": v for n, v in parts.items()} | tried
    label = lambda key: key if isinstance(key, str) else f"K={key[0]}, {key[1]}"
    named = lambda values: {label(key): value for key, value in values.items()}
    record = {
        "target": {"name": pair.target.name, "parameters": pair.target.num_params},
        "draft": {"name": pair.draft.name, "parameters": pair.draft.num_params},
        "best_k": {d: k for k, d in best_in.values()}, "best_dtype": dtype, "slots": pair.slots,
        "prompt_tokens": [len(p) for p in prompts],
        "stats": named({key: timer.stats.to_dict() for key, timer in by_k.items()}),
        "identical_rows": named({
            key: _num_equal(timer.tokens, want[key[1]]) for key, timer in by_k.items()
        }),
        "times_ms": named({n: ms.tolist() for n, ms in all_times.items()}),
    }  # fmt: skip
    if any(math.isnan(r) for r in by_k[best, dtype].stats.acceptance_by_position):
        record["warning"] = "some positions were never judged: their acceptance counts as 0"
    return lines, record


def _cached_in(states, dtype: str) -> list:
    """The same states with their caches in another dtype."""
    return [s.replace(target=cast(s.target, dtype), draft=cast(s.draft, dtype)) for s in states]


def _num_equal(ours, theirs) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))
