"""The model families. Each registers itself when it is imported; one from outside does the same.

    from spec_jax.models.families import Family, register

    register(Family(config=MyConfig, model_types=("mine",), layer=my_layer, ...))
"""

from spec_jax.models.families import bamba, deepseek, llama, mamba2, qwen3_next
from spec_jax.models.families.registry import (
    AnyConfig,
    Family,
    family_of,
    family_of_type,
    read_config,
    register,
)

__all__ = [
    "AnyConfig", "Family", "bamba", "deepseek", "family_of", "family_of_type", "llama", "mamba2",
    "qwen3_next", "read_config", "register",
]  # fmt: skip
