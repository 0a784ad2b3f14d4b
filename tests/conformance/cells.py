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
from support import block_heads, block_kind, gate_kind, mtp_modules, tiny_models
from support.tiny_models import LLAMA, loaded, random_weights

from docs.examples import my_drafter
from spec_jax import SpeculativeConfig, SpeculativeDecoder, host_drafter
from spec_jax.drafters import registry
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.loading import LoadedModel, load_draft, random_head
from spec_jax.models import transformer

K = 3
TARGET = loaded(LLAMA)
DRAFT = dataclasses.replace(TARGET, name="draft", params=random_weights(LLAMA, 1))
LAYERS = {
    name.replace("-", " "): dataclasses.replace(
        layer, num_hidden_layers=1, max_position_embeddings=256
    )
    for name, layer in mtp_modules.KINDS.items()
}
SLIDING_LAYER = dataclasses.replace(tiny_models.MISTRAL, num_hidden_layers=1)
LOOP = ("linear_attention", "full_attention") * 2
FAMILIES = {
    "llama in a loop": dataclasses.replace(LLAMA, scan_layers=True),
    "mamba2": tiny_models.MAMBA2,
    "bamba": tiny_models.BAMBA,
    "qwen3.5": tiny_models.QWEN35,
    "deepseek": tiny_models.DEEPSEEK_TARGET,
    "glm4": tiny_models.GLM4_MOE,
    "qwen3 of experts": tiny_models.QWEN3_MOE,
    "qwen3 next": tiny_models.QWEN3_NEXT_TARGET,
    "windows": tiny_models.MIXED_WINDOWS,
    "windows in a loop": dataclasses.replace(tiny_models.MIXED_WINDOWS, scan_layers=True),
    "qwen3.5 in a loop": dataclasses.replace(
        tiny_models.QWEN35_MOE, num_hidden_layers=4, layer_types=LOOP, scan_layers=True
    ),
}
# The layers after which a target of each cache drafts for itself.
EXITS = {"llama in a loop": 1, "deepseek": 1, "qwen3.5": 1}
EXITS |= {"bamba": 2, "qwen3.5 in a loop": 2, "windows": 2}
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
      target: what it drafts for.
    """

    method: str
    draft: Any = None
    drafter: Any = None
    target: LoadedModel = TARGET


def larger(head, factor=6.0):
    grow = lambda w: factor * w if jnp.issubdtype(w.dtype, jnp.floating) and w.ndim > 1 else w
    return dataclasses.replace(head, params=jax.tree.map(grow, head.params))


def headed(config):
    head = random_head(config, jax.random.key(1))
    return Subject(registry.kind_of(config).name, larger(head))


def of_family(config):
    """A model that drafts for another one of its family, with weights that are near."""
    params = [random_weights(config, seed) for seed in (0, 5)]
    target = LoadedModel("target", transformer.model(config), params[0], config=config)
    near = jax.tree.map(lambda a, b: a + 0.15 * b if a.ndim else a, *params)
    return Subject("standalone", dataclasses.replace(target, params=near), target=target)


def early_exit(config, num_layers=1):
    """The first layers of a target, whose weights are large."""
    model = transformer.model(config)
    target = LoadedModel("target", model, random_weights(config, 0), config=config)
    return Subject("self", load_draft(f"self:{num_layers}", target), target=target)


def repeat(prefix, k, seed):
    """Drafts that the last two tokens go on in turn, one to k of them."""
    return [prefix[-2:][i % 2 - 1] for i in range(1 + seed % k)] if len(prefix) > 1 else []


# Whatever the registry's kinds are trained for, and variants of their heads; then what is no kind.
SUBJECTS: dict[str, Callable[[], Subject]] = {
    "standalone": lambda: Subject("standalone", DRAFT),
    "ngram": lambda: Subject("ngram"),
    "suffix": lambda: Subject("suffix"),
    **{
        name: lambda way=way: headed(way.new(LLAMA))
        for name, (_, way) in registry.objectives().items()
    },
    "eagle3 with a window": lambda: headed(EagleConfig.of_target(LLAMA, 3, layer=SLIDING_LAYER)),
    "eagle3 of few ids": lambda: headed(EagleConfig.of_target(LLAMA, 3, 20)),
    "mtp in turn": lambda: headed(MtpConfig.of_target(LLAMA, protocol="sequential", num_modules=K)),
    **{
        f"mtp of {name}": lambda layer=layer: headed(
            mtp_modules.of_target(layer=layer, protocol="sequential", num_modules=K)
        )
        for name, layer in LAYERS.items()
    },
    **{f"on {name}": lambda config=config: of_family(config) for name, config in FAMILIES.items()},
    "self": lambda: early_exit(LLAMA),
    **{
        f"self on {name}": lambda name=name, n=n: early_exit(FAMILIES[name], n)
        for name, n in EXITS.items()
    },
    "gate": lambda: headed(gate_kind.new(LLAMA)),
    "block": lambda: headed(block_heads.new(LLAMA.hidden_size, LLAMA.vocab_size, taps=(1, 3))),
    "host": lambda: Subject("standalone", drafter=host_drafter(repeat)),
    "the documents' example": lambda: Subject("standalone", drafter=my_drafter.make),
}


@functools.cache
def subject(name: str) -> Subject:
    return SUBJECTS[name]()


def decoder(name: str, shape: str, rule: str, **options) -> SpeculativeDecoder:
    """The decoder of a cell; ``options`` are its own."""
    method, draft, drafter, target = subject(name)
    config = SpeculativeConfig(method, rejection_sampling_strategy=rule, **SHAPES[shape])
    return SpeculativeDecoder(target, draft, config, drafter=drafter, **options)
