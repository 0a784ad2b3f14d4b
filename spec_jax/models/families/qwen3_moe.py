"""Qwen3-MoE: Qwen3's attention, and a mixture of experts in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from spec_jax.models.checks import check_sizes, check_supported
from spec_jax.models.config import ModelConfig
from spec_jax.models.families.qwen3_next import mlp, mlp_table
from spec_jax.models.families.registry import Family, register
from spec_jax.models.layers import attention, pre_norm_layer
from spec_jax.models.specs import ParamSpec, attention_specs, layer_specs, outer_specs


@dataclasses.dataclass(frozen=True, repr=False)
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
        check_sizes(self, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
        super().__post_init__()

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
