"""The benchmark's part on heads: an EAGLE-3 chain and dynamic trees, beside their parts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.loops import GenerateTimer, rest_timer, some_parents, start
from experiments.benchmarks.synthetic import random_model
from experiments.common.costs import ITERATIONS, head_timer, pass_timer
from experiments.common.timing import Line, Timer, interleave, loop_timer, spread
from spec_jax.config import SpeculativeConfig
from spec_jax.decoding import System
from spec_jax.drafters.common.head import Head
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.loading import LoadedHead, LoadedModel, random_head
from spec_jax.progress import Progress
from spec_jax.tree import paths

ROUNDS = 16  # in one call: a pass over a tree takes tenths of a second on a CPU


@functools.partial(jax.jit, static_argnames=("system", "iterations"), donate_argnames="state")
def _run_refresh(params, state, features, tokens, n, *, system: System, iterations: int):
    def one_refresh(_, state):
        # Joined anew each time: the features hang on the state before.
        now = features + 1e-9 * state.last.mean()
        return system.drafter.commit(params, state, tokens, n, now, None)

    return jax.lax.fori_loop(0, iterations, one_refresh, state)


def refresh_timer(system: System, params, width: int, slots: int) -> Timer:
    """Times feeding ``width`` true pairs to the head, of which none is kept; ms."""
    state = system.drafter.init(params, 1, slots)
    half = jnp.full((1,), slots // 2, jnp.int32)
    state = state.replace(cache=state.cache.commit(half))
    fed = system.target.forward(params["target"], jnp.zeros((1, width), jnp.int32))
    tokens, none = jnp.zeros((1, width), jnp.int32), jnp.zeros((1,), jnp.int32)
    run = functools.partial(
        _run_refresh, features=fed.features, tokens=tokens, n=none, system=system,
        iterations=ITERATIONS,
    )  # fmt: skip
    return loop_timer(lambda state: run(params, state), state, ITERATIONS)


class Case(NamedTuple):
    """A drafted shape: its decoder, and how often a round runs each part."""

    name: str
    decoder: SpeculativeDecoder
    counts: dict[str, int]


def make_case(name: str, target: LoadedModel, head: LoadedHead, config) -> Case:
    """One speculative config of a head; greedy."""
    decoder = SpeculativeDecoder(target, head, config)
    passes = decoder.system().depth - 1
    return Case(name, decoder, {"verify": 1, "level": passes, "refresh": 1, "rest": 1})


def case_timers(
    case: Case, head: Head, prompt, slots: int, say: Callable[[str], None], *, has_parts=True
) -> dict[str, Timer]:
    """Timers of a round and of its parts, each a jitted loop, one row."""
    system, params = case.decoder.system(), case.decoder.params(1)
    tree, K = system.drafter.tree, system.num_draft
    most = slots - len(prompt) - system.lookahead_slots
    state = start(system, case.decoder.params(), [prompt], slots, most)
    seen = None if tree is None else paths(some_parents(tree, K)[None], tree.depth)
    width, children = (1, 1) if tree is None else (tree.widest, tree.top_k)
    make = {
        "round": lambda: GenerateTimer(
            system, params, [state], max_rounds=ROUNDS, unit="round"
        ),
        "verify": lambda: pass_timer(
            system.target, params["target"], K + 1, slots, 1, ROUNDS, seen=seen
        ),
        "level": lambda: head_timer(head, params["draft"], slots, 1, width, children),
        "refresh": lambda: refresh_timer(system, params["draft"], system.depth + 1, slots),
        "rest": lambda: rest_timer(system, slots),
    }
    timers = {}
    for part in make if has_parts else ("round", "verify"):
        timers[part] = make[part]()
        say(f"compiled {case.name}, {part}")
    return timers


def parts_ms(times: Mapping[str, np.ndarray], counts: Mapping[str, int]) -> np.ndarray:
    """Sum of a round's parts, by repeat."""
    return sum(n * times[part] for part, n in counts.items())


