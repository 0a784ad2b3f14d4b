"""The benchmark's part "heads": rounds of an EAGLE-3 chain and dynamic trees, and their parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments.benchmarks.loops import GenerateTimer, rest_timer, some_parents, start
from experiments.benchmarks.shapes import check_slots, facts, listed, random_model, random_prompt
from experiments.benchmarks.table import Line, Result
from experiments.run import cli
from spec_jax.config import SpeculativeConfig
from spec_jax.contracts import Head
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.loaded import head_of
from spec_jax.engine.decoder import SpeculativeDecoder
from spec_jax.errors import ConfigError
from spec_jax.evaluation.passes import head_step, pass_timer, refresh_step, steps_timer
from spec_jax.evaluation.timing import Timer, measure_all
from spec_jax.loading import random_head
from spec_jax.tree import DynamicTree, paths

ROUNDS = 16  # in one call; a pass over a tree takes tenths of a second on a CPU


class DraftCase(NamedTuple):
    """A chain or a tree, and what decodes it greedily."""

    name: str
    decoder: SpeculativeDecoder


def case_makers(
    case: DraftCase, head: Head, prompt: Sequence[int], slots: int, *, has_parts: bool = True
) -> dict[tuple[str, str], Callable[[], Timer]]:
    """Returns makers of timers of a round and of its parts, each a jitted loop, one row."""
    system, params = case.decoder.system(), case.decoder.params(1)
    tree, K = system.drafter.tree, system.num_draft
    seen = None if tree is None else paths(some_parents(tree, K)[None], tree.depth)
    width, children = (1, 1) if tree is None else (tree.max_level_fed, tree.top_k)

    def whole_round() -> Timer:
        max_new_tokens = slots - len(prompt) - system.lookahead_slots
        state = start(system, case.decoder.params(), [prompt], slots, max_new_tokens)
        return GenerateTimer(system, params, [state], max_rounds=ROUNDS, unit="round")

    makers = {
        "round": whole_round,
        "verify": lambda: pass_timer(
            system.target, params["target"], K + 1, slots, 1, ROUNDS, seen=seen
        ),
        "level": lambda: steps_timer(
            [head_step(head, params["draft"], slots, 1, width, children)], 1
        ),
        "refresh": lambda: steps_timer(
            [refresh_step(system.drafter, system.target, params["draft"], system.depth + 1, slots)],
            1,
        ),
        "rest": lambda: rest_timer(system, slots),
    }
    kept = makers if has_parts else ("round", "verify")
    return {(case.name, part): makers[part] for part in kept}


def check(config: ConfigDict) -> None:
    """Raises ConfigError if a value is out of range."""
    names = "slots prompt_tokens draft_vocab_size k tree_depth tree_top_k repeats"
    cli.require_positive(config, names, "heads")
    c = config.heads
    if not c.tree_nodes or c.tree_depth < 2:
        raise ConfigError("heads needs tree_nodes of one size or more, and tree_depth of 2 or more")
    size = c.target.vocab_size
    if c.draft_vocab_size > size:
        raise ConfigError(
            f"heads.draft_vocab_size is {c.draft_vocab_size}; the target has {size} ids"
        )
    trees = [DynamicTree(n, c.tree_depth, c.tree_top_k) for n in c.tree_nodes]
    rounds = ROUNDS * (max(c.k, c.tree_depth) + 1)
    widest = max(max(tree.num_nodes, tree.num_fed) for tree in trees)
    check_slots(config, "heads", c.prompt_tokens + rounds + widest + 1)


def measure(config: ConfigDict, records: Mapping[str, dict]) -> Result:
    """Times rounds of an EAGLE-3 head with random weights, and the parts of these rounds."""
    bars, config = config.bars, config.heads
    target = random_model("target", config.target, config.seed)
    shape = EagleConfig.of_target(target.config, 3, config.draft_vocab_size)
    loaded = random_head(shape, jax.random.key(config.seed + 1))
    sizes = sorted(config.tree_nodes)
    case = lambda name, k, **tree: DraftCase(
        name, SpeculativeDecoder(target, loaded, SpeculativeConfig("eagle", k, **tree))
    )
    chain = case("chain", config.k)
    shapes = {"tree_depth": config.tree_depth, "tree_top_k": config.tree_top_k}
    trees = [case(f"tree of {n + 1}", n, **shapes) for n in sizes]
    head = head_of(loaded, chain.decoder.system().target)
    prompt, plain = random_prompt(target, config), ("plain", "pass")
    makers = {
        plain: lambda: pass_timer(target.model, target.cpu_layout.prepare(1), 1, config.slots, 1)
    }
    for case in (chain, *trees):
        has_parts = case in (chain, trees[-1])
        makers |= case_makers(case, head, prompt, config.slots, has_parts=has_parts)
    _, times = measure_all("heads", makers, config.repeats)
    median = lambda case, what: float(np.median(times[case.name, what]))
    return Result(
        _lines(times, chain, trees, bars, config.k),
        {
            "target": facts(target, config.target),
            "weights": "random",
            "tree_sizes": [n + 1 for n in sizes],
            "round_ms": [median(case, "round") for case in trees],
            "verify_ms": [median(case, "verify") for case in trees],
            "chain_round_ms": median(chain, "round"),
            "plain_ms": float(np.median(times[plain])),
            "times_ms": listed(times),
        },
    )


def _lines(
    times: Mapping[tuple[str, str], np.ndarray],
    chain: DraftCase,
    trees: Sequence[DraftCase],
    bars: ConfigDict,
    k: int,
) -> list[Line]:
    plain_ms, lines = times["plain", "pass"], []
    size = trees[-1].decoder.system().num_draft + 1
    for case, label, bar in (
        (chain, f"EAGLE-3 chain round, K={k}", bars.head_round),
        (trees[-1], f"EAGLE-3 dynamic tree round, {size} nodes", bars.tree_round),
    ):
        own = {what: ms for (name, what), ms in times.items() if name == case.name}
        passes = case.decoder.system().depth - 1
        parts = own["verify"] + own["refresh"] + passes * own["level"] + own["rest"]
        note = (
            f"verify, refresh, {passes} head passes, rest; each its own loop. Left "
            "out: the first draft's scores, growing the tree, moving the path"
        )
        lines += [
            Line(f"{label} / sum of its parts", own["round"] / parts, bar=bar, note=note),
            Line(f"{label} / plain pass", own["round"] / plain_ms),
            Line(f"{label}, one head pass", own["level"], "ms"),
            *(Line(f"{label}, {part}", own[part], "ms") for part in ("refresh", "verify", "rest")),
        ]
    for case in (chain, *trees):
        lines.append(Line(f"round, {case.name}", times[case.name, "round"], "ms"))
    return [*lines, Line("plain pass of one token", plain_ms, "ms")]
