"""Llama, Mistral, Qwen2, Qwen3, MiMo: rotary attention and a gated MLP in every layer."""

from __future__ import annotations

from spec_jax.models.config import ALIASES, MODEL_TYPES, ModelConfig
from spec_jax.models.families.registry import Family, register
from spec_jax.models.layers import attention, mlp, pre_norm_layer
from spec_jax.models.specs import ParamSpec, attention_specs, layer_specs, mlp_specs, outer_specs


def layer_table(config: ModelConfig) -> dict[str, ParamSpec]:
    """Returns the declared weights of one layer; all layers are alike."""
    prefix = "model.layers.{i}."
    attends = attention_specs(config, f"{prefix}self_attn.")
    return layer_specs(config, attends, mlp_specs(config, f"{prefix}mlp."))


decoder_layer = pre_norm_layer(attention, mlp)

register(
    Family(
        config=ModelConfig,
        model_types=(*MODEL_TYPES, *ALIASES),
        layer=decoder_layer,
        layer_tables=lambda config: [layer_table(config)] * config.num_hidden_layers,
        outer_table=outer_specs,
        can_scan=True,
        has_panels=True,
        recycles_normed=True,
        mtp_formats=("DeepSeek", "MiMo"),
    )
)
