"""Decoding of the zoo: few combinations, short prompts, one batch of mixed rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

from goldens import common

import spec_jax

NEW = 24
PROMPTS = ["def binary_search(items, x):\n", "import os\n\n", "class Stack:\n    def push"]
COLD = common.samplers({}, {"repetition_penalty": 1.1}, {"frequency_penalty": 0.2})
WARM = common.samplers(
    {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1},
    {"temperature": 0.8, "top_k": 40, "presence_penalty": 0.3},
    {"temperature": 1.1},
)
CHAIN = {"num_speculative_tokens": 4}
STATIC = {"tree": (3, 2, 1)}
DYNAMIC = {"tree_depth": 3, "tree_top_k": 4, "num_speculative_tokens": 10}
GREEDY = {
    "plain": CHAIN,
    "standalone": CHAIN,
    "ngram": CHAIN,
    "suffix": CHAIN,
    "eagle1": CHAIN,
    "eagle3": CHAIN,
    "mtp": CHAIN,
    "standalone/static": STATIC,
    "eagle3/dynamic": DYNAMIC,
}
SAMPLED = {
    ("plain", "match"): CHAIN,
    ("standalone", "residual"): CHAIN,
    ("eagle3", "block"): CHAIN,
    ("eagle1", "match"): CHAIN,
    ("ngram", "match"): CHAIN,
    ("eagle3/static", "traversal"): STATIC,
}


@functools.cache
def target():
    return spec_jax.load_model("zoo/target")


@functools.cache
def draft(kind: str):
    names = {"standalone": "draft", "eagle1": "eagle1", "eagle3": "eagle3", "mtp": "mtp"}
    return spec_jax.load_draft(f"zoo/{names[kind]}", target()) if kind in names else None


def decoder(kind: str, strategy: str, shape: dict, samplers) -> spec_jax.SpeculativeDecoder:
    kind = kind.split("/")[0]
    own = draft(kind)
    if kind == "plain":
        return spec_jax.SpeculativeDecoder(target(), target_sampler=samplers)
    method = "standalone" if kind == "standalone" else getattr(own, "method", kind)
    config = common.config(method, strategy, **shape)
    return spec_jax.SpeculativeDecoder(target(), own, config, target_sampler=samplers)


def _cell(kind, strategy, shape, samplers):
    made = decoder(kind, strategy, shape, samplers)
    return common.rows(made.generate(PROMPTS, NEW))


def _texts():
    """Stop strings, a limit of prompt and output together, and text as it streams."""
    made = decoder("standalone", "greedy", CHAIN, COLD)
    pieces = [[] for _ in PROMPTS]
    made.generate(PROMPTS, NEW, on_token=lambda row, piece: pieces[row].append(piece))
    found = made.generate(PROMPTS, NEW, stop=["(", "\n\n"])
    found += made.generate(PROMPTS, max_length=20)
    return [{"pieces": piece} for piece in pieces] + common.rows(found)


def _queue():
    made = decoder("eagle3", "greedy", CHAIN, COLD)
    found = spec_jax.DecodeQueue(
        made, enumerate([*PROMPTS, "x ="]), batch=2, max_prompt_tokens=24, max_new_tokens=NEW
    )
    return common.rows(result for _, result in sorted(found, key=lambda pair: pair[0]))


def cells(is_greedy: bool) -> dict[str, Callable[[], list[dict]]]:
    """Cells at temperature 0, or those above it."""
    if not is_greedy:
        return {
            f"zoo/{kind}/{strategy}": functools.partial(_cell, kind, strategy, shape, WARM)
            for (kind, strategy), shape in SAMPLED.items()
        }
    found = {
        f"zoo/{kind}/greedy": functools.partial(_cell, kind, "greedy", shape, COLD)
        for kind, shape in GREEDY.items()
    }
    return found | {"zoo/standalone/texts": _texts, "zoo/eagle3/queue": _queue}
