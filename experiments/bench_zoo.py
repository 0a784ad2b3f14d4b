"""The benchmark's second part: the zoo pair on held-out functions, acceptance as it is."""

from __future__ import annotations

import math

import numpy as np

from experiments import cli
from experiments.bench_loops import GenerateTimer, start
from experiments.bench_round import (
    PLAIN, Pair, choose_plain, plain_lines, plain_timer, round_lines, round_timers,
)  # fmt: skip
from experiments.bench_synthetic import random_model
from experiments.prompts import load_prompts
from experiments.timing import Line, interleave, spread
from spec_jax import zoo
from spec_jax.config import SpeculativeConfig
from spec_jax.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedModel, load_model

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
    """Times plain decoding and every K, then a round of the best K and its parts.

    Args:
      part: its name in the table.
      config: see configs/benchmark.py.
      bars: ``verify``, ``round``, ``predicted``, ``speedup`` and ``draft``.

    Returns:
      The lines, and what the record keeps beside them, ``best_k`` among it.
    """
    pair, prompts = load_pair(config)
    stops = pair.target.stop_tokens
    systems = {
        k: pair.system(SpeculativeConfig(num_speculative_tokens=k)) for k in config.ks
    }
    plain_system = pair.system()

    def states(system, batch):
        groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        return [
            start(system, pair.params, g, pair.slots, config.new_tokens, stops) for g in groups
        ]

    num_batches = len(config.batches)
    total = 4 + config.repeats * (3 + num_batches) + len(config.ks) + 8
    with cli.Progress(total, part) as bar:
        tried, variant, same_dtype = choose_plain(
            pair, prompts[:1], config.plain_tokens, config.repeats, bar.step
        )
        plain_states, own_states = states(plain_system, 1), states(systems[config.ks[0]], 1)
        plain = {name: plain_timer(pair, plain_states, name) for name in {variant, same_dtype}}
        zero = GenerateTimer(plain_system, pair.params, plain_states)
        bar.step("compiled plain")
        by_k = {}
        for k, system in systems.items():
            by_k[k] = GenerateTimer(system, pair.params, own_states)
            bar.step(f"compiled K={k}")
        times = interleave(plain | by_k, config.repeats, bar.step)
        best = max(by_k, key=lambda k: np.median(times[variant] / times[k]))
        timers = {"plain": plain[variant], "plain K=0": zero, "speculative": by_k[best]}
        middle = sorted(prompts, key=len)[len(prompts) // 2]
        timers |= round_timers(pair, systems[best], middle, bar.step)
        parts = interleave(timers, config.repeats, bar.step)
        batched = {}
        for batch in config.batches:
            timers = {
                "plain": plain_timer(pair, states(plain_system, batch), variant),
                "speculative": GenerateTimer(systems[best], pair.params, states(systems[best], batch)),
            }  # fmt: skip
            batched[batch] = interleave(timers, config.repeats, bar.step)

    want = plain[same_dtype].tokens
    line = lambda what, values, *args, **options: Line(part, what, spread(values), *args, **options)
    note = lambda k: (
        f"tau {by_k[k].stats.tau:.2f}, accepted {by_k[k].stats.acceptance_rate:.0%}, "
        f"{_num_equal(by_k[k].tokens, want)} of {len(want)} rows identical to plain"
    )
    lines = [
        line(
            f"standalone at its best K={best} / fastest plain loop", times[variant] / times[best],
            bar=bars.speedup, is_upper=False, note=f"over {variant}; {note(best)}",
        ),
        line("draft pass / target pass", parts["draft"] / parts["target"], bar=bars.draft),
        *round_lines(part, parts, by_k[best].stats, best, bars, variant),
        *(line(f"speed-up, K={k}", times[variant] / times[k], note=note(k)) for k in by_k),
        *(
            line(f"speed-up, batch {b}, K={best}", t["plain"] / t["speculative"])
            for b, t in batched.items()
        ),
        *(
            line(f"plain, batch {b}", 1e3 / t["plain"], "tok/s") for b, t in batched.items()
        ),
        *plain_lines(part, tried),
    ]  # fmt: skip
    if PLAIN[variant][0] != "float32":
        lines.insert(1, line(f"the same over {same_dtype}", times[same_dtype] / times[best]))
    record = {
        "target": {"name": pair.target.name, "parameters": pair.target.num_params},
        "draft": {"name": pair.draft.name, "parameters": pair.draft.num_params},
        "best_k": best, "slots": pair.slots, "prompt_tokens": [len(p) for p in prompts],
        "stats": {k: timer.stats.to_dict() for k, timer in by_k.items()},
        "identical_rows": {k: _num_equal(t.tokens, want) for k, t in by_k.items()},
        "times_ms": {str(n): v.tolist() for n, v in (times | parts | tried).items()},
    }  # fmt: skip
    if any(math.isnan(r) for r in by_k[best].stats.acceptance_by_position):
        record["warning"] = "some positions were never judged: their acceptance counts as 0"
    return lines, record


def _num_equal(ours, theirs) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))
