"""Shapes of published models to plan with, as their config.json states them, without weights."""

from __future__ import annotations

import pathlib

from spec_jax import hub, zoo
from spec_jax.errors import ConfigError, WeightsError
from spec_jax.models import gguf
from spec_jax.models.config import ModelConfig, RopeConfig
from spec_jax.models.families import AnyConfig, read_config
from spec_jax.models.families.qwen3_5 import Qwen35Config
from spec_jax.models.families.qwen3_moe import Qwen3MoeConfig
from spec_jax.models.files import exists
from spec_jax.models.runs import laid_out

_LLAMA = {"rms_norm_eps": 1e-5}
_SMOLLM2 = _LLAMA | {"vocab_size": 49152, "max_position_embeddings": 8192}
_SMOLLM2 |= {"rope": RopeConfig(rope_theta=1e5)}
_LLAMA3 = _LLAMA | {"vocab_size": 128256, "max_position_embeddings": 131072}
_LLAMA31, _LLAMA32 = (
    _LLAMA3 | {"rope": RopeConfig("llama3", 5e5, factor, original_max_position_embeddings=8192)}
    for factor in (8, 32)
)
_VICUNA = _LLAMA | {"vocab_size": 32000, "max_position_embeddings": 2048}
_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope": RopeConfig(rope_theta=1e6),
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "tie_word_embeddings",
)
_MODELS = {  # what models of a kind share, and the sizes of each
    "llama-3.1-8b": (_LLAMA31, 4096, 14336, 32, 32, 8, False),
    "llama-3.1-70b": (_LLAMA31, 8192, 28672, 80, 64, 8, False),
    "llama-3.1-405b": (_LLAMA31, 16384, 53248, 126, 128, 8, False),
    "llama-3.2-1b": (_LLAMA32, 2048, 8192, 16, 32, 8, True),
    "qwen3-8b": (_QWEN3, 4096, 12288, 36, 32, 8, False),
    "qwen3-14b": (_QWEN3, 5120, 17408, 40, 40, 8, False),
    "qwen3-32b": (_QWEN3, 5120, 25600, 64, 64, 8, False),
    "qwen3-0.6b": (_QWEN3, 1024, 3072, 28, 16, 8, True),
    "qwen3-4b": (_QWEN3, 2560, 9728, 36, 32, 8, True),
    "vicuna-7b": (_VICUNA, 4096, 11008, 32, 32, 32, False),
    "vicuna-13b": (_VICUNA, 5120, 13824, 40, 40, 40, False),
    "vicuna-33b": (_VICUNA, 6656, 17920, 60, 52, 52, False),
    "smollm2-135m": (_SMOLLM2, 576, 1536, 30, 9, 3, True),
}
_OTHERS = {
    "qwen3-30b-a3b": Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        **_QWEN3 | {"model_type": "qwen3_moe"},
    ),
    "qwen3.5-27b": Qwen35Config(
        vocab_size=248320,
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=48,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=262144,
        rope=RopeConfig(rope_theta=1e7),
    ),
}
PRESETS: dict[str, AnyConfig] = {
    name: ModelConfig(**shared, **dict(zip(_SIZES, sizes, strict=True)))
    for name, (shared, *sizes) in _MODELS.items()
} | _OTHERS


def find_config(name: str, platform: str = "") -> AnyConfig:
    """Returns a preset by its name, or the config of a model by its name, path or id of the hub.

    Args:
      name: of a preset or of the zoo; the path of a directory with a config.json, of that file or
        of a GGUF file; or an id of the Hugging Face hub, of which weights are not downloaded,
        unless they are GGUF.
      platform: whose layout of the layers it has, see ``runs.laid_out``; "": they are apart.

    Raises:
      ConfigError: it is none of these, or the family is not supported.
    """
    if name in PRESETS:
        return laid_out(PRESETS[name], platform)
    path = zoo.path(name) or pathlib.Path(name)
    path = gguf.within(path.parent if path.name == "config.json" else path)
    if not exists(path / "config.json"):
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
    return laid_out(read_config(path), platform)
