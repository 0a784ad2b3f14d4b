"""Qwen3-Next's full-attention layer: gated attention and a mixture of experts.

Norms are the factors themselves here; checkpoints store them less one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spec_jax.errors import ConfigError
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.checks import check_fields, check_ranges, check_sizes, check_supported
from spec_jax.models.config import EPS_RANGE, PartialRotary, RopeConfig
from spec_jax.models.families.registry import Family, register
from spec_jax.models.layers import Window, attend_window, linear, pre_norm_layer, rms_norm
from spec_jax.models.moe import experts_table, gated, mix_experts, route
from spec_jax.models.rope import rotate
from spec_jax.models.specs import ParamSpec, gated_specs, linear_specs, norm_spec
from spec_jax.sharding import repeat_heads
from spec_jax.show.summary import short_repr


@dataclasses.dataclass(frozen=True)
class Qwen3NextConfig(PartialRotary):
    """The shape of Qwen3-Next's full-attention layers. Field names are Hugging Face's."""

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_hidden_layers: int = 1
    norm_topk_prob: bool = True
    partial_rotary_factor: float = 0.25
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    rope: RopeConfig = RopeConfig()

    scan_layers: ClassVar[bool] = False

    __repr__ = short_repr()

    def __post_init__(self):
        check_sizes(self, *(f.name for f in dataclasses.fields(self) if f.type == "int"))
        check_fields(self)
        check_ranges(self, rms_norm_eps=EPS_RANGE)
        N, G, X = self.num_attention_heads, self.num_key_value_heads, self.num_experts
        if N % G:
            raise ConfigError(
                f"num_attention_heads {N} is not a multiple of num_key_value_heads {G}"
            )
        if self.num_experts_per_tok > X:
            raise ConfigError(f"num_experts_per_tok is {self.num_experts_per_tok} of {X} experts")
        self.check_rotary()

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Qwen3NextConfig:
        """Reads the full-attention layers of a parsed config.json.

        Raises:
          ConfigError: an activation or a mixture is not supported, or a field is missing.
        """
        check_supported(hf, hidden_act="silu", decoder_sparse_step=1, mlp_only_layers=[])
        return cls.of_fields(hf)

    def to_hf(self) -> dict[str, Any]:
        """Returns the keys of config.json that ``from_hf`` and transformers read."""
        hf = {name: value for name, value in dataclasses.asdict(self).items() if name != "rope"}
        part = {"partial_rotary_factor": self.partial_rotary_factor}
        return hf | {
            "rope_parameters": self.rope.to_hf() | part,
            "model_type": "qwen3_next",
            "hidden_act": "silu",
            "architectures": ["Qwen3NextForCausalLM"],
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }


def attention_table(config: Any) -> dict[str, ParamSpec]:
    """Returns the weights of ``attention``, and both norms of its layer.

    ``q`` makes each head's query, then its gate.
    """
    D, H = config.hidden_size, config.head_dim
    NH, GH = config.num_attention_heads * H, config.num_key_value_heads * H
    prefix = "model.layers.{i}."
    table: dict[str, ParamSpec] = {}

    def norm(name, size, axis, hf):
        table[name] = norm_spec(size, f"{prefix}{hf}", axis)

    def project(name, d_in, d_out, axes):
        hf = f"{prefix}self_attn.{name}_proj"
        linear_specs(table, name, d_in, d_out, axes, hf, has_bias=config.attention_bias)

    norm("attention_norm", D, "embed", "input_layernorm")
    project("q", D, 2 * NH, ("embed", "heads"))
    project("k", D, GH, ("embed", "kv_heads"))
    project("v", D, GH, ("embed", "kv_heads"))
    project("o", NH, D, ("heads", "embed"))
    norm("q_norm", H, "head_dim", "self_attn.q_norm")
    norm("k_norm", H, "head_dim", "self_attn.k_norm")
    norm("mlp_norm", D, "embed", "post_attention_layernorm")
    return table


def layer_table(config: Qwen3NextConfig) -> dict[str, ParamSpec]:
    """Returns the declared weights of one layer."""
    return attention_table(config) | mlp_table(config)


def mlp_table(config: Any) -> dict[str, ParamSpec]:
    """Returns the weights of ``mlp``, without its norm."""
    D, X, hf = config.hidden_size, config.num_experts, "model.layers.{i}.mlp"
    return {
        "router": ParamSpec((D, X), ("embed", "experts"), f"{hf}.gate.weight", is_linear=True),
        "shared_scale": ParamSpec(
            (D, 1), ("embed", "one"), f"{hf}.shared_expert_gate.weight", is_linear=True
        ),
        **experts_table(f"{hf}.experts", X, D, config.moe_intermediate_size),
        **gated_specs("shared_", f"{hf}.shared_expert", D, config.shared_expert_intermediate_size),
    }


def attention(
    layer: dict[str, jax.Array],
    x_BTD: jax.Array,
    cache: KVCache | None,
    index: int,
    window: Window,
    config: Any,
) -> tuple[jax.Array, KVCache | None]:
    """Applies gated attention to normalised inputs, without the residual.

    Args and Returns are those of ``layers.attention``.
    """
    B, T, _ = x_BTD.shape
    H = config.head_dim
    heads = lambda name: linear(x_BTD, layer, name).reshape(B, T, -1, H)

    def place(x, norm):
        return rotate(rms_norm(x, norm, config.rms_norm_eps), window.cos, window.sin)

    both = heads("q").reshape(B, T, -1, 2, H)
    q = place(both[..., 0, :], layer["q_norm"])
    k = repeat_heads(place(heads("k"), layer["k_norm"]), axis=2).transpose(0, 2, 1, 3)
    v = repeat_heads(heads("v"), axis=2).transpose(0, 2, 1, 3)
    with jax.named_scope("attention"):
        out, cache = attend_window(q, k, v, cache, index, window)
        out *= jax.nn.sigmoid(both[..., 1, :]).reshape(B, T, -1)
        return linear(out, layer, "o"), cache


def mlp(layer: dict[str, jax.Array], x_BTD: jax.Array, config: Any) -> jax.Array:
    """Applies the experts and the gated shared expert, with their norm and residual."""
    with jax.named_scope("mlp"):
        h = rms_norm(x_BTD, layer["mlp_norm"], config.rms_norm_eps)
        weights = route(
            linear(h, layer, "router").astype(jnp.float32),
            num_chosen=config.num_experts_per_tok,
            is_normalised=config.norm_topk_prob,
        )
        shared = jax.nn.sigmoid(linear(h, layer, "shared_scale")) * gated(layer, h, "shared_")
        return x_BTD + mix_experts(layer, h, weights, config.num_experts_per_tok) + shared


register(
    Family(
        config=Qwen3NextConfig,
        model_types=("qwen3_next",),
        layer=pre_norm_layer(attention, mlp),
        layer_tables=lambda config: [layer_table(config)] * config.num_hidden_layers,
        mtp_formats=("Qwen3-Next",),
    )
)
