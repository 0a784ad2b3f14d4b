"""DFlash, DSpark and TreeFlash heads with random weights, for tiny targets."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from support.tiny_models import LLAMA, TINY, random_tensor, random_weights

from spec_jax.drafters.block.config import (
    DFlash2Config,
    DFlashConfig,
    DSparkConfig,
    TreeFlashConfig,
)
from spec_jax.drafters.block.model import block_table
from spec_jax.loading import LoadedHead, LoadedModel
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.models.params import flat_table

TARGET = LoadedModel("tiny", transformer.model(LLAMA), random_weights(LLAMA), config=LLAMA)
SLIDING = dict(windows=(3, None), is_causal=(True, False))
# A sliding causal layer before one that sees all; and blocks that are causal as a whole.
HEADS = {
    "dflash": DFlashConfig.of_target(LLAMA, block_size=5, taps=(1, 2), **SLIDING),
    "dspark": DSparkConfig.of_target(LLAMA, block_size=4, markov_rank=3),
    "gated": DSparkConfig.of_target(
        LLAMA,
        block_size=5,
        markov_rank=3,
        markov_head_type="gated",
        is_anchor_first=False,
        confidence_with_markov=False,
        is_causal=(True, True),
        windows=(4, None),
    ),
    "blocks of slots": DFlashConfig.of_target(
        LLAMA,
        block_size=5,
        layer=ModelConfig(**TINY, num_attention_heads=4, model_type="qwen3", attention="xla"),
        windows=(3, 2),
        is_causal=(True, False),
    ),
    "treeflash": TreeFlashConfig.of_target(LLAMA, block_size=5),
    "dflash2": DFlash2Config.of_target(
        LLAMA,
        block_size=5,
        conv_kernel_size=3,
        conv_group_size=4,
        selector_rank=3,
        selector_top_k=6,
        windows=(3, None),
    ),
}


def file_names(config):
    """Of each weight, by its dotted name, that in a file of z-lab."""
    named = {}
    for name, spec in flat_table(block_table(config)).items():
        prefix = f"layers.{name.split('.')[1]}." if name.startswith("layers.") else ""
        named[name] = spec.hf_name.replace("model.layers.{i}.", prefix)
    return named


def nested(flat):
    """Dicts in dicts, of names joined by dots."""
    out = {}
    for name, value in flat.items():
        *outer, last = name.split(".")
        functools.reduce(lambda d, key: d.setdefault(key, {}), outer, out)[last] = value
    return out


def tensors_of(config, seed=0):
    """Random published tensors by name."""
    specs, names = flat_table(block_table(config)), file_names(config)
    shape = lambda spec: spec.shape[::-1] if spec.is_linear else spec.shape
    return {names[n]: 2 * random_tensor(names[n], shape(s), seed) for n, s in specs.items()}


def head_of(config, seed=0):
    """The head of ``tensors_of``."""
    specs, names, tensors = (
        flat_table(block_table(config)),
        file_names(config),
        tensors_of(config, seed),
    )
    read = lambda n, spec: tensors[names[n]].T if spec.is_linear else tensors[names[n]]
    params = nested({n: jnp.asarray(read(n, spec)) for n, spec in specs.items()})
    return LoadedHead(config.name, config, params)


def features_of(config, tokens):
    """The target's tapped states dtype[B,T,E] of whole sequences."""
    return transformer.forward(
        TARGET.params, jnp.asarray(tokens), config=LLAMA, taps=config.taps
    ).features


def exact(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
