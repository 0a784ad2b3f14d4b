"""Instructions, donated arrays and copies of whole caches in compiled loops.

They are read off what XLA writes down while a decoder runs (``--xla_dump_to``), so no name of
the loop is needed. The largest program with a loop in it is taken for the decoding loop.
"""

from __future__ import annotations

import functools
import math
import os
import pathlib
import re
from collections.abc import Callable

from goldens import common, tiny

import spec_jax

# All keys of the draft's one layer, the smallest array that is a cache as a whole: B=1, G=2, H=4
# and 256 slots. No weight and no row of logits is as large.
CACHE_ELEMENTS = 1 * 2 * 256 * 4
PROMPT, NEW = [[3, 1, 4, 1, 5]], 200
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?[\w.\-]+ = \(?(\w+)\[([\d,]*)\]\S* ([\w\-]+)\(")
_NAMES = re.compile(
    r"(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_COPIES = ("copy", "copy-start")
_MOVES = (*_COPIES, "slice", "dynamic-slice", "transpose", "concatenate", "gather")


def folder() -> pathlib.Path:
    """Where XLA writes programs, by the flags of this process."""
    return pathlib.Path(re.search(r"--xla_dump_to=(\S+)", os.environ["XLA_FLAGS"]).group(1))


def _called(line: str) -> list[str]:
    branches = [n.strip(" %") for group in _BRANCHES.findall(line) for n in group.split(",")]
    return _NAMES.findall(line) + branches


def _in_loops(text: str) -> list[str]:
    """The instructions of every loop's body, of what it calls too."""
    computations, current = {}, None
    for line in text.splitlines():
        if not line.startswith(" ") and line.rstrip().endswith("{"):
            name = re.search(r"(?:ENTRY )?%?([\w.\-]+) ", line).group(1)
            current = computations.setdefault(name, [])
        elif current is not None and line.startswith(" "):
            current.append(line)
    lines = [line for body in computations.values() for line in body]
    waiting, inside = [n for line in lines if " while(" in line for n in _called(line)], set()
    while waiting:
        name = waiting.pop()
        if name not in inside:
            inside.add(name)
            waiting += [n for line in computations[name] for n in _called(line)]
    return [line for name in sorted(inside) for line in computations[name]]


def _reading(text: str) -> dict[str, int]:
    def is_large(found):
        return math.prod(map(int, filter(None, found.group(2).split(",")))) >= CACHE_ELEMENTS

    found = list(filter(None, map(_INSTRUCTION.match, _in_loops(text))))
    kinds = [match.group(3) for match in found if match.group(1) == "f32" and is_large(match)]
    return {
        "instructions": sum(map(bool, map(_INSTRUCTION.match, text.splitlines()))),
        "instructions in loops": len(found),
        "copies of caches in loops": sum(kind in _COPIES for kind in kinds),
        "moves of caches in loops": sum(kind in _MOVES for kind in kinds),
        "donated arrays": text.splitlines()[0].count("may-alias") + text.count("must-alias"),
    }


def _cell(kind: str, strategy: str, shape: dict) -> dict[str, int]:
    before = set(folder().iterdir())
    draft = {"standalone": lambda: tiny.llama(1), "eagle": lambda: tiny.head("eagle3")}
    config = None if kind == "plain" else common.config(kind, strategy, **shape)
    own = draft[kind]() if kind in draft else None
    decoder = spec_jax.SpeculativeDecoder(tiny.llama(), own, config)
    sampler = spec_jax.SamplerConfig(temperature=0.0 if strategy == "greedy" else 0.8)
    decoder.generate(PROMPT, NEW, sampler=sampler, stop_tokens=())
    new = set(folder().glob("*after_optimizations.txt")) - before
    texts = [file.read_text() for file in new]
    return _reading(max((text for text in texts if " while(" in text), key=len))


def cells() -> dict[str, Callable[[], dict[str, int]]]:
    """Every loop by name, as a function that compiles it."""
    chain, static = {"num_speculative_tokens": 4}, {"tree": (2, 2)}
    grown = {"tree_depth": 3, "tree_top_k": 3, "num_speculative_tokens": 8}
    found = {
        "plain/greedy": ("plain", "greedy", {}), "plain/sampled": ("plain", "match", {}),
        "standalone/greedy": ("standalone", "greedy", chain),
        "standalone/residual": ("standalone", "residual", chain),
        "eagle3/greedy": ("eagle", "greedy", chain), "eagle3/match": ("eagle", "match", chain),
        "standalone/traversal/static": ("standalone", "traversal", static),
        "eagle3/greedy/dynamic": ("eagle", "greedy", grown),
        "ngram/greedy": ("ngram", "greedy", chain),
    }  # fmt: skip
    return {name: functools.partial(_cell, *what) for name, what in found.items()}
