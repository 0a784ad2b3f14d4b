"""What the parts of the benchmark share: models with random weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from spec_jax.loading import LoadedModel
from spec_jax.models import transformer
from spec_jax.models.config import ModelConfig
from spec_jax.models.params import init_params

DTYPES = ("float32", "bfloat16")  # that parts compare


def random_model(name: str, shape: Mapping[str, Any] | Any, seed: int) -> LoadedModel:
    """Returns a model with random float32 weights.

    Args:
      name: For reports.
      shape: A config of a model, or the fields of ``ModelConfig``.
      seed: Of the weights.
    """
    config = ModelConfig(**shape) if isinstance(shape, Mapping | ConfigDict) else shape
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(seed))
    return LoadedModel(name, transformer.model(config), params, None, config, config.eos_token_id)


def random_weights(shapes: Any) -> Any:
    """Returns arrays of some shapes: small random matrices, vectors of ones, integers of zero.

    They are drawn one by one on the device, which takes seconds for billions of them.

    Args:
      shapes: A tree of arrays or of their shapes.
    """

    @functools.partial(jax.jit, static_argnames=("shape", "dtype"))
    def draw(key, *, shape, dtype):
        return jax.random.uniform(key, shape, dtype, -0.03, 0.03)

    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))

    def fill(key, like):
        if not jnp.issubdtype(like.dtype, jnp.floating):
            return jnp.zeros(like.shape, like.dtype)
        if like.ndim < 2:
            return jnp.ones(like.shape, like.dtype)
        return draw(key, shape=like.shape, dtype=like.dtype)

    return jax.tree.unflatten(structure, map(fill, keys, leaves))


def facts(model: LoadedModel, shape: ConfigDict) -> dict[str, Any]:
    """Returns a random model for the record."""
    return {"parameters": model.num_params, **shape.to_dict()}
