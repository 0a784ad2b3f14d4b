"""A model family as someone outside of the package adds it: its whole definition.

Attention and feed-forward part stand side by side, and a learned number scales the attention.
"""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from spec_jax.models.config import ModelConfig
from spec_jax.models.families import Family, register
from spec_jax.models.layers import Window, attention, rms_norm
from spec_jax.models.specs import ParamSpec, attention_specs, mlp_specs, norm_spec, outer_specs


@dataclasses.dataclass(frozen=True)
class GatedConfig(ModelConfig):
    architectures: ClassVar[Mapping[str, str]] = {"gated": "GatedForCausalLM"}
    model_type: str = "gated"


def layer_table(config: GatedConfig) -> dict[str, ParamSpec]:
    prefix, D = "model.layers.{i}.", config.hidden_size
    return {
        "layer_norm": norm_spec(D, f"{prefix}norm"),
        "alpha": ParamSpec((1,), ("one",), f"{prefix}alpha", init="ones"),
        **attention_specs(config, f"{prefix}attention."),
        **mlp_specs(config, f"{prefix}mlp."),
    }


def decoder_layer(layer, x_BTD: jax.Array, cache, index, window: Window, config: GatedConfig):
    h = rms_norm(x_BTD, layer["layer_norm"], config.rms_norm_eps)
    attended, cache = attention(layer, h, cache, index, window, config)
    fed = (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]
    return x_BTD + jnp.tanh(layer["alpha"]) * attended + fed, cache


register(
    Family(
        config=GatedConfig,
        model_types=("gated",),
        layer=decoder_layer,
        layer_tables=lambda config: [layer_table(config)] * config.num_hidden_layers,
        outer_table=outer_specs,
        can_scan=True,
        recycles_normed=True,
        mtp_formats=("DeepSeek",),
    )
)
