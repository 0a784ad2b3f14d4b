"""GLM-4.5, 4.6 and 4.7: attention that rotates half of each head, and DeepSeek-V3's experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from spec_jax.models.config import PartialRotary
from spec_jax.models.families.deepseek import mlp as experts
from spec_jax.models.families.deepseek import mlp_table, one_sparse_layer
from spec_jax.models.families.registry import Family, LayerKind, register
from spec_jax.models.layers import attention, mlp, pre_norm_layer
from spec_jax.models.moe import check_groups
from spec_jax.models.specs import ParamSpec, attention_specs, layer_specs, mlp_specs, outer_specs


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Glm4MoeConfig(PartialRotary):
    """The shape of a GLM-4.5 model. Field names are Hugging Face's.

    The first ``first_k_dense_replace`` layers are dense, all others have experts.
    """

    saved_as: ClassVar[tuple[str, str]] = ("glm4_moe", "Glm4MoeForCausalLM")
    supported: ClassVar[Mapping[str, Any]] = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    has_output_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    intermediate_size: int
    num_key_value_heads: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    head_dim: int | None = None
    use_qk_norm: bool = False
    partial_rotary_factor: float = 0.5
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 131072

    def __post_init__(self):
        self.settle("head_dim", may_be_0="first_k_dense_replace")
        self.settle_heads()
        check_groups(self)

    @property
    def has_qk_norm(self) -> bool:
        """Whether each head's queries and keys are normalised."""
        return self.use_qk_norm

    def is_sparse(self, index: int) -> bool:
        """Whether a layer has experts."""
        return index >= self.first_k_dense_replace

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json that transformers loads as the same model, without modules."""
        return super().to_hf() | {"num_nextn_predict_layers": 0}


def layer_tables(config: Glm4MoeConfig) -> list[dict[str, ParamSpec]]:
    """Returns the declared weights of every layer."""
    prefix = "model.layers.{i}."
    attends = attention_specs(config, f"{prefix}self_attn.")
    dense = layer_specs(config, attends, mlp_specs(config, f"{prefix}mlp."))
    sparse = layer_specs(config, attends, mlp_table(config))
    return [sparse if config.is_sparse(i) else dense for i in range(config.num_hidden_layers)]


_DENSE = LayerKind(pre_norm_layer(attention, mlp))
_SPARSE = LayerKind(pre_norm_layer(attention, experts))

register(
    Family(
        config=Glm4MoeConfig,
        model_types=("glm4_moe",),
        kinds=lambda config: [
            _SPARSE if config.is_sparse(i) else _DENSE for i in range(config.num_hidden_layers)
        ],
        layer_tables=layer_tables,
        outer_table=outer_specs,
        can_scan=True,
        module_layer=one_sparse_layer,
        recycles_normed=True,
        mtp_formats=("DeepSeek",),
    )
)
