"""Model families, one module each, which registers its family when it is imported.

A family from outside of the package is registered in the same way. See
``tests/support/gated_family.py`` for a complete one.

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
    "AnyConfig",
    "Family",
    "bamba",
    "deepseek",
    "family_of",
    "family_of_type",
    "llama",
    "mamba2",
    "qwen3_next",
    "read_config",
    "register",
]
