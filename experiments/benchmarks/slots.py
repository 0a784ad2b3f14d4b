"""The benchmark's part "slots": the cost of cache slots that no token fills.

Times rounds of one row whose drafts cost nothing, in a short cache and in a long one.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.loops import GenerateTimer, free_drafter, start
from experiments.benchmarks.shapes import (
    facts,
    listed,
    random_model,
    random_prompt,
    synthetic_chain,
)
from experiments.benchmarks.table import Line, Result
from experiments.run import cli
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.evaluation.timing import measure_all
from spec_jax.models.config import ModelConfig
from spec_jax.models.families.deepseek import DeepseekConfig
from spec_jax.models.families.qwen3_5 import Qwen35Config

FAMILIES = {"attention": ModelConfig, "hybrid": Qwen35Config, "latent": DeepseekConfig}


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    cli.require_positive(config, "few many prompt_tokens k rounds repeats", "slots")
    c = config.slots
    unknown = set(cli.listed(c.families)) - set(FAMILIES)
    if unknown or not cli.listed(c.families):
        known = ", ".join(FAMILIES)
        raise ConfigError(f"slots.families is {c.families!r}; expected some of {known}")
    need = c.prompt_tokens + (c.rounds + 1) * (c.k + 1)
    if not need <= c.few < c.many:
        raise ConfigError(
            f"slots.few is {c.few} and slots.many {c.many}; prompt and rounds need {need}, and "
            "many is to be more than few"
        )


class RoundTimer:
    """Times rounds by the clock, and keeps the processor time of each timing in ``cpu_ms``."""

    def __init__(self, timer: GenerateTimer):
        self._timer, self.cpu_ms = timer, []

    def __call__(self) -> float:
        milliseconds = self._timer()
        self.cpu_ms.append(self._timer.cpu_ms)
        return milliseconds


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times rounds of each family in caches of few and of many slots."""
    bar, config = config.bars.slots, config.slots
    K, makers, model_facts = config.k, {}, {}
    speculative = synthetic_chain(K, config.conditional_rate)

    def timer(target, system, slots):
        prompt, prepare = random_prompt(target, config), target.cpu_layout.prepare
        whole, params = ({"target": prepare(n), "draft": None} for n in (None, K + 1))
        state = start(system, whole, [prompt], slots, config.few - len(prompt) - K - 1)
        rounds = dict(max_rounds=config.rounds, unit="round")
        return RoundTimer(GenerateTimer(system, params, [state], **rounds))

    for name in cli.listed(config.families):
        sizes = {**config[name].to_dict(), "max_position_embeddings": config.many}
        target = random_model(name, FAMILIES[name](**sizes), config.seed)
        model_facts[name] = facts(target, config[name])
        drafter = free_drafter(target.model.vocab_size)
        system = SpeculativeDecoder(target, None, speculative, drafter=drafter).system()
        for slots in (config.few, config.many):
            makers[name, slots] = functools.partial(timer, target, system, slots)
    timers, times = measure_all("slots", makers, config.repeats)
    cpu_times = {key: np.asarray(timer.cpu_ms) for key, timer in timers.items()}
    lines = []
    for name in model_facts:
        for clock, cell_ms in (("processor time", cpu_times), ("by the clock", times)):
            few, many = cell_ms[name, config.few], cell_ms[name, config.many]
            what = f"{name}, round, {config.many:,} slots / {config.few:,}, {clock}"
            note = f"{config.prompt_tokens} tokens and more in each"
            bound = bar if cell_ms is cpu_times else None
            lines.append(Line(what, many / few, bar=bound, note=note))
            lines.append(Line(f"{name}, round, {config.few:,} slots, {clock}", few, "ms"))
    record = {"times_ms": listed(times), "cpu_times_ms": listed(cpu_times)}
    return Result(lines, {"weights": "random", "shapes": model_facts, **record})
