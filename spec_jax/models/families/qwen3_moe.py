"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spec_jax.errors import ConfigError
from spec_jax.models.checks import check_sizes, check_supported
from spec_jax.models.config import ModelConfig
from spec_jax.models.families.registry import Family, register
from spec_jax.models.layers import attention, linear, pre_norm_layer, rms_norm
from spec_jax.models.moe import experts_table, mix_experts, route
from spec_jax.models.specs import ParamSpec, attention_specs, norm_spec, outer_specs


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(ModelConfig):
    """The shape of a Qwen3-MoE model. ``intermediate_size`` is stated in files and not used."""

    architectures: ClassVar[Mapping[str, str]] = {"qwen3_moe": "Qwen3MoeForCausalLM"}

    model_type: str = "qwen3_moe"
    num_experts: int = 0  # required, as the next two are; a field after others needs a default
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768

    has_qk_norm: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_sizes(self, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok is {self.num_experts_per_tok} of {self.num_experts} experts"
            )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Qwen3MoeConfig:
        """Builds the config from a parsed config.json.

        Raises:
          ConfigError: some layers are dense, or what ``ModelConfig.from_hf`` refuses.
        """
        check_supported(hf, decoder_sparse_step=1, mlp_only_layers=[])
        return super().from_hf({"num_experts": hf.get("num_local_experts"), **hf})


def layer_table(config: Qwen3MoeConfig) -> dict[str, ParamSpec]:
    """Returns the declared weights of one layer; all layers are alike."""
    prefix = "model.layers.{i}."
    D = config.hidden_size
    X = config.num_experts
    router = ParamSpec((D, X), ("embed", "experts"), f"{prefix}mlp.gate.weight", is_linear=True)
    return {
        "attention_norm": norm_spec(D, f"{prefix}input_layernorm"),
        **attention_specs(config, f"{prefix}self_attn."),
        "mlp_norm": norm_spec(D, f"{prefix}post_attention_layernorm"),
        "router": router,
        **experts_table(f"{prefix}mlp.experts", X, D, config.moe_intermediate_size),
    }


def mlp(layer: dict[str, jax.Array], x_BTD: jax.Array, config: Qwen3MoeConfig) -> jax.Array:
    """Applies the experts, with their norm and residual."""
    with jax.named_scope("mlp"):
        h = rms_norm(x_BTD, layer["mlp_norm"], config.rms_norm_eps)
        weights = route(
            linear(h, layer, "router").astype(jnp.float32),
            num_chosen=config.num_experts_per_tok,
            is_normalised=config.norm_topk_prob,
        )
        return x_BTD + mix_experts(layer, h, weights, config.num_experts_per_tok)


register(
    Family(
        config=Qwen3MoeConfig,
        model_types=("qwen3_moe",),
        layer=pre_norm_layer(attention, mlp),
        layer_tables=lambda config: [layer_table(config)] * config.num_hidden_layers,
        outer_table=outer_specs,
        can_scan=True,
        has_panels=True,
    )
)
