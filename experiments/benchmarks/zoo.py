"""The benchmark's part "zoo": the zoo's draft and head, with real acceptance, at every K."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.loops import GenerateTimer, PlainTimer, start
from experiments.benchmarks.rounds import (
    DTYPES,
    Pair,
    Rounds,
    fastest,
    generate_timer,
    in_dtype,
    plain_lines,
    plain_timer,
    round_lines,
    try_plain,
)
from experiments.benchmarks.shapes import listed, random_model
from experiments.benchmarks.table import Line, Result
from experiments.run import cli
from spec_jax import zoo
from spec_jax.config import SpeculativeConfig
from spec_jax.data import questions, sources
from spec_jax.decoding import DecodeState
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.request import whole_slots
from spec_jax.errors import ConfigError
from spec_jax.evaluation.prompts import cut_note, fit
from spec_jax.evaluation.timing import measure_all
from spec_jax.loading import LoadedHead, LoadedModel, load_draft, load_model


def load(name: str, shape: ConfigDict, seed: int) -> LoadedModel:
    """Loads a model by name or path; an untrained zoo model has random weights."""
    path = zoo.path(name)
    if path is not None and not (path / "config.json").exists():
        return random_model(f"{name} (random weights: it is not trained yet)", shape, seed)
    return load_model(name)


class ZooPrompts(NamedTuple):
    """What is decoded.

    Attributes:
      ids: The prompts as ids.
      notes: Rows that were left out, and prompts that were cut.
    """

    ids: list[list[int]]
    notes: list[str]

    @classmethod
    def of(
        cls, config: ConfigDict, models: Sequence[LoadedModel | LoadedHead], n: int
    ) -> ZooPrompts:
        """Returns ``n`` prompts as ``experiments.decode`` has them; random ids without a tokenizer.

        Args:
          config: The section "zoo".
          models: The target, then the drafts.
          n: The number of prompts.

        Raises:
          ConfigError: Too few prompts, or no room for one.
        """
        target = models[0]
        if target.tokenizer is None:
            draw = np.random.default_rng(config.seed)
            sizes = draw.integers(1, config.max_prompt_tokens + 1, n)
            return cls([draw.integers(target.model.vocab_size, size=m).tolist() for m in sizes], [])
        found, _, notes = questions.load(config.data, n, seed=config.seed)
        if len(found) < n:  # batches divide it
            raise ConfigError(f"zoo.num_prompts is {n}: {'; '.join(notes)}")
        ids, num_cut = fit(found, models, config.new_tokens, config.max_prompt_tokens)
        return cls(ids, [*notes, *cut_note(num_cut, ids)])


def load_pair(config: ConfigDict) -> tuple[Pair, ZooPrompts]:
    """Returns the pair of the section "zoo", and its prompts."""
    target = load(config.target, config.target_shape, config.seed)
    draft = load(config.draft, config.draft_shape, config.seed + 1)
    prompts = ZooPrompts.of(config, [target, draft], config.num_prompts)
    room = max(map(len, prompts.ids)) + config.new_tokens + max(config.ks) + 1
    return Pair(target, draft, whole_slots(room)), prompts


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    c = config.zoo
    names = "num_prompts max_prompt_tokens new_tokens plain_tokens repeats"
    cli.require_positive(config, names, "zoo")
    cli.require(c.ks and min(c.ks) >= 1, config, "zoo.ks", "integers of 1 or more")
    sources.check(c.data)
    for batch in c.batches:
        if batch < 1 or c.num_prompts % batch:
            raise ConfigError(
                f"zoo.batches holds {batch}; expected divisors of num_prompts {c.num_prompts}"
            )


class ZooCell(NamedTuple):
    """What is timed: a way to draft, its K and the dtype of all weights."""

    method: str
    k: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.method}, K={self.k}, {self.dtype}"


def with_head(
    target: LoadedModel, draft: LoadedModel, name: str
) -> dict[str, LoadedModel | LoadedHead]:
    """Returns what drafts, by method: the draft model, and the head unless its name is empty."""
    drafts: dict[str, LoadedModel | LoadedHead] = {"standalone": draft}
    if name:
        head = load_draft(name, target, "float32")
        drafts[head.method] = head
    return drafts


def advice(
    best: ZooCell, gain: float, own: Mapping[ZooCell, np.ndarray], taus: Mapping[ZooCell, float]
) -> list[str]:
    """Returns what to decode with on this machine, and which Ks are slower than plain decoding.

    Args:
      best: The cell that was the fastest of all.
      gain: Its speed-up over the fastest plain loop of all, measured once more: the fastest of
        many is in part the luckiest.
      own: The speed-ups of all cells over plain decoding in their dtype, by repeat.
      taus: Tokens a target pass of each cell.
    """
    text = f"{best.method} with K={best.k} in {best.dtype}"
    if gain <= 1:
        text = f"plain decoding ({text} reaches {gain:.2f} x)"
    else:
        text += f", {gain:.2f} x the fastest plain loop"
    notes = [f"recommended on this machine, for text like these prompts: {text}"]

    def before(cell: ZooCell) -> float:
        """Tau at the next smaller K that was measured; 1 of plain decoding."""
        smaller = [c for c in taus if c._replace(k=cell.k) == cell and c.k < cell.k]
        return taus[max(smaller, key=lambda c: c.k)] if smaller else 1.0

    slow = [
        str(cell)
        for cell, values in own.items()
        if np.median(values) < 1 and taus[cell] > before(cell)
    ]
    if slow:
        notes.append(f"slower than plain decoding although tau still rises: {'; '.join(slow)}")
    return notes


class Timers:
    """Makes timers of whole generations of the prompts.

    Attributes:
      pair: The target, its draft, and the slots of all caches.
      prompts: The prompts as ids.
      notes: What was left out of them.
      drafts: What drafts, by method.
      new_tokens: New tokens of every row.
    """

    def __init__(self, config: ConfigDict):
        """Loads what the config names."""
        self.pair, (self.prompts, self.notes) = load_pair(config)
        self.drafts = with_head(self.pair.target, self.pair.draft, config.head)
        self.new_tokens = config.new_tokens
        # One generation of a method begins where another does: K and dtype do not matter yet.
        self._begun = functools.cache(self._begin)
        self._decoder = functools.cache(self._make_decoder)
        self._in_dtype = functools.cache(self._make_in_dtype)  # whose layouts are made once

    def _make_in_dtype(self, method, dtype):
        """Returns what drafts, its weights in a dtype; None: the target."""
        return in_dtype(self.pair.target if method is None else self.drafts[method], dtype)

    def _make_decoder(self, cell, dtype="float32"):
        """Returns what decodes a cell; None: plain decoding in a dtype."""
        target = self._in_dtype(None, cell.dtype if cell else dtype)
        if cell is None:
            return SpeculativeDecoder(target)
        draft = self._in_dtype(cell.method, cell.dtype)
        return SpeculativeDecoder(target, draft, SpeculativeConfig(cell.method, cell.k))

    def _begin(self, method: str | None, batch: int) -> list[DecodeState]:
        made = self._decoder(ZooCell(method, 1, "float32") if method else None)
        groups = [self.prompts[i : i + batch] for i in range(0, len(self.prompts), batch)]
        stops, slots, size = self.pair.target.stop_tokens, self.pair.slots, self.new_tokens
        return [start(made.system(), made.params(), g, slots, size, stops) for g in groups]

    def plain(self, variant: str, batch: int = 1) -> PlainTimer:
        """Returns the timer of a variant of ``PLAIN``."""
        return plain_timer(self.pair, self._begun(None, batch), variant)

    def generate(
        self, cell: ZooCell | None, batch: int = 1, dtype: str = "float32"
    ) -> GenerateTimer:
        """Returns the timer of a cell; None: of ``generate`` at K = 0 in a dtype."""
        made = self._decoder(cell) if cell else self._decoder(None, dtype)
        begun = self._begun(cell.method if cell else None, batch)
        return generate_timer(
            made.system(), made.params(batch), begun, cell.dtype if cell else dtype
        )


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times plain decoding and every K of every draft in both dtypes, then rounds and their parts.

    Every K has turns of its own with plain decoding in them, so that the drift of a machine meets
    both. The rounds are those of each method's fastest cell.
    """
    bars, c = config.bars, config.zoo
    make = Timers(c)
    pair, prompts = make.pair, make.prompts
    tried = try_plain("zoo", pair, prompts[:1], c.plain_tokens, c.repeats)
    fastest_in = {dtype: fastest(tried, dtype) for dtype in DTYPES}
    plains = {
        ("plain", dtype): functools.partial(make.plain, variant)
        for dtype, variant in fastest_in.items()
    }
    by_cell: dict[ZooCell, GenerateTimer] = {}
    times: dict[ZooCell, np.ndarray] = {}
    plain_of: dict[tuple[str, str, str], np.ndarray] = {}
    for k in c.ks:
        cells = [
            ZooCell(method, k, dtype) for method, dtype in itertools.product(make.drafts, DTYPES)
        ]
        timers, found = measure_all(
            f"zoo, K={k}",
            {**plains, **{cell: functools.partial(make.generate, cell) for cell in cells}},
            c.repeats,
        )
        want = {dtype: timers["plain", dtype].tokens for dtype in DTYPES}
        by_cell |= {cell: timers[cell] for cell in cells}
        times |= {cell: found[cell] for cell in cells}
        plain_of |= {("plain", f"K={k}", dtype): found["plain", dtype] for dtype in DTYPES}
    of_all = lambda dtype: [np.median(plain_of["plain", f"K={k}", dtype]) for k in c.ks]
    total = {dtype: float(np.median(of_all(dtype))) for dtype in DTYPES}
    dtype = min(total, key=total.__getitem__)  # of the fastest plain loop of all
    beside = lambda cell, dtype: plain_of["plain", f"K={cell.k}", dtype]
    gains = {cell: beside(cell, cell.dtype) / ms for cell, ms in times.items()}
    over_all = {cell: float(np.median(beside(cell, dtype) / ms)) for cell, ms in times.items()}
    best = {
        m: max((cell for cell in times if cell.method == m), key=over_all.get) for m in make.drafts
    }
    prompt = sorted(prompts, key=len)[len(prompts) // 2]
    rounds = {
        m: Rounds.of(
            pair.target,
            make.drafts[m],
            SpeculativeConfig(m, cell.k),
            prompt,
            pair.slots,
            cell.dtype,
        )
        for m, cell in best.items()
    }
    _, parts = measure_all(
        "zoo, the best of each method",
        {
            **plains,
            **{("plain K=0", d): functools.partial(make.generate, None, dtype=d) for d in DTYPES},
            **{
                (m, "speculative"): functools.partial(by_cell.get, cell) for m, cell in best.items()
            },
            **{(m, part): maker for m, r in rounds.items() for part, maker in r.makers().items()},
        },
        2 * c.repeats,
    )
    batched = {}
    fast = max(best.values(), key=over_all.get)
    for batch in c.batches:
        _, batched[batch] = measure_all(
            f"zoo, batch {batch}",
            {
                "plain": functools.partial(make.plain, fastest_in[dtype], batch),
                "speculative": functools.partial(make.generate, fast, batch),
            },
            c.repeats,
        )

    # Tokens are compared within a dtype: rounding to bfloat16 moves near ties.
    stats = {cell: timer.stats for cell, timer in by_cell.items()}
    same = {
        cell: sum(a == b for a, b in zip(timer.tokens, want[cell.dtype], strict=True))
        for cell, timer in by_cell.items()
    }
    note = lambda cell: (
        f"tau {stats[cell].tau:.2f}, accepted {stats[cell].acceptance_rate:.0%}, "
        f"{same[cell]} of {len(prompts)} rows identical to plain {cell.dtype}"
    )
    plain = parts["plain", dtype]
    lines = [
        Line(
            f"the fastest, {fast} / fastest plain loop",
            plain / parts[fast.method, "speculative"],
            bar=bars.speedup,
            is_upper=False,
            note=f"over {fastest_in[dtype]}; {note(fast)}",
        ),
        *(
            line
            for m, cell in best.items()
            for line in round_lines(
                {part: ms for (name, part), ms in parts.items() if name == m} | {"plain": plain},
                stats[cell],
                rounds[m],
                bars,
                fastest_in[dtype],
            )
        ),
        *(
            Line(f"speed-up, {cell}", ms, note=f"over plain {cell.dtype}; {note(cell)}")
            for cell, ms in gains.items()
        ),
        *(
            Line(f"speed-up, batch {b}, {fast}", t["plain"] / t["speculative"])
            for b, t in batched.items()
        ),
        *(Line(f"plain, batch {b}", 1e3 / t["plain"], "tok/s") for b, t in batched.items()),
        *plain_lines(tried, {d: parts["plain K=0", d] / parts["plain", d] for d in DTYPES}, bars),
    ]
    named = lambda values: {
        key
        if isinstance(key, str)
        else ", ".join(map(str, key))
        if type(key) is tuple
        else str(key): value
        for key, value in values.items()
    }
    record = {
        "target": {"name": pair.target.name, "parameters": pair.target.num_params},
        "draft": {"name": pair.draft.name, "parameters": pair.draft.num_params},
        "best": {method: cell._asdict() for method, cell in best.items()},
        "plain_dtype": dtype,
        "slots": pair.slots,
        "prompt_tokens": [len(p) for p in prompts],
        "stats": named({key: counts.to_dict() for key, counts in stats.items()}),
        "identical_rows": named(same),
        "times_ms": listed(named(times | plain_of | parts | tried)),
    }
    reached = (rate for cell in best.values() for rate in stats[cell].acceptance_by_position)
    if any(map(math.isnan, reached)):
        record["warning"] = "some positions were never reached: their acceptance counts as 0"
    taus = {cell: counts.tau for cell, counts in stats.items()}
    again = float(np.median(plain / parts[fast.method, "speculative"]))
    return Result(lines, record, [*make.notes, *advice(fast, again, gains, taus)])
