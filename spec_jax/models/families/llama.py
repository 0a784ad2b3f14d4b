"""Llama, Mistral, Qwen2, Qwen3, MiMo: rotary attention and a gated MLP in every layer."""

from __future__ import annotations

import dataclasses

from spec_jax.models.caches.rolling import RollingCache
from spec_jax.models.config import ALIASES, MODEL_TYPES, ModelConfig
from spec_jax.models.families.registry import Family, LayerKind, register
from spec_jax.models.layers import attention, mlp, pre_norm_layer
from spec_jax.models.specs import ParamSpec, attention_specs, layer_specs, mlp_specs, outer_specs


def layer_table(config: ModelConfig) -> dict[str, ParamSpec]:
    """Returns the declared weights of one layer; all layers are alike."""
    prefix = "model.layers.{i}."
    attends = attention_specs(config, f"{prefix}self_attn.")
    return layer_specs(config, attends, mlp_specs(config, f"{prefix}mlp."))


decoder_layer = pre_norm_layer(attention, mlp)


def sliding_layer(layer, x, cache, index, window, config):
    """``decoder_layer`` with a sliding window."""
    return decoder_layer(layer, x, cache, index, window.within(config.sliding_window), config)


_KINDS = {False: LayerKind(decoder_layer), True: LayerKind(sliding_layer, RollingCache.create)}


def one_layer(config: ModelConfig) -> ModelConfig:
    """Returns the config of the layer of an MTP module: the last of such a model."""
    return dataclasses.replace(config, num_hidden_layers=1, layer_types=config.layer_types[-1:])


register(
    Family(
        config=ModelConfig,
        model_types=(*MODEL_TYPES, *ALIASES),
        kinds=lambda config: [_KINDS[size is not None] for size in config.windows],
        layer_tables=lambda config: [layer_table(config)] * config.num_hidden_layers,
        outer_table=outer_specs,
        can_scan=True,
        has_panels=True,
        module_layer=one_layer,
        recycles_normed=True,
        mtp_formats=("DeepSeek", "MiMo"),
    )
)
