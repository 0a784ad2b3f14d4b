"""What is tested for conformance: a drafter of each kind, with a shape of drafts and a rule.

A head has random weights, several times as large as they begin in training, so that what it drafts
depends on its states.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from support import block_heads, block_kind, gate_kind
from support.tiny_models import LLAMA, random_weights

from docs.examples import my_drafter
from spec_jax import SpeculativeConfig, SpeculativeDecoder, host_drafter
from spec_jax.drafters import registry
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.loading import LoadedModel, random_head
from spec_jax.models import transformer

K = 3
TARGET = LoadedModel("tiny", transformer.model(LLAMA), random_weights(LLAMA), config=LLAMA)
DRAFT = dataclasses.replace(TARGET, name="draft", params=random_weights(LLAMA, 1))
OWN_KINDS = (gate_kind.KIND, block_kind.KIND)
SHAPES = {
    "chain": {"num_speculative_tokens": K},
    "static": {"tree": (2, 2, 1)},
    "dynamic": {"num_speculative_tokens": 7, "tree": {"depth": 3, "top_k": 3}},
    "adaptive": {"adaptive": {"buckets": (0, K)}},
}


class Subject(NamedTuple):
    """A drafter of some kind.

    Attributes:
      method: its kind; of a drafter that is no kind, "standalone".
      draft: a model or a head, or None.
      drafter: of a drafter that is no kind.
      has_trees: whether it drafts trees too.
    """

    method: str
    draft: Any = None
    drafter: Any = None
    has_trees: bool = True


def larger(head, factor=6.0):
    grow = lambda w: factor * w if jnp.issubdtype(w.dtype, jnp.floating) and w.ndim > 1 else w
    return dataclasses.replace(head, params=jax.tree.map(grow, head.params))


def headed(config, **options):
    return Subject(
        registry.kind_of(config).name, larger(random_head(config, jax.random.key(1))), **options
    )


def repeat(prefix, k, seed):
    """Drafts that the last two tokens go on in turn."""
    return [prefix[-1 - i % 2] for i in range(min(k, len(prefix)))][::-1]


# Whatever the registry's kinds are trained for, and variants of their heads; then what is no kind.
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "standalone": lambda: Subject("standalone", DRAFT),
    "ngram": lambda: Subject("ngram", has_trees=False),
    "suffix": lambda: Subject("suffix", has_trees=False),
    **{
        name: lambda way=way: headed(way.new(LLAMA))
        for name, (_, way) in registry.objectives().items()
    },
    "eagle3 of few ids": lambda: headed(EagleConfig.of_target(LLAMA, 3, 20)),
    "mtp in turn": lambda: headed(
        MtpConfig.of_target(LLAMA, protocol="sequential", num_modules=K), has_trees=False
    ),
    "gate": lambda: headed(gate_kind.new(LLAMA)),
    "block": lambda: headed(
        block_heads.new(LLAMA.hidden_size, LLAMA.vocab_size, taps=(1, 3)), has_trees=False
    ),
    "host": lambda: Subject("standalone", drafter=host_drafter(repeat), has_trees=False),
    "the documents' example": lambda: Subject(
        "standalone", drafter=my_drafter.make, has_trees=False
    ),
}


@functools.cache
def subject(name: str) -> Subject:
    return SUBJECTS[name]()


def decoder(name: str, shape: str, rule: str, **options) -> SpeculativeDecoder:
    """The decoder of a cell; ``options`` are its own."""
    method, draft, drafter, _ = subject(name)
    config = SpeculativeConfig(method, rejection_sampling_strategy=rule, **SHAPES[shape])
    return SpeculativeDecoder(TARGET, draft, config, drafter=drafter, **options)
