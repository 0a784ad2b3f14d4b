"""The model families that Hugging Face directories may hold, by ``model_type``."""

from __future__ import annotations

import pathlib

from spec_jax.errors import ConfigError
from spec_jax.models.config import ALIASES, MODEL_TYPES, ModelConfig, read_json
from spec_jax.models.families.bamba import BambaConfig
from spec_jax.models.families.mamba2 import Mamba2Config

AnyConfig = ModelConfig | Mamba2Config | BambaConfig
_CONFIGS = {
    **dict.fromkeys((*MODEL_TYPES, *ALIASES), ModelConfig),
    "mamba2": Mamba2Config,
    "bamba": BambaConfig,
}


def read_config(directory: str | pathlib.Path) -> AnyConfig:
    """Reads ``config.json`` of a Hugging Face directory; stop tokens of
    ``generation_config.json`` take precedence, as they do in generation there.

    Raises:
      WeightsError: no readable config.json, or an unreadable generation_config.json.
      ConfigError: a family that is not supported.
    """
    directory = pathlib.Path(directory)
    hf = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = read_json(generation).get("eos_token_id")
        if eos is not None:
            hf["eos_token_id"] = eos
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in _CONFIGS:
        known = ", ".join(_CONFIGS)
        raise ConfigError(f"model_type {kind!r} is not supported; known: {known}")
    return _CONFIGS[kind].from_hf(hf)
