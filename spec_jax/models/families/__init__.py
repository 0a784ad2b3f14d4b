"""Model families, one module each, which registers its family when it is imported.

A family from outside of the package is registered in the same way. See
``tests/support/gated_family.py`` for a complete one.

    from spec_jax.models.families import Family, register

    register(Family(config=MyConfig, model_types=("mine",), layer=my_layer, ...))
"""

from spec_jax.models.families import (
    bamba,
    deepseek,
    glm4_moe,
    llama,
    mamba2,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from spec_jax.models.families.registry import (
    AnyConfig,
    Family,
    LayerKind,
    family_of,
    family_of_type,
    init_cache,
    layer_kinds,
    module_layer,
    places_of,
    read_config,
    register,
)

__all__ = [
    "AnyConfig",
    "Family",
    "LayerKind",
    "bamba",
    "deepseek",
    "family_of",
    "family_of_type",
    "glm4_moe",
    "init_cache",
    "layer_kinds",
    "llama",
    "mamba2",
    "module_layer",
    "places_of",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "read_config",
    "register",
]
