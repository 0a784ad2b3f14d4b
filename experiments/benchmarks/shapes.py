"""What the parts of the benchmark share: models with random weights, prompts, records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from spec_jax.config import SpeculativeConfig
from spec_jax.errors import ConfigError
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


def random_pair(config: ConfigDict) -> tuple[LoadedModel, LoadedModel]:
    """Returns target and draft of a part's config."""
    return (
        random_model("target", config.target, config.seed),
        random_model("draft", config.draft, config.seed + 1),
    )


def random_prompt(target: LoadedModel, config: ConfigDict) -> list[int]:
    """Returns ``prompt_tokens`` random ids."""
    draw = np.random.default_rng(config.seed)
    return draw.integers(target.model.vocab_size, size=config.prompt_tokens).tolist()


def synthetic_chain(num_draft: int, rate: float) -> SpeculativeConfig:
    """Returns the config of a chain whose every position is accepted at one rate."""
    return SpeculativeConfig(
        num_speculative_tokens=num_draft,
        rejection_sampling_strategy="synthetic",
        synthetic_conditional_rates=(rate,) * num_draft,
    )


def check_slots(config: ConfigDict, part: str, need: int, what: str = "rounds") -> None:
    """Raises ConfigError unless the caches of a part hold ``need`` tokens."""
    if need > config[part].slots:
        raise ConfigError(f"{part}.slots is {config[part].slots}; prompt and {what} need {need}")


def facts(model: LoadedModel, shape: ConfigDict) -> dict[str, Any]:
    """Returns a random model for the record."""
    return {"parameters": model.num_params, **shape.to_dict()}


def listed(times: Mapping[Any, np.ndarray]) -> dict[str, list[float]]:
    """Returns times for the record, by name as text."""
    return {str(name): values.tolist() for name, values in times.items()}
