"""Shapes of published models to plan with, as their config.json states them, without weights."""

from __future__ import annotations

import dataclasses
import pathlib

from spec_jax import hub
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models.config import ModelConfig, RopeConfig
from spec_jax.models.families import AnyConfig, family_of, read_config


def _llama(**sizes) -> ModelConfig:
    return ModelConfig(rms_norm_eps=1e-5, scan_layers=True, **sizes)


def _llama3(factor: float, **sizes) -> ModelConfig:
    rope = RopeConfig("llama3", 5e5, factor, original_max_position_embeddings=8192)
    return _llama(vocab_size=128256, max_position_embeddings=131072, rope=rope, **sizes)


def _qwen3(**sizes) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3",
        vocab_size=151936,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope=RopeConfig(rope_theta=1e6),
        scan_layers=True,
        **sizes,
    )


PRESETS: dict[str, ModelConfig] = {
    "llama-3.1-8b": _llama3(
        8,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "llama-3.1-70b": _llama3(
        8,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "llama-3.1-405b": _llama3(
        8,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
    ),
    "llama-3.2-1b": _llama3(
        32,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _qwen3(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32
    ),
    "qwen3-14b": _qwen3(
        hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40
    ),
    "qwen3-32b": _qwen3(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64
    ),
    "qwen3-0.6b": _qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": _qwen3(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "vicuna-7b": _llama(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
    ),
    "vicuna-13b": _llama(
        vocab_size=32000,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        max_position_embeddings=2048,
    ),
    "vicuna-33b": _llama(
        vocab_size=32000,
        hidden_size=6656,
        intermediate_size=17920,
        num_hidden_layers=60,
        num_attention_heads=52,
        max_position_embeddings=2048,
    ),
}


def find_config(name: str) -> AnyConfig:
    """Returns a preset by its name, or the config of a Hugging Face directory or of the hub.

    Layers are scanned where the family's can be, as suits accelerators.

    Args:
      name: of a preset; the path of a directory with a config.json, or that of the file; or an id
        of the Hugging Face hub, of which the weights are not downloaded.

    Raises:
      ConfigError: it is none of these, or the family is not supported.
    """
    if name in PRESETS:
        return PRESETS[name]
    path = pathlib.Path(name)
    path = path.parent if path.name == "config.json" else path
    if not (path / "config.json").exists():
        why = (
            f"model is {name!r}; expected one of {', '.join(PRESETS)}, a directory with a "
            "config.json, or an id of the Hugging Face hub"
        )
        if not hub.is_id(name):
            raise ConfigError(why)
        try:
            path = hub.directory_of(name, has_weights=False)
        except WeightsError as error:
            raise ConfigError(f"{why}: {error}") from error
    config = read_config(path)
    return dataclasses.replace(config, scan_layers=True) if family_of(config).can_scan else config
