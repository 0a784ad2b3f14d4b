"""The benchmark's part "states": what it costs that the state of a Mamba-2 model cannot rewind.

A round whose drafts cost nothing is a verify pass, the replay of the accepted tokens, and the rest
of the round.
"""

from __future__ import annotations

from collections.abc import Mapping

from ml_collections import ConfigDict

from experiments.benchmarks.loops import ROUNDS, GenerateTimer, free_drafter, rest_timer, start
from experiments.benchmarks.shapes import (
    check_slots,
    facts,
    listed,
    random_model,
    random_prompt,
    synthetic_chain,
)
from experiments.benchmarks.table import Line, Result
from experiments.run import cli
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.evaluation.passes import pass_timer
from spec_jax.evaluation.timing import measure_all
from spec_jax.models.families.mamba2 import Mamba2Config


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    cli.require_positive(config, "slots prompt_tokens k repeats", "states")
    c = config.states
    check_slots(config, "states", c.prompt_tokens + ROUNDS * (c.k + 1) + c.k + 1)


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times rounds of a Mamba-2 target, and the passes that they consist of."""
    bars, config = config.bars, config.states
    K, slots = config.k, config.slots
    target = random_model("target", Mamba2Config(**config.target), config.seed)
    speculative = synthetic_chain(K, config.conditional_rate)
    drafter = free_drafter(target.model.vocab_size)
    system = SpeculativeDecoder(target, None, speculative, drafter=drafter).system()
    prompt = random_prompt(target, config)

    def weights(num_rows):
        return {"target": target.cpu_layout.prepare(num_rows), "draft": None}

    def rounds(system):
        state = start(system, weights(None), [prompt], slots, slots - len(prompt) - K - 1)
        params = weights(system.num_draft + 1)
        return GenerateTimer(system, params, [state], max_rounds=ROUNDS, unit="round")

    prepare = target.cpu_layout.prepare
    passes = lambda width: pass_timer(target.model, prepare(width), width, slots, 1)
    timers, times = measure_all(
        "states",
        {
            "target": lambda: passes(1),
            "verify": lambda: passes(K + 1),
            "rest": lambda: rest_timer(system, slots),
            "round": lambda: rounds(system),
            "N=1": lambda: rounds(SpeculativeDecoder(target).system()),
        },
        config.repeats,
    )
    rest = times["round"] - times["rest"]
    lines = [
        Line(
            f"round, K={K}, free drafts / verify pass alone",
            times["round"] / times["verify"],
            bar=bars.replay,
            note="verify, replay of the accepted inputs, rest of the round",
        ),
        Line("the same without the rest of the round", rest / times["verify"]),
        Line(f"verify pass of {K + 1} tokens / pass of one", times["verify"] / times["target"]),
        Line("round at N=1 / pass of one", times["N=1"] / times["target"]),
    ]
    return Result(
        lines,
        {
            "target": facts(target, config.target),
            "weights": "random",
            "stats": timers["round"].stats.to_dict(),
            "times_ms": listed(times),
        },
    )
