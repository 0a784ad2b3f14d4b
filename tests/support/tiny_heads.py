"""A target of large weights, and random weights for heads of every kind, of norms too."""

import dataclasses

import jax.numpy as jnp
from support.tiny_models import LLAMA, large_weights, random_tensor

from spec_jax.drafters import registry
from spec_jax.drafters.block import config as block
from spec_jax.drafters.eagle.model import EagleConfig
from spec_jax.drafters.mtp.model import MtpConfig

CONFIG = dataclasses.replace(LLAMA, max_position_embeddings=128)
TARGET = large_weights("tiny", CONFIG, 2)
UNROLLED = {
    "eagle-1": EagleConfig.of_target(CONFIG, 1),
    "eagle-3": EagleConfig.of_target(CONFIG, 3),
    "eagle-3, reduced, normed": EagleConfig.of_target(CONFIG, 3, 20, norm_output=True),
    "mtp": MtpConfig.of_target(CONFIG),
}
SIZE, SLIDING = dict(block_size=4, taps=(1, 3)), dict(windows=(None, 3), is_causal=(False, True))
PAIRS = dict(conv_group_size=4, selector_rank=6, selector_top_k=8)
BLOCKS = {
    "dflash": block.DFlashConfig.of_target(CONFIG, **SLIDING, **SIZE),
    "dspark": block.DSparkConfig.of_target(CONFIG, markov_rank=6, **SIZE),
    "treeflash": block.TreeFlashConfig.of_target(CONFIG, windows=(3, None), **SIZE),
    "dflash2": block.DFlash2Config.of_target(CONFIG, **PAIRS, **SIZE),
}


def random_params(config, prefix="head"):
    """Weights of a head, which follow from the names of its tensors under ``prefix``."""

    def draw(table, name):
        if isinstance(table, dict):
            return {key: draw(spec, f"{name}.{key}") for key, spec in table.items()}
        return jnp.asarray(random_tensor(name, table.shape, 0))

    return draw(registry.kind_of(config).head.table(config), prefix)
