"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from spec_jax.models.config import ModelConfig
from spec_jax.models.families.qwen3_next import mlp, mlp_table
from spec_jax.models.families.registry import Family, register
from spec_jax.models.layers import attention, pre_norm_layer
from spec_jax.models.specs import ParamSpec, attention_specs, layer_specs, outer_specs


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Qwen3MoeConfig(ModelConfig):
    """The shape of a Qwen3-MoE model. ``intermediate_size`` is stated in files and not used."""

    architectures: ClassVar[Mapping[str, str]] = {"qwen3_moe": "Qwen3MoeForCausalLM"}
    supported: ClassVar[Mapping[str, Any]] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
    has_qk_norm: ClassVar[bool] = True

    model_type: str = "qwen3_moe"
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool = False
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Qwen3MoeConfig:
        """See ``ModelConfig.from_hf``; the experts may also be counted as ``num_local_experts``."""
        return super().from_hf({"num_experts": hf.get("num_local_experts"), **hf})


def layer_table(config: Qwen3MoeConfig) -> dict[str, ParamSpec]:
    """Returns the declared weights of one layer; all layers are alike."""
    attends = attention_specs(config, "model.layers.{i}.self_attn.")
    return layer_specs(config, attends, mlp_table(config))


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
