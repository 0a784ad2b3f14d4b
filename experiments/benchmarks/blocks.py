"""The part "blocks" of the benchmark: rounds that draft a block in one pass, and their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments.benchmarks.loops import GenerateTimer, rest_timer, start
from experiments.benchmarks.shapes import check_slots, facts, listed, random_model, random_prompt
from experiments.benchmarks.table import Line, Result
from experiments.run import cli
from spec_jax.config import SpeculativeConfig
from spec_jax.drafters.block.config import BlockConfig, DSparkConfig
from spec_jax.drafters.block.model import block_states, inject
from spec_jax.drafters.block.steps import normed
from spec_jax.drafters.eagle.model import PEagleConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.evaluation.passes import TimedPass, pass_timer, steps_timer
from spec_jax.evaluation.timing import Timer, measure_all
from spec_jax.loading import LoadedModel, random_head
from spec_jax.sampling import argmax

ROUNDS = 24  # in one call
_SHAPES = ("zoo", "llama110m")
_PARALLEL = "P-EAGLE round"


def block_step(decoder: SpeculativeDecoder, config: BlockConfig, slots: int) -> TimedPass:
    """Returns the pass of a block of one row, and the scores of its K positions."""
    system, params = decoder.system(), decoder.params(1)["draft"]
    first, K = 0 if config.is_anchor_first else 1, system.num_draft

    def run(params, token, cache):
        x, cache = block_states(params, token, cache, config.block_width(K), config)
        x = normed(params["head"], x[:, first : first + K], config)
        return argmax(system.target.unembed(params["target"], x))[:, -1], cache

    return TimedPass(run, params, _half_full(decoder, slots))


def inject_step(decoder: SpeculativeDecoder, config: BlockConfig, slots: int) -> TimedPass:
    """Returns the injection of a verify pass's states, none of which is kept."""
    system, params = decoder.system(), decoder.params(1)["draft"]
    half, width = slots // 2, len(config.taps) * config.target_hidden_size

    def run(params, token, carry):
        cache, features = carry
        # They depend on the step before, so they are projected again each time.
        now = features + (1e-9 * token.astype(features.dtype))[:, None, None]
        cache = inject(params["head"], cache, now, jnp.zeros_like(token), config)
        read = jnp.stack([x[..., half, :1].sum() for x in (*cache.keys, *cache.values)])
        return jnp.argmax(read, keepdims=True).astype(jnp.int32), (cache, features)

    features = jnp.ones((1, system.num_draft + 1, width), params["head"]["norm"].dtype)
    return TimedPass(run, params, (_half_full(decoder, slots), features))


def _half_full(decoder: SpeculativeDecoder, slots: int):
    cache = decoder.system().drafter.init(decoder.params(1)["draft"], 1, slots)
    return cache.commit(jnp.full((1,), slots // 2, jnp.int32))


def round_timer(decoder: SpeculativeDecoder, prompt: list[int], slots: int) -> Timer:
    """Returns the timer of whole rounds of one row."""
    system = decoder.system()
    max_new_tokens = slots - len(prompt) - system.lookahead_slots
    state = start(system, decoder.params(), [prompt], slots, max_new_tokens)
    return GenerateTimer(system, decoder.params(1), [state], max_rounds=ROUNDS, unit="round")


def parallel_decoder(target: LoadedModel, config: ConfigDict) -> SpeculativeDecoder:
    """Returns a decoder with a P-EAGLE head of as many layers, with random weights."""
    shape = PEagleConfig.of_target(target.config, num_layers=config.num_layers, max_draft=config.k)
    head = random_head(shape, jax.random.key(config.seed + 2))
    return SpeculativeDecoder(target, head, SpeculativeConfig("peagle", config.k))


def case_makers(
    name: str, decoder: SpeculativeDecoder, config: BlockConfig, prompt: list[int], slots: int
) -> dict[tuple[str, str], Callable[[], Timer]]:
    """Returns makers of timers of a round and of its parts, each a jitted loop, one row."""
    system, params = decoder.system(), decoder.params(1)
    width = system.num_draft + 1
    return {
        (name, "round"): lambda: round_timer(decoder, prompt, slots),
        (name, "block"): lambda: steps_timer([block_step(decoder, config, slots)], 1),
        (name, "verify"): lambda: pass_timer(system.target, params["target"], width, slots, 1),
        (name, "injection"): lambda: steps_timer([inject_step(decoder, config, slots)], 1),
        (name, "rest"): lambda: rest_timer(system, slots),
    }


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    cli.require_positive(config, "slots prompt_tokens num_layers markov_rank k repeats", "blocks")
    c = config.blocks
    unknown = set(cli.listed(c.shapes)) - set(_SHAPES)
    if unknown or not cli.listed(c.shapes):
        raise ConfigError(f"blocks.shapes is {c.shapes!r}; expected some of {', '.join(_SHAPES)}")
    check_slots(config, "blocks", c.prompt_tokens + (ROUNDS + 2) * (c.k + 1))


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times greedy rounds of a DSpark head with random weights, and the parts of these rounds.

    Beside them stand rounds of a P-EAGLE head of as many layers.
    """
    bars, config = config.bars, config.blocks
    makers, found = {}, {}
    for name in cli.listed(config.shapes):
        target = random_model(name, config[name], config.seed)
        sizes = dict(num_layers=config.num_layers, block_size=config.k)
        shape = DSparkConfig.of_target(target.config, markov_rank=config.markov_rank, **sizes)
        head = random_head(shape, jax.random.key(config.seed + 1))
        decoder = SpeculativeDecoder(target, head, SpeculativeConfig("dspark", config.k))
        prompt = random_prompt(target, config)
        makers |= case_makers(name, decoder, shape, prompt, config.slots)
        other = functools.partial(round_timer, parallel_decoder(target, config), prompt)
        makers[name, _PARALLEL] = functools.partial(other, config.slots)
        found[name] = {"target": facts(target, config[name]), "head_parameters": head.num_params}
    _, times = measure_all("blocks", makers, config.repeats)
    lines = []
    for name in found:
        own = {what: ms for (shape, what), ms in times.items() if shape == name}
        parallel = own.pop(_PARALLEL)
        label = f"{name}, DSpark round, K={config.k}"
        parts = own["block"] + own["verify"] + own["injection"]
        lines += [
            Line(
                f"{label} / block, verify and injection",
                own["round"] / parts,
                bar=bars.block_round,
                note="each its own loop; the round also has K Markov steps, rule, limits, append",
            ),
            *(
                Line(f"{label}, {what}" if what != "round" else label, ms, "ms")
                for what, ms in own.items()
            ),
            Line(f"{name}, {_PARALLEL}, K={config.k}", parallel, "ms"),
            Line(f"{name}, {_PARALLEL} / DSpark round", parallel / own["round"]),
        ]
    return Result(lines, {"weights": "random", "shapes": found, "times_ms": listed(times)})
