"""The benchmark's part "own": a drafter or a rule of the user's own, on the zoo's target."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks import zoo
from experiments.benchmarks.loops import GenerateTimer, start
from experiments.benchmarks.rounds import Pair, fastest, plain_timer, try_plain
from experiments.benchmarks.shapes import listed
from experiments.benchmarks.table import Line, Result
from experiments.run import cli
from spec_jax import named
from spec_jax.config import SpeculativeConfig
from spec_jax.decoding import System
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.engine.request import whole_slots
from spec_jax.evaluation.own import Own
from spec_jax.evaluation.passes import pass_timer
from spec_jax.evaluation.timing import measure_all

USUAL = "greedy"  # the rule at temperature 0, beside the user's


def is_asked(config: ConfigDict) -> bool:
    """Returns whether the config names a drafter or a rule."""
    return bool(config.drafter or config.rule)


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range, or there is no such drafter or rule."""
    cli.require_positive(config, "k", "own")
    if config.drafter:
        named.find(config.drafter, "drafter")
    if config.rule:
        named.to_rule(config.rule)


def systems(pair: Pair, own: Own, k: int) -> dict[tuple[str, str], System]:
    """Returns what is decoded with, by the names of drafter and rule.

    Args:
      pair: The target, and the draft that the rule accepts where no drafter is given.
      own: The user's.
      k: K; of a tree its number of nodes.

    Raises:
      ConfigError: The drafter cannot draft for the target, or the rule cannot accept its drafts.
    """
    name, draft = (own.drafter.name, None) if own.drafter else ("standalone", pair.draft)
    k = own.drafter.tree.num_nodes if own.tree else k
    found = {}
    for rule in [None] if own.rule is None else [None, own.rule]:
        decoder = SpeculativeDecoder(
            pair.target, draft, SpeculativeConfig(num_speculative_tokens=k), drafter=own.drafter,
            rule=rule,
        )  # fmt: skip
        found[name, rule.name if rule else USUAL] = decoder.system()
    return found


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times plain decoding, whole generations and rounds, and a verify pass alone, in turns.

    Models, prompts and repeats are those of the part "zoo".
    """
    c, K = config.zoo, config.own.k
    pair, (prompts, notes) = zoo.load_pair(c)
    own = Own.of(config, pair.target)
    found = systems(pair, own, K)
    width = next(iter(found.values())).num_draft + 1
    pair = pair._replace(slots=pair.slots + whole_slots(width))

    def timer(system: System, chosen: Sequence, unit: str) -> GenerateTimer:
        params = pair.params(width) | ({"draft": None} if own.drafter else {})
        loose = pair.params(None) | ({"draft": None} if own.drafter else {})
        stops = pair.target.stop_tokens
        begin = [start(system, loose, [p], pair.slots, c.new_tokens, stops) for p in chosen]
        return GenerateTimer(system, params, begin, unit=unit)

    variant = fastest(try_plain("own", pair, prompts[:1], c.plain_tokens, c.repeats), "float32")
    plain_system, params = pair.system(), pair.params(None)
    begin = [
        start(plain_system, params, [p], pair.slots, c.new_tokens, pair.target.stop_tokens)
        for p in prompts
    ]
    timers, times = measure_all("own", {
        "plain": lambda: plain_timer(pair, begin, variant),
        "verify": lambda: pass_timer(
            pair.target.model, pair.params(width)["target"], width, pair.slots, 1
        ),
        **{
            (*key, unit): functools.partial(timer, system, prompts, unit)
            for key, system in found.items() for unit in ("token", "round")
        },
    }, c.repeats)  # fmt: skip
    lines, stats, same = [], {}, {}
    for key, system in found.items():
        drafter, rule = key
        label, run = f"{drafter}, K={system.num_draft}, rule {rule}", timers[*key, "token"]
        stats[label] = run.stats
        same[label] = sum(a == b for a, b in zip(run.tokens, timers["plain"].tokens, strict=True))
        kind = f"{same[label]} of {len(prompts)} rows identical to plain"
        lines += [
            Line(
                f"speed-up, {label}", times["plain"] / times[*key, "token"],
                note=f"over {variant}; tau {run.stats.tau:.2f}, accepted "
                f"{run.stats.acceptance_rate:.0%}, "
                + (kind if system.rule.is_lossless else "lossy"),
            ),
            Line(
                f"round of {label} / verify pass of {width} tokens",
                times[*key, "round"] / times["verify"],
                note="drafting, rule and commit come on top of the pass",
            ),
            Line(f"round of {label}", times[*key, "round"], "ms"),
        ]  # fmt: skip
        if rule != USUAL:
            usual = times[drafter, USUAL, "round"]
            lines.append(Line(f"round under {rule} / under {USUAL}", times[*key, "round"] / usual))
    flat = {key if isinstance(key, str) else ", ".join(key): ms for key, ms in times.items()}
    record = {
        "own": own.facts(), "k": width - 1, "slots": pair.slots, "identical_rows": same,
        "stats": {label: counts.to_dict() for label, counts in stats.items()},
        "times_ms": listed({key: np.asarray(ms) for key, ms in flat.items()}),
    }  # fmt: skip
    return Result(lines, record, notes)
