"""The benchmark's state-space part: what it costs that a state cannot rewind.

A round of drafts that cost nothing is a verify pass, the replay of what was accepted, and the
rest of the round; one round takes one token more, or as many as are accepted.
"""

from __future__ import annotations

import jax
import numpy as np

from experiments.benchmarks.loops import ROUNDS, GenerateTimer, free_drafter, rest_timer, start
from experiments.common.costs import pass_timer
from experiments.common.timing import Line, interleave, spread
from spec_jax.config import SpeculativeConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedModel
from spec_jax.models import transformer
from spec_jax.models.families.mamba2 import Mamba2Config
from spec_jax.models.params import init_params
from spec_jax.progress import Progress


def measure(part: str, config, bars) -> tuple[list[Line], dict]:
    """Times rounds of a Mamba-2 target beside the passes that they consist of.

    Args:
      part: its name in the table.
      config: ``target`` (fields of Mamba2Config), ``k``, ``conditional_rate``, ``slots``,
        ``prompt_tokens``, ``repeats``, ``seed``.
      bars: ``replay``.

    Returns:
      The lines, and what the record keeps beside them.
    """
    shape, K, slots = Mamba2Config(**config.target), config.k, config.slots
    params = jax.jit(init_params, static_argnums=0)(shape, jax.random.key(config.seed))
    target = LoadedModel("target", transformer.model(shape), params, config=shape)
    speculative = SpeculativeConfig(
        num_speculative_tokens=K, synthetic_conditional_rates=(config.conditional_rate,) * K
    )
    drafter = free_drafter(shape.vocab_size)
    system = SpeculativeDecoder(target, None, speculative, drafter=drafter).system()
    plain = SpeculativeDecoder(target).system()
    prompt = np.random.default_rng(config.seed).integers(
        shape.vocab_size, size=config.prompt_tokens
    ).tolist()

    def weights(num_rows):
        return {"target": target.decoding_params(num_rows), "draft": None}

    def rounds(system):
        new = slots - len(prompt) - K - 1
        state = start(system, weights(None), [prompt], slots, new)
        params = weights(system.num_draft + 1)
        return GenerateTimer(system, params, [state], max_rounds=ROUNDS, unit="round")

    passes = lambda width: pass_timer(
        target.model, target.decoding_params(width), width, slots, 1
    )
    make = {
        "target": lambda: passes(1),
        "verify": lambda: passes(K + 1),
        "rest": lambda: rest_timer(system, slots),
        "round": lambda: rounds(system),
        "N=1": lambda: rounds(plain),
    }
    timers = {}
    with Progress(len(make) + config.repeats, part) as bar:
        for name, maker in make.items():
            timers[name] = maker()
            bar.step(f"compiled {name}")
        times = interleave(timers, config.repeats, bar.step)
    line = lambda what, values, **options: Line(part, what, spread(values), **options)
    rest = times["round"] - times["rest"]
    lines = [
        line(
            f"round, K={K}, free drafts / verify pass alone", times["round"] / times["verify"],
            bar=bars.replay, note="verify, replay of the accepted inputs, rest of the round",
        ),
        line("the same without the rest of the round", rest / times["verify"]),
        line(
            f"verify pass of {K + 1} tokens / pass of one", times["verify"] / times["target"]
        ),
        line("round at N=1 / pass of one", times["N=1"] / times["target"]),
    ]
    record = {
        "target": {"parameters": target.num_params, **config.target.to_dict()},
        "weights": "random", "stats": timers["round"].stats.to_dict(),
        "times_ms": {name: values.tolist() for name, values in times.items()},
    }  # fmt: skip
    return lines, record
