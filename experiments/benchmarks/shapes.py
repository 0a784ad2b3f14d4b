"""What the parts of the benchmark share: models with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
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


def facts(model: LoadedModel, shape: ConfigDict) -> dict[str, Any]:
    """Returns a random model for the record."""
    return {"parameters": model.num_params, **shape.to_dict()}
