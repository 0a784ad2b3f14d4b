"""The benchmark's part "zoo": the zoo's draft and head, with real acceptance, at every K."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.loops import GenerateTimer, cast, start
from experiments.benchmarks.rounds import (
    PLAIN,
    Pair,
    fastest,
    in_dtype,
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
from spec_jax.loading import LoadedHead, LoadedModel, load_draft, load_model

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


class Cell(NamedTuple):
    """What is timed: a way to draft, its K and the dtype of all weights."""

    method: str
    k: int
    dtype: str

    def __str__(self) -> str:
        name = "" if self.method == "standalone" else f"{self.method}, "
        return f"{name}K={self.k}, {self.dtype}"


def load_drafts(pair: Pair, config: ConfigDict) -> dict[str, LoadedModel | LoadedHead]:
    """Returns what drafts, by method: the draft model, and the head if the config names one."""
    drafts: dict[str, LoadedModel | LoadedHead] = {"standalone": pair.draft}
    if config.head:
        head = load_draft(config.head, pair.target, "float32")
        drafts[head.method if isinstance(head, LoadedHead) else "standalone"] = head
    return drafts


def advice(
    plain: np.ndarray, times: Mapping[Cell, np.ndarray], taus: Mapping[Cell, float]
) -> list[str]:
    """Returns what to decode with on this machine, and which Ks are slower than plain decoding.

    Args:
      plain: Milliseconds a token of the fastest plain loop, by repeat.
      times: The same of each cell.
      taus: Tokens a target pass of each cell.
    """
    gain = {cell: float(np.median(plain / ms)) for cell, ms in times.items()}
    best = max(gain, key=gain.__getitem__)
    fastest = f"{best.method} with K={best.k} in {best.dtype}"
    if gain[best] <= 1:
        fastest = f"plain decoding ({fastest} reaches {gain[best]:.2f} x)"
    else:
        fastest += f", {gain[best]:.2f} x the fastest plain loop"
    notes = [f"recommended on this machine, for text like these prompts: {fastest}"]
    slow = [
        str(cell)
        for cell in times
        if gain[cell] < 1 and taus[cell] > taus.get(cell._replace(k=cell.k - 1), 1.0)
    ]
    if slow:
        notes.append(f"slower than plain decoding although tau still rises: {'; '.join(slow)}")
    return notes


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times plain decoding and every K of every draft in both dtypes, then a round and its parts.

    The round is that of the draft model's best K. ``best_k`` of the record is its fastest K by
    dtype.
    """
    bars, config = config.bars, config.zoo
    pair, prompts = load_pair(config)
    drafts = load_drafts(pair, config)

    @functools.cache
    def decoder(cell: Cell) -> SpeculativeDecoder:
        target, draft = (
            model if cell.dtype == "float32" else in_dtype(model, cell.dtype)
            for model in (pair.target, drafts[cell.method])
        )
        return SpeculativeDecoder(target, draft, SpeculativeConfig(cell.method, cell.k))

    systems = {k: pair.system(SpeculativeConfig(num_speculative_tokens=k)) for k in config.ks}
    plain_system = pair.system()

    def states(system, batch, params):
        groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        stops = pair.target.stop_tokens
        return [start(system, params, g, pair.slots, config.new_tokens, stops) for g in groups]

    def timer(system, params, dtype, begin):
        to = lambda s: s.replace(target=cast(s.target, dtype), draft=cast(s.draft, dtype))
        return GenerateTimer(system, params, [*map(to, begin)])

    @functools.cache
    def begun(method: str):
        first = decoder(Cell(method, config.ks[0], "float32"))
        return states(first.system(), 1, first.params())

    def cell_timer(cell: Cell):
        made = decoder(cell)
        return timer(made.system(), made.params(1), cell.dtype, begun(cell.method))

    tried = try_plain("zoo", pair, prompts[:1], config.plain_tokens, config.repeats)
    variant, fastest_in = fastest(tried), {d: fastest(tried, d) for d in DTYPES}
    plain_states = states(plain_system, 1, pair.params(None))
    plain = functools.partial(plain_timer, pair, plain_states)
    cells = [Cell(*key) for key in itertools.product(drafts, config.ks, DTYPES)]
    by_cell, times = measure_all("zoo, every K", {
        **{f"plain {d}": functools.partial(plain, v) for d, v in fastest_in.items()},
        **{cell: functools.partial(cell_timer, cell) for cell in cells},
    }, config.repeats)  # fmt: skip
    plain_of = {d: times.pop(f"plain {d}") for d in DTYPES}
    by_cell = {cell: by_cell[cell] for cell in cells}
    plain_ms = plain_of[PLAIN[variant].dtype]
    gain = lambda cell: float(np.median(plain_ms / times[cell]))
    own = [cell for cell in cells if cell.method == "standalone"]
    best_in = {d: max((c for c in own if c.dtype == d), key=gain) for d in DTYPES}
    chosen = max(best_in.values(), key=gain)
    best, dtype = chosen.k, chosen.dtype

    timers, parts = measure_all("zoo, the best K", {
        **{v: functools.partial(plain, v) for v in {variant, *fastest_in.values()}},
        "plain K=0": lambda: timer(
            plain_system, pair.params(1, PLAIN[variant].dtype), PLAIN[variant].dtype, plain_states
        ),
        **{f"speculative {d}": functools.partial(by_cell.get, c) for d, c in best_in.items()},
        **round_makers(pair, systems[best], sorted(prompts, key=len)[len(prompts) // 2], dtype),
    }, config.repeats)  # fmt: skip
    parts |= {f"plain {d}": parts[v] for d, v in fastest_in.items()} | {"plain": parts[variant]}
    parts["speculative"] = parts[f"speculative {dtype}"]
    batched = {}
    for batch in config.batches:
        rows, system, loose = batch * (best + 1), systems[best], pair.params(None)
        _, batched[batch] = measure_all(f"zoo, batch {batch}", {
            "plain": lambda: plain_timer(pair, states(plain_system, batch, loose), variant),
            "speculative": lambda: timer(
                system, pair.params(rows, dtype), dtype, states(system, batch, loose)
            ),
        }, config.repeats)  # fmt: skip

    # Tokens are compared within a dtype: rounding to bfloat16 moves near ties.
    want = {d: timers[v].tokens for d, v in fastest_in.items()}
    stats = {cell: t.stats for cell, t in by_cell.items()}
    same = {
        cell: sum(a == b for a, b in zip(t.tokens, want[cell.dtype], strict=True))
        for cell, t in by_cell.items()
    }
    note = lambda cell: (
        f"tau {stats[cell].tau:.2f}, accepted {stats[cell].acceptance_rate:.0%}, "
        f"{same[cell]} of {len(prompts)} rows identical to plain {cell.dtype}"
    )
    lines = [
        Line(
            f"standalone at its best K={best}, {dtype} / fastest plain loop",
            parts["plain"] / parts["speculative"], bar=bars.speedup, is_upper=False,
            note=f"over {variant}; {note(chosen)}",
        ),
        *(
            Line(
                f"the best K={cell.k} of {d} / fastest plain loop of {d}",
                parts[f"plain {d}"] / parts[f"speculative {d}"],
                note=f"over {fastest_in[d]}; {note(cell)}",
            )
            for d, cell in best_in.items()
        ),
        Line(
            f"draft pass / target pass, {dtype}", parts["draft"] / parts["target"], bar=bars.draft
        ),
        *round_lines(parts, stats[chosen], best, bars, variant, dtype),
        *(
            Line(f"speed-up, {cell}", plain_of[cell.dtype] / times[cell], note=note(cell))
            for cell in cells
        ),
        *(
            Line(f"speed-up, batch {b}, K={best}, {dtype}", t["plain"] / t["speculative"])
            for b, t in batched.items()
        ),
        *(Line(f"plain, batch {b}", 1e3 / t["plain"], "tok/s") for b, t in batched.items()),
        *plain_lines(tried),
    ]  # fmt: skip
    named = lambda values: {str(key): value for key, value in values.items()}
    plains = {"plain": plain_ms, **{f"plain {d}": ms for d, ms in plain_of.items()}}
    others = {f"parts {name}": ms for name, ms in parts.items()} | tried
    record = {
        "target": {"name": pair.target.name, "parameters": pair.target.num_params},
        "draft": {"name": pair.draft.name, "parameters": pair.draft.num_params},
        "best_k": {d: cell.k for d, cell in best_in.items()}, "best_dtype": dtype,
        "slots": pair.slots,
        "prompt_tokens": [len(p) for p in prompts],
        "stats": named({key: counts.to_dict() for key, counts in stats.items()}),
        "identical_rows": named(same),
        "times_ms": listed(named(times | plains | others)),
    }  # fmt: skip
    if any(math.isnan(rate) for rate in stats[chosen].acceptance_by_position):
        record["warning"] = "some positions were never reached: their acceptance counts as 0"
    return Result(lines, record, advice(plain_ms, times, {c: s.tau for c, s in stats.items()}))
