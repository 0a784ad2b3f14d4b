"""Qwen3.5, 3.6 and 3.8: gated delta nets, and gated attention in each fourth layer.

The feed-forward part is dense, or of experts and a shared one.

Directories with a vision tower load as the language model that they contain; it is saved without
the tower. Files hold norms less one, see ``layers.centred_norms``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from spec_jax.models.checks import check_sizes, require
from spec_jax.models.config import text_part
from spec_jax.models.families.qwen3_next import (
    DeltaConfig,
    centred,
    kinds_by_type,
    mlp_table,
    one_attention_layer,
    tables_by_kind,
)
from spec_jax.models.families.qwen3_next import mlp as experts
from spec_jax.models.families.registry import Family, register
from spec_jax.models.layers import mlp
from spec_jax.models.specs import ParamSpec, mlp_specs, outer_specs

_SPARSE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
_MROPE = ("mrope_section", "mrope_interleaved")  # of text all sections have the same position


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Qwen35Config(DeltaConfig):
    """The shape of a Qwen3.5 language model. Field names are Hugging Face's.

    ``num_experts`` is None for dense layers, and ``intermediate_size`` for those of experts.
    """

    supported: ClassVar[Mapping[str, Any]] = {"attn_output_gate": True, "output_gate_type": "swish"}
    norm_topk_prob: ClassVar[bool] = True
    mlp_bias: ClassVar[bool] = False

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    intermediate_size: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    shared_expert_intermediate_size: int | None = None

    def __post_init__(self):
        check_sizes(self, *(_SPARSE if self.is_sparse else ("intermediate_size",)))
        super().__post_init__()

    @property
    def is_sparse(self) -> bool:
        """Whether the layers have a mixture of experts."""
        return self.num_experts is not None

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Qwen35Config:
        """Reads the language model of a parsed config.json.

        Raises:
          ConfigError: an activation or a gate is not supported, or a field is missing or wrong.
        """
        hf = dict(text_part(hf))
        is_sparse = "moe" in str(hf.get("model_type"))
        for name in ("intermediate_size",) if is_sparse else _SPARSE:
            hf.pop(name, None)  # of the other kind, where a config states both
        has_experts = hf.get("num_experts") is not None
        require(has_experts or not is_sparse, "num_experts is missing")
        for name in ("rope_parameters", "rope_scaling"):
            if isinstance(hf.get(name), Mapping):
                hf[name] = {n: x for n, x in hf[name].items() if n not in _MROPE}
        return super().from_hf(hf)

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json that transformers loads as the same model."""
        others = ("intermediate_size",) if self.is_sparse else _SPARSE
        architecture = f"Qwen3_5{'Moe' * self.is_sparse}ForCausalLM"
        return self.as_hf(f"qwen3_5{'_moe' * self.is_sparse}_text", architecture, *others)


def layer_tables(config: Qwen35Config) -> list[dict[str, ParamSpec]]:
    """Returns the declared weights of every layer."""
    prefix = "model.layers.{i}.mlp."
    feed = mlp_table(config) if config.is_sparse else mlp_specs(config, prefix)
    return [centred(table) for table in tables_by_kind(config, feed)]


def _feed(layer, x_BTD, config):
    return (experts if config.is_sparse else mlp)(layer, x_BTD, config)


register(
    Family(
        config=Qwen35Config,
        model_types=("qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe"),
        kinds=kinds_by_type(_feed),
        layer_tables=layer_tables,
        outer_table=lambda config: centred(outer_specs(config)),
        can_scan=True,
        has_panels=True,
        prefixes={"model.language_model.": "model.", "model.visual.": None},
        module_layer=one_attention_layer,
        recycles_normed=True,
        mtp_formats=("Qwen3-Next",),
    )
)
