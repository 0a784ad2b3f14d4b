"""The benchmark's part "adaptive": adaptive K against plain decoding and the best fixed K.

Acceptance is synthetic. The draft offers its tokens up to the first of a series of random coins
that fails, and the rule accepts all that are offered. The rate of the coins is a parameter, so one
program serves every rate, and the passes have their real cost.

Times per token are reported in two ways. "Priced" is the sum of the run's own table of costs over
the rounds that were chosen, divided by the tokens that those rounds emit on average. "By the clock"
is the measured time divided by the same tokens.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.loops import start
from experiments.benchmarks.shapes import check_slots, random_pair, synthetic_chain
from experiments.benchmarks.table import Line, Result
from experiments.run import cli
from spec_jax import decoding, rng
from spec_jax.contracts import Context, Drafter
from spec_jax.decoding import DecodeState, System
from spec_jax.drafters.standalone.model import standalone
from spec_jax.engine.adaptive.policy import Tuner, expected_tokens
from spec_jax.engine.adaptive.runner import CATCH_UP, AdaptiveRunner, AdaptiveState, system_of
from spec_jax.loading import LoadedModel
from spec_jax.progress import Progress
from spec_jax.rules import make_rule


@functools.cache
def coined(drafter: Drafter) -> Drafter:
    """Returns the drafter, which offers its drafts up to the first coin that fails.

    Its parameters are ``{"draft": the drafter's, "rate": f32[]}``.
    """

    def propose(params, state, context: Context, num_draft: int):
        proposal, state = drafter.propose(params["draft"], state, context, num_draft)
        seed, length = context.sampler.seed, context.length
        coin = lambda i: rng.uniform(rng.keys(seed, rng.Purpose.DRAFT, length, i), 1)[:, 0]
        coins = jax.vmap(coin, out_axes=1)(jnp.arange(num_draft))
        n_draft = jnp.cumprod(coins < params["rate"], axis=1).sum(axis=1)
        return proposal.replace(n_draft=n_draft.astype(jnp.int32)), state

    inner = lambda function: lambda params, *args: function(params["draft"], *args)
    return drafter._replace(
        propose=propose,
        window=CATCH_UP,
        **{n: inner(getattr(drafter, n)) for n in ("init", "prefill", "commit")},
        catch_up=drafter.catch_up._replace(run=inner(drafter.catch_up.run)),
    )


class BatchCase(NamedTuple):
    """One batch size: models, prompts, and the state that every rate shares."""

    target: LoadedModel
    draft: LoadedModel
    system: System
    prompts: Sequence[Sequence[int]]
    slots: int
    rounds: int
    adaptive: AdaptiveState

    def params(self, rate: float, num_draft: int) -> dict:
        """Returns the parameters laid out for K, and the rate."""
        B = len(self.prompts)
        draft = {"draft": self.draft.cpu_layout.prepare(2 * B), "rate": jnp.float32(rate)}
        return {"target": self.target.cpu_layout.prepare(B * (num_draft + 1)), "draft": draft}

    def start(self) -> DecodeState:
        """Returns a state with room for more rounds than any run has."""
        max_new_tokens = self.slots - max(map(len, self.prompts)) - self.system.lookahead_slots
        draft = {"draft": self.draft.cpu_layout.prepare(), "rate": jnp.float32(0.0)}
        params = {"target": self.target.cpu_layout.prepare(), "draft": draft}
        return start(self.system, params, self.prompts, self.slots, max_new_tokens)

    def advance(self, rate: float, num_draft: int | None):
        """Returns a function that runs rounds: an ``AdaptiveRunner``, or a fixed K."""
        if num_draft is None:
            return AdaptiveRunner(self.system, functools.partial(self.params, rate), self.adaptive)
        system, params = system_of(self.system, num_draft), self.params(rate, num_draft)
        # Called like this by the runner, so it is the same program.
        return lambda state, stop, max_rounds: decoding.generate(
            params, state, stop, max_rounds, jnp.int32(1), system=system
        )


def run_in_turns(case: BatchCase, state, rate: float, fixed: Sequence[int] = ()):
    """Times ``case.rounds`` rounds of adaptive K (None) and of each fixed K.

    Each fixed K runs as many rounds as adaptive K has just run, before adaptive K continues, so
    that drift of the machine meets all alike.

    Returns:
      The milliseconds by K, and the pairs of K and rounds that were chosen.
    """
    advances = {k: case.advance(rate, k) for k in (None, *fixed)}
    states = {k: jax.block_until_ready(jax.tree.map(jnp.copy, state)) for k in advances}
    times, left = dict.fromkeys(advances, 0.0), case.rounds
    while left > 0:
        count = left
        for k, advance in advances.items():
            go_on = jnp.zeros_like(states[k].finish)
            begin = time.perf_counter()
            states[k], chunk = advance(states[k], go_on, jnp.int32(count))
            count = int(chunk.rounds)
            times[k] += (time.perf_counter() - begin) * 1e3
        left -= count
    return times, advances[None].plans


def price(plans, costs) -> float:
    """Returns the milliseconds of the plans by the table of costs, with replays."""
    total, lag = 0.0, 0
    for k, n in plans:
        if k > 0 and lag:
            total, lag = total + costs.of_lag(lag), 0
        lag += 0 if k else n
        total += n * costs.round_ms[k]
    return total


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    cli.require_positive(config, "slots prompt_tokens rounds repeats", "adaptive")
    c = config.adaptive
    is_ascending = len(c.buckets) > 1 and list(c.buckets) == sorted({0, *c.buckets})
    is_rate = [0 <= rate <= 1 for rate in c.rates]
    cli.require_each(
        config,
        (is_ascending and c.buckets[0] == 0, "adaptive.buckets", "ascending integers from 0 on"),
        (is_rate and all(is_rate), "adaptive.rates", "rates in [0, 1]"),
        (c.batches and min(c.batches) >= 1, "adaptive.batches", "integers of 1 or more"),
    )
    need = c.prompt_tokens + (c.rounds + 1) * (c.buckets[-1] + 1) + CATCH_UP
    check_slots(config, "adaptive", need)


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Measures every rate and batch; the lines show the worst rate of each batch."""
    bars, config = config.bars, config.adaptive
    target, draft = random_pair(config)
    max_k = max(config.buckets)
    rule = make_rule(synthetic_chain(max_k, 1.0))
    system = System(target.model, coined(standalone(draft.model)), rule, max_k)
    tokens = np.random.default_rng(config.seed)
    lines, batches = [], {}
    total = len(config.batches) * len(config.rates) * (config.repeats + 1)
    with Progress(total, "adaptive") as bar:
        for batch in config.batches:
            prompts = tokens.integers(target.model.vocab_size, size=(batch, config.prompt_tokens))
            case = BatchCase(
                target,
                draft,
                system,
                prompts.tolist(),
                config.slots,
                config.rounds,
                AdaptiveState(config.buckets),
            )
            found = [_measure_rate(case, rate, config, bar.step) for rate in config.rates]
            (costs,) = case.adaptive.costs.values()
            batches[batch] = {
                "round_ms": costs.round_ms,
                "replay_ms": costs.catch_up_ms,
                "rates": found,
            }
            lines += _lines(batch, found, bars)
    return Result(lines, {"weights": "random", "batches": batches})


def _measure_rate(
    case: BatchCase, rate: float, config: ConfigDict, say: Callable[[str], None]
) -> dict:
    """Returns the ratios of one rate, by repeat."""
    state, max_k = case.start(), max(config.buckets)
    case.adaptive.tuner = Tuner.fresh(max_k)
    run_in_turns(case, state, rate)  # compiles, and learns the rate
    (costs,) = case.adaptive.costs.values()
    tokens = expected_tokens((rate,) * max_k)
    per_token = {k: ms / tokens[k] for k, ms in costs.round_ms.items()}
    best = min(per_token, key=per_token.get)
    say(f"batch {len(case.prompts)}, rate {rate}: compiled")
    turns = []
    for repeat in range(config.repeats):
        turns.append(run_in_turns(case, state, rate, sorted({0, best})))
        say(f"turn {repeat + 1} of {config.repeats}")
    plans = [chosen for _, chosen in turns]
    times = {k: np.asarray([ms[k] for ms, _ in turns]) for k in turns[0][0]}
    emitted = np.asarray([sum(n * tokens[k] for k, n in chosen) for chosen in plans])
    priced = np.asarray([price(chosen, costs) for chosen in plans]) / emitted
    clock = times[None] / emitted
    fixed = times[best] / (case.rounds * tokens[best])
    return {
        "rate": rate,
        "best_k": best,
        "plans": plans,
        "priced / plain": (priced / per_token[0]).tolist(),
        "best fixed / priced": (per_token[best] / priced).tolist(),
        "clock / plain": (clock / (times[0] / case.rounds)).tolist(),
        "clock / best fixed": (clock / fixed).tolist(),
    }


def _lines(batch: int, found: Sequence[dict], bars) -> list[Line]:
    """Returns a line for each ratio at its worst rate."""
    lines = []
    for key, what, bar, is_upper in (
        ("priced / plain", "adaptive / plain, priced", bars.adaptive_plain, True),
        ("best fixed / priced", "best fixed K / adaptive, priced", bars.adaptive_fixed, False),
        ("clock / plain", "adaptive / plain, by the clock", bars.adaptive_clock, True),
        ("clock / best fixed", "adaptive / best fixed K, by the clock", bars.adaptive_clock, True),
    ):
        pick = max if is_upper else min
        worst = pick(found, key=lambda one: np.median(one[key]))
        note = f"per token; worst rate {worst['rate']:g}; best fixed K {worst['best_k']}"
        lines.append(Line(f"{what}, batch {batch}", worst[key], "x", bar, is_upper, note))
    return lines
