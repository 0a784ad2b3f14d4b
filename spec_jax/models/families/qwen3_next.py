"""Qwen3-Next: gated delta nets, gated attention in each fourth layer, and a mixture of experts.

Norms are the factors themselves in layers; files hold them less one, see ``layers.centred_norms``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from spec_jax.config.checks import check
from spec_jax.models.checks import check_sizes, require, shown
from spec_jax.models.config import FULL, PartialRotary
from spec_jax.models.delta import delta_net, delta_table
from spec_jax.models.families.mamba2 import init_states
from spec_jax.models.families.registry import Family, LayerKind, register
from spec_jax.models.layers import attend_window, gated, linear, pre_norm_layer, rms_norm
from spec_jax.models.moe import experts_table, mix_experts, route
from spec_jax.models.rope import rotate
from spec_jax.models.specs import (
    ParamSpec,
    attention_specs,
    gated_specs,
    layer_specs,
    linear_specs,
    outer_specs,
)
from spec_jax.models.ssm import MixerConfig
from spec_jax.sharding import repeat_heads

# the words of ``layer_types``
LINEAR = "linear_attention"
_LINEAR = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class DeltaConfig(PartialRotary):
    """Base of configs whose layers are delta nets, or attend with a gate; each fourth by default.

    Without the sizes of linear attention (``linear_*``) every layer attends.
    """

    has_zero_centred_norms: ClassVar[bool] = True
    has_qk_norm: ClassVar[bool] = True

    num_key_value_heads: int
    head_dim: int
    linear_conv_kernel_dim: int = 4
    layer_types: tuple[str, ...] = ()
    partial_rotary_factor: float = 0.25
    max_position_embeddings: int = 32768

    def __post_init__(self):
        self.settle()
        self.settle_heads()
        if self.has_states:
            check_sizes(self, *_LINEAR)
            many = self.linear_num_value_heads
            few = self.linear_num_key_heads
            why = f"is not a multiple of linear_num_key_heads {few}"
            require(many % few == 0, f"linear_num_value_heads {many} {why}")
        L = self.num_hidden_layers
        stated = self.layer_types
        if stated == ():
            stated = [LINEAR if self.has_states and (i + 1) % 4 else FULL for i in range(L)]
        known = (LINEAR, FULL) if self.has_states else (FULL,)
        is_list = isinstance(stated, (list, tuple)) and all(kind in known for kind in stated)
        expected = f"{' or '.join(known)} for each of {L} layers"
        check(is_list and len(stated) == L, "layer_types", stated, expected)
        object.__setattr__(self, "layer_types", tuple(stated))

    @property
    def has_states(self) -> bool:
        """Whether the sizes of linear attention are known."""
        return self.linear_num_value_heads is not None

    @property
    def has_output_bias(self) -> bool:
        """Whether o_proj has a bias."""
        return self.attention_bias

    @property
    def mixer(self) -> MixerConfig | None:
        """The shape of each delta net, see ``delta.delta_table``; None if there is none."""
        if not self.has_states:
            return None
        return MixerConfig(
            self.hidden_size,
            self.linear_num_value_heads,
            self.linear_value_head_dim,
            self.linear_key_head_dim,
            self.linear_num_key_heads,
            self.linear_conv_kernel_dim,
            self.rms_norm_eps,
        )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """See ``PartialRotary.from_hf``; refuses layers that attend in a pattern that is not known.

        Raises:
          ConfigError: they do, or a field is missing or wrong.
        """
        every = hf.get("full_attention_interval")
        is_fit = hf.get("layer_types") is not None or every in (None, 4)
        require(
            is_fit, f"full_attention_interval is {shown(every)} without layer_types; expected 4"
        )
        return super().from_hf(hf)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class Qwen3NextConfig(DeltaConfig):
    """The shape of a Qwen3-Next model. Field names are Hugging Face's.

    Without the sizes of linear attention (``linear_*``), as for MTP modules, every layer attends.
    """

    saved_as: ClassVar[tuple[str, str]] = ("qwen3_next", "Qwen3NextForCausalLM")
    supported: ClassVar[Mapping[str, Any]] = {"decoder_sparse_step": 1, "mlp_only_layers": []}

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_hidden_layers: int = 1
    norm_topk_prob: bool = True
    linear_num_key_heads: int | None = None
    linear_num_value_heads: int | None = None
    linear_key_head_dim: int | None = None
    linear_value_head_dim: int | None = None

    def to_hf(self) -> dict[str, Any]:
        """Returns the keys of config.json that ``from_hf`` and transformers read."""
        left_out = () if self.has_states else _LINEAR
        return self.as_hf(*self.saved_as, *left_out) | self.supported


def layer_tables(config: Qwen3NextConfig) -> list[dict[str, ParamSpec]]:
    """Returns the declared weights of every layer."""
    tables = tables_by_kind(config, mlp_table(config), is_by_key_head=True)
    return [centred(table) for table in tables] if config.has_states else tables


def centred(table: dict[str, ParamSpec]) -> dict[str, ParamSpec]:
    """Returns a table whose norms begin at zero, which stands for a factor of one."""

    def zeros(name, spec):
        return spec._replace(init="zeros") if name.endswith("norm") else spec

    return {name: zeros(name, spec) for name, spec in table.items()}


def tables_by_kind(
    config: Any, feed: dict[str, ParamSpec], *, is_by_key_head: bool = False
) -> list[dict[str, ParamSpec]]:
    """Returns the declared weights of layers that attend or are delta nets.

    Args:
      config: of the model.
      feed: the weights of every layer's feed-forward part, without its norm.
      is_by_key_head: see ``delta.delta_table``.
    """
    # ``q`` makes each head's query, then its gate.
    attends = attention_specs(config, "model.layers.{i}.self_attn.", num_queries=2, init="normal")
    mixers = {FULL: attends}
    if LINEAR in config.layer_types:
        prefix = "model.layers.{i}.linear_attn."
        mixers[LINEAR] = delta_table(config.mixer, prefix, is_by_key_head=is_by_key_head)
    kinds = {kind: layer_specs(config, mixer, feed) for kind, mixer in mixers.items()}
    return [kinds[kind] for kind in config.layer_types]


def mlp_table(config: Any) -> dict[str, ParamSpec]:
    """Returns the weights of ``mlp``, without its norm."""
    D = config.hidden_size
    X = config.num_experts
    hf = "model.layers.{i}.mlp"

    table: dict[str, ParamSpec] = {}
    linear_specs(table, "router", D, X, ("embed", "experts"), f"{hf}.gate")
    width = getattr(config, "shared_expert_intermediate_size", None)
    if width is not None:
        linear_specs(table, "shared_scale", D, 1, ("embed", "one"), f"{hf}.shared_expert_gate")
    table |= experts_table(f"{hf}.experts", X, D, config.moe_intermediate_size)
    if width is not None:
        table |= gated_specs("shared_", f"{hf}.shared_expert", D, width)
    return table


def _attention(layer, x_BTD, cache, index, window, config):
    """Gated attention of normalised inputs, without the residual, see ``layers.attention``."""
    B, T, _ = x_BTD.shape
    H = config.head_dim

    def heads(name):
        return linear(x_BTD, layer, name).reshape(B, T, -1, H)

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
    """Applies the experts and the gated shared expert, if any, with their norm and residual.

    Args:
      layer: the layer's weights.
      x_BTD: dtype[B,T,D].
      config: of the model.

    Returns:
      dtype[B,T,D].
    """
    with jax.named_scope("mlp"):
        h = rms_norm(x_BTD, layer["mlp_norm"], config.rms_norm_eps)
        weights = route(
            linear(h, layer, "router").astype(jnp.float32),
            num_chosen=config.num_experts_per_tok,
            is_normalised=config.norm_topk_prob,
        )
        if "shared_scale" in layer:
            shared = jax.nn.sigmoid(linear(h, layer, "shared_scale")) * gated(layer, h, "shared_")
        mixed = x_BTD + mix_experts(layer, h, weights, config.num_experts_per_tok)
        return mixed + shared if "shared_scale" in layer else mixed


def kinds_by_type(feed: Callable[..., Any]) -> Callable[[Any], list[LayerKind]]:
    """Returns ``Family.kinds`` of layers that attend or are delta nets.

    Args:
      feed: ``(layer, x, config) -> x``, the feed-forward part with its norm and residual.
    """
    kinds = {
        FULL: LayerKind(pre_norm_layer(_attention, feed)),
        LINEAR: LayerKind(pre_norm_layer(delta_net, feed), init_states),
    }
    return lambda config: [kinds[kind] for kind in config.layer_types]


def one_attention_layer(config: Any) -> Any:
    """Returns the config of the layer of an MTP module."""
    return dataclasses.replace(config, num_hidden_layers=1, layer_types=(FULL,))


register(
    Family(
        config=Qwen3NextConfig,
        model_types=("qwen3_next",),
        kinds=kinds_by_type(mlp),
        layer_tables=layer_tables,
        outer_table=lambda config: centred(outer_specs(config)),
        can_scan=True,
        has_panels=True,
        module_layer=one_attention_layer,
        recycles_normed=True,
        mtp_formats=("Qwen3-Next",),
    )
)
