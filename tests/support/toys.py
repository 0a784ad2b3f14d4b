"""Decoders of toys: every kind of drafter for a target that is a table of logits of six ids.

The heads have a layer of attention, whose rounding is far below the differences of their logits.
One batch mixes rows of several temperatures, filters and penalties.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import spec_jax
from spec_jax import testing
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig
from spec_jax.loading import random_head
from spec_jax.models.config import ModelConfig


def values(tree, seed: int = 0, scale: float = 0.2):
    """The same pytree with values that NumPy draws by the name of each leaf; integers stay."""

    def leaf(path, old):
        name = jax.tree_util.keystr(path)
        if not jnp.issubdtype(old.dtype, jnp.floating):
            return old
        stream = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
        draw = stream.standard_normal(old.shape)
        return jnp.asarray(1 + 0.1 * draw if "norm" in name else scale * draw, old.dtype)

    return jax.tree_util.tree_map_with_path(leaf, tree)


def config_of(method: str, strategy: str | None, **options) -> spec_jax.SpeculativeConfig:
    """A configuration from flat options."""
    return spec_jax.SpeculativeConfig(
        speculative_method=method, rejection_sampling_strategy=strategy, **options
    )


def samplers(*changes: dict) -> list[spec_jax.SamplerConfig]:
    """One sampler a row, with seeds of their own."""
    return [spec_jax.SamplerConfig(**{"seed": 11 + i, **c}) for i, c in enumerate(changes)]


def with_params(loaded, name: str, params):
    return dataclasses.replace(loaded, name=name, params=params)


V, K = 6, 3
COLD = samplers({}, {"repetition_penalty": 1.3}, {}, {"frequency_penalty": 0.4})
MIXED = samplers(
    {},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.2},
    {"temperature": 0.8, "top_k": 4, "min_p": 0.02, "logit_bias": ((2, 0.5),)},
    {"temperature": 1.3},
)
SHAPES = {
    "chain": {"num_speculative_tokens": K},
    "static": {"tree": (2, 2, 1)},
    "dynamic": {"tree_depth": 3, "tree_top_k": 3, "num_speculative_tokens": 7},
}


@functools.cache
def target():
    return testing.mock_model(V, 0, scale=1.5)


@functools.cache
def draft():
    noise = testing.toy_params(V, 1)["logits"]
    return with_params(target(), "draft", {"logits": target().params["logits"] + 0.8 * noise})


@functools.cache
def head(kind: str):
    """A head with random values for the toy, whose features are its logits."""
    options = dict(
        num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=256
    )
    layer = ModelConfig(
        vocab_size=V, hidden_size=V, intermediate_size=10, num_hidden_layers=1, **options
    )
    make = {
        "eagle1": lambda: EagleConfig.of_target(layer, 1, taps=(2,)),
        "eagle3": lambda: EagleConfig.of_target(layer, 3, 5, taps=(1,)),
        "mtp": lambda: MtpConfig.of_target(layer),
        "mtp-sequential": lambda: MtpConfig.of_target(layer, protocol="sequential", num_modules=K),
    }[kind]
    loaded = random_head(make(), jax.random.key(0))
    return with_params(loaded, kind, values(loaded.params, scale=0.7))


def decoder(kind: str, strategy: str, shape: dict, **options) -> spec_jax.SpeculativeDecoder:
    """A decoder of the toy target.

    Args:
      kind: of drafter, "plain" for none.
      strategy: the rule.
      shape: of the drafts, as options of the configuration.
      **options: of the decoder.
    """
    options = {"target_sampler": COLD if strategy == "greedy" else MIXED, **options}
    if kind == "plain":
        return spec_jax.SpeculativeDecoder(target(), **options)
    if kind in ("standalone", "ngram", "suffix"):
        config = config_of(kind, strategy, **shape)
        own = draft() if kind == "standalone" else None
        return spec_jax.SpeculativeDecoder(target(), own, config, **options)
    loaded = head(kind)
    config = config_of(loaded.method, strategy, **shape)
    embed = values({"embed": jnp.zeros((V, V))})
    params = {"head": loaded.params, "target": {**target().params, **embed}}
    model = target().model
    drafter = loaded.kind.make_drafter(loaded, model, config)
    return spec_jax.SpeculativeDecoder(
        target(), with_params(target(), "head", params), config, drafter=drafter, **options
    )
