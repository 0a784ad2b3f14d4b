"""The benchmark's first part: a large shape with random weights and synthetic acceptance."""

from __future__ import annotations

import jax
import numpy as np

from experiments.benchmarks.loops import GenerateTimer, start
from experiments.benchmarks.rounds import (
    Pair,
    fastest,
    plain_lines,
    plain_timer,
    round_lines,
    round_timers,
    try_plain,
)
from experiments.common.timing import Line, interleave
from spec_jax.config import SpeculativeConfig
from spec_jax.loading import LoadedModel
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.models.params import init_params
from spec_jax.progress import Progress


def random_model(name: str, shape, seed: int) -> LoadedModel:
    """A model of this shape (fields of ModelConfig) with random float32 weights."""
    config = ModelConfig(**shape)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(seed))
    return LoadedModel(name, transformer.model(config), params, None, config, config.eos_token_id)


def measure(part: str, config, bars) -> tuple[list[Line], dict]:
    """Times the pair of this config.

    Args:
      part: its name in the table.
      config: ``target`` and ``draft`` shapes, ``slots``, ``prompt_tokens``, ``new_tokens``,
        ``k``, ``conditional_rate``, ``repeats``, ``seed``.
      bars: ``verify``, ``round`` and ``predicted``.

    Returns:
      The lines, and what the record keeps beside them.
    """
    target = random_model("target", config.target, config.seed)
    draft = random_model("draft", config.draft, config.seed + 1)
    pair, K = Pair(target, draft, config.slots), config.k
    prompt = np.random.default_rng(config.seed).integers(
        target.model.vocab_size, size=config.prompt_tokens
    ).tolist()
    speculative = SpeculativeConfig(
        num_speculative_tokens=K, synthetic_conditional_rates=(config.conditional_rate,) * K
    )
    system, plain_system = pair.system(speculative), pair.system()
    with Progress(config.repeats * 2 + 14, part) as bar:
        tried = try_plain(pair, [prompt], config.plain_tokens, config.repeats, bar.step)
        variant = fastest(tried)
        states, plain_states = (
            [start(s, pair.params(None), [prompt], config.slots, config.new_tokens)]
            for s in (system, plain_system)
        )
        timers = {"plain": plain_timer(pair, plain_states, variant)}
        bar.step("compiled plain")
        timers["plain K=0"] = GenerateTimer(plain_system, pair.params(1), plain_states)
        bar.step("compiled plain K=0")
        timers["speculative"] = GenerateTimer(system, pair.params(K + 1), states)
        bar.step("compiled speculative")
        timers |= round_timers(pair, system, prompt, bar.step)
        times = interleave(timers, config.repeats, bar.step)
    stats = timers["speculative"].stats
    lines = round_lines(part, times, stats, K, bars, variant) + plain_lines(part, tried)
    record = {
        "target": {"parameters": target.num_params, **config.target.to_dict()},
        "draft": {"parameters": draft.num_params, **config.draft.to_dict()},
        "weights": "random", "stats": stats.to_dict(),
        "times_ms": {name: values.tolist() for name, values in (times | tried).items()},
    }  # fmt: skip
    return lines, record
