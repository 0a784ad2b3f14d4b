"""Llama, Qwen2, Qwen3 and MiMo: rotary attention and a gated feed-forward part in every layer."""

from __future__ import annotations

import jax

from spec_jax.models.config import ALIASES, MODEL_TYPES, ModelConfig
from spec_jax.models.families.registry import Family, register
from spec_jax.models.layers import Window, attention, mlp, rms_norm
from spec_jax.models.specs import ParamSpec, attention_specs, mlp_specs, outer_specs


def layer_table(config: ModelConfig) -> dict[str, ParamSpec]:
    """The weights of one layer, by our name, of a model whose layers are all alike."""
    prefix, D = "model.layers.{i}.", config.hidden_size
    norm = lambda hf: ParamSpec((D,), ("embed",), f"{prefix}{hf}.weight", init="ones")
    return {
        "attention_norm": norm("input_layernorm"),
        **attention_specs(config, f"{prefix}self_attn."),
        "mlp_norm": norm("post_attention_layernorm"),
        **mlp_specs(config, f"{prefix}mlp."),
    }


def decoder_layer(
    layer: dict, x_BTD: jax.Array, cache, index, window: Window, config: ModelConfig
):
    """One decoder layer: attention and the feed-forward part, each behind its norm.

    Args:
      layer: its weights.
      x_BTD: dtype[B,T,D], the residual stream.
      cache: or None.
      index: the layer's, in the cache.
      window: where the tokens stand.
      config: the model's shape.

    Returns:
      dtype[B,T,D] and the cache with the window written.
    """
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
