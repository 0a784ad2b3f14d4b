"""The benchmark's part "llama110m": a large shape, random weights and synthetic acceptance."""

from __future__ import annotations

from collections.abc import Mapping

from ml_collections import ConfigDict

from experiments.benchmarks.loops import GenerateTimer, start
from experiments.benchmarks.rounds import (
    Pair,
    fastest,
    plain_lines,
    plain_timer,
    round_lines,
    round_makers,
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
from experiments.common import cli
from experiments.common.timing import Result, measure_all


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    names = "slots prompt_tokens new_tokens plain_tokens k repeats"
    cli.require_positive(config, names, "llama110m")
    c = config.llama110m
    need = c.prompt_tokens + max(c.new_tokens, c.plain_tokens) + c.k + 1
    check_slots(config, "llama110m", need, "output")


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times plain decoding, speculative decoding, a round and the parts of the round."""
    bars, config = config.bars, config.llama110m
    target, draft = random_pair(config)
    pair, K = Pair(target, draft, config.slots), config.k
    prompt = random_prompt(target, config)
    system = pair.system(synthetic_chain(K, config.conditional_rate))
    tried = try_plain("llama110m", pair, [prompt], config.plain_tokens, config.repeats)
    variant, plain_system = fastest(tried), pair.system()
    states, plain_states = (
        [start(s, pair.params(None), [prompt], config.slots, config.new_tokens)]
        for s in (system, plain_system)
    )
    timers, times = measure_all("llama110m", {
        "plain": lambda: plain_timer(pair, plain_states, variant),
        "plain K=0": lambda: GenerateTimer(plain_system, pair.params(1), plain_states),
        "speculative": lambda: GenerateTimer(system, pair.params(K + 1), states),
        **round_makers(pair, system, prompt),
    }, config.repeats)  # fmt: skip
    stats = timers["speculative"].stats
    lines = round_lines(times, stats, K, bars, variant, verify_bar=bars.verify)
    return Result(lines + plain_lines(tried), {
        "target": facts(target, config.target), "draft": facts(draft, config.draft),
        "weights": "random", "stats": stats.to_dict(), "times_ms": listed(times | tried),
    })  # fmt: skip