def measure(part: str, config, bars) -> tuple[list[Line], dict]:
    """Times a chain and trees of an EAGLE-3 head with random weights.

    Args:
      part: its name in the table.
      config: ``target`` shape, ``draft_vocab_size``, ``k``, ``tree_nodes``, ``tree_depth``,
        ``tree_top_k``, ``slots``, ``prompt_tokens``, ``repeats``, ``seed``.
      bars: ``head_round`` and ``tree_round``.

    Returns:
      The lines, and what the record keeps beside them: the times by tree size among it.
    """
    target = random_model("target", config.target, config.seed)
    shape = EagleConfig.of_target(target.config, 3, config.draft_vocab_size)
    loaded = random_head(shape, jax.random.key(config.seed + 1))
    sizes, K = sorted(config.tree_nodes), config.k
    cases = {"chain": make_case("chain", target, loaded, SpeculativeConfig("eagle", K))}
    for nodes in sizes:
        tree = SpeculativeConfig(
            "eagle", nodes, tree_depth=config.tree_depth, tree_top_k=config.tree_top_k
        )
        cases[nodes] = make_case(f"tree of {nodes + 1}", target, loaded, tree)
    largest = sizes[-1]
    head = loaded.head(cases["chain"].decoder.system().target)
    prompt = np.random.default_rng(config.seed).integers(
        target.model.vocab_size, size=config.prompt_tokens
    ).tolist()
    with Progress(11 + 2 * (len(sizes) - 1) + config.repeats, part) as bar:
        timers = {
            "plain": pass_timer(
                target.model, target.decoding_params(1), 1, config.slots, 1
            )
        }
        bar.step("compiled a plain pass")
        for name, case in cases.items():
            found = case_timers(
                case, head, prompt, config.slots, bar.step, has_parts=name in ("chain", largest)
            )
            timers |= {(name, what): timer for what, timer in found.items()}
        times = interleave(timers, config.repeats, bar.step)
    plain_ms = times["plain"]
    by_case = {
        name: {key[1]: values for key, values in times.items() if key[0] == name}
        for name in cases
    }  # fmt: skip
    return _lines(part, plain_ms, by_case, cases, config, bars), {
        "target": {"parameters": target.num_params, **config.target.to_dict()},
        "weights": "random", "tree_sizes": [n + 1 for n in sizes],
        "round_ms": [float(np.median(times[n, "round"])) for n in sizes],
        "verify_ms": [float(np.median(times[n, "verify"])) for n in sizes],
        "chain_round_ms": float(np.median(times["chain", "round"])),
        "plain_ms": float(np.median(plain_ms)),
        "times_ms": {str(name): values.tolist() for name, values in times.items()},
    }  # fmt: skip


def _lines(part, plain_ms, times, cases, config, bars) -> list[Line]:
    line = lambda what, values, *args, **options: Line(part, what, spread(values), *args, **options)
    largest = max(n for n in cases if n != "chain")
    lines = []
    for name, label, bar in (
        ("chain", f"EAGLE-3 chain round, K={config.k}", bars.head_round),
        (largest, f"EAGLE-3 dynamic tree round, {largest + 1} nodes", bars.tree_round),
    ):
        case, own = cases[name], times[name]
        passes = case.counts["level"]
        lines += [
            line(
                f"{label} / sum of its parts", own["round"] / parts_ms(own, case.counts), bar=bar,
                note=f"verify, refresh, {passes} head passes, rest; each its own loop. Left out: "
                "the first draft's scores, growing the tree, moving the path",
            ),
            line(f"{label} / plain pass", own["round"] / plain_ms),
            line(f"{label}, one head pass", own["level"], "ms"),
            line(f"{label}, refresh", own["refresh"], "ms"),
            line(f"{label}, verify", own["verify"], "ms"),
            line(f"{label}, rest", own["rest"], "ms"),
        ]
    for name, case in cases.items():
        lines.append(line(f"round, {case.name}", times[name]["round"], "ms"))
    return [*lines, line("plain pass of one token", plain_ms, "ms")]
