"""Llama, Qwen2, Qwen3 and MiMo: rotary attention and a gated feed-forward part in every layer."""

from __future__ import annotations

import jax

from spec_jax.models.caches.kv import KVCache
from spec_jax.models.config import ALIASES, MODEL_TYPES, ModelConfig
from spec_jax.models.families.registry import Family, register
from spec_jax.models.layers import Window, attention, mlp, rms_norm
from spec_jax.models.specs import ParamSpec, attention_specs, mlp_specs, norm_spec, outer_specs


def layer_table(config: ModelConfig) -> dict[str, ParamSpec]:
    """Returns the declared weights of one layer; all layers are alike."""
    prefix, D = "model.layers.{i}.", config.hidden_size
    return {
        "attention_norm": norm_spec(D, f"{prefix}input_layernorm"),
        **attention_specs(config, f"{prefix}self_attn."),
        "mlp_norm": norm_spec(D, f"{prefix}post_attention_layernorm"),
        **mlp_specs(config, f"{prefix}mlp."),
    }


def decoder_layer(
    layer: dict[str, jax.Array], x_BTD: jax.Array, cache: KVCache | None, index: int | jax.Array,
    window: Window, config: ModelConfig,
) -> tuple[jax.Array, KVCache | None]:
    """Applies one layer: attention, then the feed-forward part, each after its norm.

    Args:
      layer: the layer's weights.
      x_BTD: dtype[B,T,D], the residual stream.
      cache: is written, and attended over; None if the tokens are whole sequences.
      index: the layer's place in the cache.
      window: positions and mask of the tokens.
      config: the shape of the layer.

    Returns:
      dtype[B,T,D], and the cache with the window written.
    """  # fmt: skip
    h = rms_norm(x_BTD, layer["attention_norm"], config.rms_norm_eps)
    h, cache = attention(layer, h, cache, index, window, config)
    return mlp(layer, x_BTD + h, config), cache


register(Family(
    config=ModelConfig,
    model_types=(*MODEL_TYPES, *ALIASES),
    layer=decoder_layer,
    layer_tables=lambda config: [layer_table(config)] * config.num_hidden_layers,
    outer_table=outer_specs,
    can_scan=True,
    has_panels=True,
    mtp_layouts=("DeepSeek", "MiMo"),
))  # fmt: skip
