"""DFlash, DSpark and TreeFlash heads with random weights, for tiny targets."""

import jax
import jax.numpy as jnp
import numpy as np
from support.tiny_models import LLAMA, TINY, loaded, random_tensor

from spec_jax.drafters.block.config import (
    DFlash2Config,
    DFlashConfig,
    DSparkConfig,
    TreeFlashConfig,
)
from spec_jax.drafters.block.model import block_table
from spec_jax.loading import LoadedHead
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.models.params import flat_table, nest

TARGET = loaded(LLAMA)
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
    """Of each weight, by its dotted name, that in a file of z-lab, and its ``ParamSpec``."""
    found = {}
    for name, spec in flat_table(block_table(config)).items():
        prefix = f"layers.{name.split('.')[1]}." if name.startswith("layers.") else ""
        found[name] = spec.hf_name.replace("model.layers.{i}.", prefix), spec
    return found


def tensors_of(config, seed=0):
    """Random published tensors by name."""
    shape = lambda spec: spec.shape[::-1] if spec.is_linear else spec.shape
    stored = file_names(config).values()
    return {name: 2 * random_tensor(name, shape(spec), seed) for name, spec in stored}


def head_of(config, seed=0):
    """The head of ``tensors_of``."""
    tensors = tensors_of(config, seed)
    turned = lambda name, spec: tensors[name].T if spec.is_linear else tensors[name]
    names = file_names(config).items()
    params = nest({ours: jnp.asarray(turned(*stored)) for ours, stored in names})
    return LoadedHead(config.name, config, params)


def features_of(config, tokens):
    """The target's tapped states dtype[B,T,E] of whole sequences."""
    return transformer.forward(
        TARGET.params, jnp.asarray(tokens), config=LLAMA, taps=config.taps
    ).features


def exact(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
