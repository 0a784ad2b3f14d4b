"""DeepSeek-V3, R1 and V3.1, Kimi-K2, GLM-4.7-Flash: latent attention, then a dense part or experts.

A cache holds the latent and the rotary key of a token alone. Over it queries are mapped into the
latents' space, and results out of it, so no token's keys and values are expanded. Whole sequences
are attended over with expanded keys and values, which are narrower.

Source: DeepSeek-V3, arXiv 2412.19437, sections 2.1.1 and 2.1.2.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from spec_jax.config.checks import check
from spec_jax.models import layers
from spec_jax.models.caches.beside import BesideCache
from spec_jax.models.caches.latent import LatentCache
from spec_jax.models.checks import check_sizes, require
from spec_jax.models.config import AttentionConfig
from spec_jax.models.families.registry import Family, LayerKind, register
from spec_jax.models.layers import Window, attend_window, gated, linear, pre_norm_layer, rms_norm
from spec_jax.models.moe import check_groups, experts_table, mix_experts, route_in_groups
from spec_jax.models.rope import rotate
from spec_jax.models.specs import (
    ParamSpec,
    gated_specs,
    layer_specs,
    linear_specs,
    norm_spec,
    outer_specs,
)
from spec_jax.sharding import constrain, repeat_heads

_LATENT_EPS = 1e-6  # of the latents' norms, which do not use rms_norm_eps
_SIZES = ("n_routed_experts", "moe_intermediate_size", "num_experts_per_tok")
# What transformers' classes assume for keys that a config.json with experts leaves out.
_OMITTED = dict(q_lora_rank=1536, n_shared_experts=1, n_group=8, topk_group=4)
_OMITTED |= dict(routed_scaling_factor=2.5, first_k_dense_replace=3)
_OMITTED_LITE = dict(q_lora_rank=768, n_shared_experts=1, n_group=1, topk_group=1)
_OMITTED_LITE |= dict(routed_scaling_factor=1.8, first_k_dense_replace=1)
_OMITTED_LITE |= dict(rms_norm_eps=1e-5, max_position_embeddings=202752)


@dataclasses.dataclass(frozen=True, repr=False, kw_only=True)
class DeepseekConfig(AttentionConfig):
    """The shape of a DeepSeek-V3 model. Field names are Hugging Face's.

    The first ``first_k_dense_replace`` layers are dense; all of them if ``n_routed_experts`` is
    None. ``q_lora_rank`` is None if queries have no latent.
    """

    saved_as: ClassVar[tuple[str, str]] = ("deepseek_v3", "DeepseekV3ForCausalLM")
    supported: ClassVar[Mapping[str, Any]] = {
        "moe_layer_freq": 1,
        "qk_layernorm": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "partial_rotary_factor": 1,
    }
    num_key_value_heads: ClassVar[int] = 1  # of a cache: one latent serves all query heads
    products_per_slot: ClassVar[int] = 2  # scores and sums take the same numbers of it

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    num_hidden_layers: int = 1
    q_lora_rank: int | None = None
    intermediate_size: int | None = None
    n_routed_experts: int | None = None
    moe_intermediate_size: int | None = None
    num_experts_per_tok: int | None = None
    n_shared_experts: int | None = None
    n_group: int | None = 1
    topk_group: int | None = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rope_interleave: bool = True
    max_position_embeddings: int = 4096
    first_k_dense_replace: int = 0

    def __post_init__(self):
        groups = {n: 1 for n in ("n_group", "topk_group") if getattr(self, n) is None}
        self.settle("q_lora_rank", may_be_0="first_k_dense_replace", **groups)
        H = self.qk_rope_head_dim
        require(H % 2 == 0, f"qk_rope_head_dim {H} is odd; rotary embedding needs it even")
        if self.num_dense_layers:
            check_sizes(self, "intermediate_size")
        if self.is_sparse:
            shared = ["n_shared_experts"] if self.n_shared_experts else []
            check_sizes(self, *_SIZES, *shared, "n_group", "topk_group")
            check_groups(self)

    @property
    def is_sparse(self) -> bool:
        """Whether any layers have a mixture of experts."""
        return self.n_routed_experts is not None

    @property
    def num_dense_layers(self) -> int:
        """How many layers have none; they come first."""
        L = self.num_hidden_layers
        return min(self.first_k_dense_replace, L) if self.is_sparse else L

    @property
    def latent_dim(self) -> int:
        """The width of a slot of the cache: a latent and a rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def rotary_dim(self) -> int:
        """The number of dimensions of a head that are rotated."""
        return self.qk_rope_head_dim

    @property
    def key_dim(self) -> int:
        """The width of a key: a part without and a part with rotation."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_dim(self) -> int:
        """The width of a value."""
        return self.v_head_dim

    @property
    def attention_scale(self) -> float:
        """1/sqrt(H); with yarn, times the square of its factor for longer contexts."""
        scale = self.key_dim**-0.5
        rope = self.rope
        if rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
            return scale
        return scale * (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> DeepseekConfig:
        """Builds the config from a parsed config.json.

        Raises:
          ConfigError: an activation or a router is not supported, or a field is missing or wrong.
        """
        is_lite = hf.get("model_type") == "glm4_moe_lite"
        if hf.get("n_routed_experts") is not None:
            hf = {**(_OMITTED_LITE if is_lite else _OMITTED), **hf}
        flags = () if is_lite else ("norm_topk_prob", "rope_interleave")  # null is false there
        hf = {n: False if n in flags and x is None else x for n, x in hf.items()}
        kinds = hf.get("mlp_layer_types")
        if kinds is not None:  # as GLM states it
            is_list = isinstance(kinds, list) and len(kinds) == hf.get("num_hidden_layers")
            dense = kinds.count("dense") if is_list else 0
            is_fit = is_list and kinds == ["dense"] * dense + ["sparse"] * (len(kinds) - dense)
            check(is_fit, "mlp_layer_types", kinds, "dense layers, then sparse ones")
            hf = {**hf, "first_k_dense_replace": dense}
        return super().from_hf(hf)

    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json that transformers loads as the same model."""
        hf = super().to_hf()
        router = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
        router["n_shared_experts"] = self.n_shared_experts
        return {
            **{n: x for n, x in hf.items() if x is not None},
            **(router if self.is_sparse else {}),
            "first_k_dense_replace": self.num_dense_layers,
            "num_key_value_heads": self.num_attention_heads,  # of expanded keys
            **{n: hf[n] for n in ("q_lora_rank", "bos_token_id", "eos_token_id")},
        }


def layer_tables(config: DeepseekConfig) -> list[dict[str, ParamSpec]]:
    """Returns the declared weights of every layer."""
    own = _attention_table(config)
    dense = config.num_dense_layers
    sparse = config.num_hidden_layers - dense
    tables = []
    if dense:
        hf = "model.layers.{i}.mlp"
        feed = gated_specs("", hf, config.hidden_size, config.intermediate_size)
        tables += [layer_specs(config, own, feed)] * dense
    if sparse:
        tables += [layer_specs(config, own, mlp_table(config))] * sparse
    return tables


def _attention_table(config: DeepseekConfig) -> dict[str, ParamSpec]:
    """The weights of attention."""
    D = config.hidden_size
    N = config.num_attention_heads
    hf = "model.layers.{i}.self_attn."
    bias = config.attention_bias
    rank = config.q_lora_rank
    table: dict[str, ParamSpec] = {}
    if rank is None:
        linear_specs(table, "q", D, N * config.key_dim, ("embed", "heads"), f"{hf}q_proj")
    else:
        linear_specs(table, "q_a", D, rank, ("embed", "latent"), f"{hf}q_a_proj", has_bias=bias)
        table["q_a_norm"] = norm_spec(rank, f"{hf}q_a_layernorm", "latent")
        linear_specs(table, "q_b", rank, N * config.key_dim, ("latent", "heads"), f"{hf}q_b_proj")
    rank = config.kv_lora_rank
    axes = ("embed", "latent")
    name = f"{hf}kv_a_proj_with_mqa"
    linear_specs(table, "kv_a", D, config.latent_dim, axes, name, has_bias=bias)
    table["kv_a_norm"] = norm_spec(rank, f"{hf}kv_a_layernorm", "latent")
    # As files hold it: the part of each head is then a matrix, for either side of attention.
    shape = (N * (config.qk_nope_head_dim + config.v_head_dim), rank)
    table["kv_b"] = ParamSpec(shape, ("heads", "latent"), f"{hf}kv_b_proj.weight", is_map=True)
    axes = ("heads", "embed")
    linear_specs(table, "o", N * config.v_head_dim, D, axes, f"{hf}o_proj", has_bias=bias)
    return table


def mlp_table(config: Any) -> dict[str, ParamSpec]:
    """Returns the weights of ``mlp``, without its norm."""
    D = config.hidden_size
    X = config.n_routed_experts
    F = config.moe_intermediate_size
    hf = "model.layers.{i}.mlp"
    # Biases that move a choice differ by less than a short float resolves.
    bias = ParamSpec(
        (X,), ("experts",), f"{hf}.gate.e_score_correction_bias", init="zeros", dtype="float32"
    )
    table = {
        "router": ParamSpec((D, X), ("embed", "experts"), f"{hf}.gate.weight", is_linear=True),
        "router_bias": bias,
        **experts_table(f"{hf}.experts", X, D, F),
    }
    if config.n_shared_experts:
        width = F * config.n_shared_experts
        table |= gated_specs("shared_", f"{hf}.shared_experts", D, width)
    return table


def _turn(x_BTNH: jax.Array, window: Window, config: DeepseekConfig) -> jax.Array:
    """Rotates the heads; if they are interleaved, neighbouring dimensions form the pairs."""
    if config.rope_interleave:
        x_BTNH = jnp.concatenate([x_BTNH[..., 0::2], x_BTNH[..., 1::2]], axis=-1)
    return rotate(x_BTNH, window.cos, window.sin)


def _attention(layer, x_BTD, cache, index, window, config):
    """Latent attention of normalised inputs, without the residual, see ``layers.attention``."""
    B, T, _ = x_BTD.shape
    nope = config.qk_nope_head_dim
    rank = config.kv_lora_rank
    if config.q_lora_rank is None:
        q = linear(x_BTD, layer, "q")
    else:
        q = rms_norm(linear(x_BTD, layer, "q_a"), layer["q_a_norm"], _LATENT_EPS)
        q = linear(q, layer, "q_b")
    q = constrain(q.reshape(B, T, -1, config.key_dim), "batch", None, "heads", None)
    q = q[..., :nope], _turn(q[..., nope:], window, config)
    latent = linear(x_BTD, layer, "kv_a")
    turned = _turn(latent[:, :, None, rank:], window, config)  # one key for all heads
    latent = rms_norm(latent[..., :rank], layer["kv_a_norm"], _LATENT_EPS)
    has_latents = isinstance(cache, LatentCache | BesideCache)
    attend = _attend_latents if has_latents else _attend_expanded
    with jax.named_scope("attention"):
        out, cache = attend(layer["kv_b"], q, latent, turned, cache, index, window, config)
        return linear(out, layer, "o"), cache


def _attend_expanded(kv_b, q, latent, turned, cache, index, window, config):
    """Attention over keys and values of every head, as each token's latent makes them."""
    B, T, N, _ = q[0].shape
    nope = config.qk_nope_head_dim
    kv = jnp.einsum("btr,hr->bth", latent, kv_b).reshape(B, T, N, -1)
    turned = jnp.broadcast_to(turned, (B, T, N, config.qk_rope_head_dim))
    k = jnp.concatenate([kv[..., :nope], turned], axis=-1).transpose(0, 2, 1, 3)
    v = kv[..., nope:].transpose(0, 2, 1, 3)
    q, scale = jnp.concatenate(q, axis=-1), config.attention_scale
    return attend_window(q, k, v, cache, index, window, scale=scale)


def _attend_latents(kv_b, q, latent, turned, cache, index, window, config):
    """The same over a cache of latents: the map to keys is applied to the queries, and that to
    values to the results.

    Both take the whole map, with zeros for the other one's part: of a slice a CPU makes a copy.
    """
    B, T, N, _ = q[0].shape
    nope = config.qk_nope_head_dim
    rank = config.kv_lora_rank
    kv_b = kv_b.reshape(N, nope + config.v_head_dim, rank)
    padded = jnp.pad(q[0], [(0, 0)] * 3 + [(0, config.v_head_dim)])
    q = jnp.concatenate([jnp.einsum("btnh,nhr->btnr", padded, kv_b), q[1]], axis=-1)
    k = jnp.concatenate([latent[:, :, None], turned], axis=-1).transpose(0, 2, 1, 3)
    k = repeat_heads(k, axis=1)
    out, cache = cache.attend(q, k, None, index, window.sees, config.attention_scale)
    out = out.reshape(B, T, N, -1)[..., :rank]
    out = jnp.einsum("btnr,nhr->btnh", out, kv_b)[..., nope:]
    return out.reshape(B, T, -1), cache


def mlp(layer: dict[str, jax.Array], x_BTD: jax.Array, config: Any) -> jax.Array:
    """Applies the experts and the shared ones, with their norm and residual.

    Args:
      layer: the layer's weights.
      x_BTD: dtype[B,T,D].
      config: of the model.

    Returns:
      dtype[B,T,D].
    """
    with jax.named_scope("mlp"):
        h = rms_norm(x_BTD, layer["mlp_norm"], config.rms_norm_eps)
        logits = h.astype(jnp.float32) @ layer["router"].astype(jnp.float32)
        weights = route_in_groups(
            logits,
            layer["router_bias"].astype(jnp.float32),
            num_chosen=config.num_experts_per_tok,
            num_groups=config.n_group,
            groups_chosen=config.topk_group,
            is_normalised=config.norm_topk_prob,
            factor=config.routed_scaling_factor,
        )
        x = x_BTD + mix_experts(layer, h, weights, config.num_experts_per_tok)
        return x + gated(layer, h, "shared_") if config.n_shared_experts else x


_DENSE = LayerKind(pre_norm_layer(_attention, layers.mlp), LatentCache.create)
_SPARSE = LayerKind(pre_norm_layer(_attention, mlp), LatentCache.create)


def _kinds(config):
    dense = config.num_dense_layers
    return [_DENSE] * dense + [_SPARSE] * (config.num_hidden_layers - dense)


def one_sparse_layer(config: DeepseekConfig) -> DeepseekConfig:
    """Returns the config of the layer of an MTP module."""
    return dataclasses.replace(config, num_hidden_layers=1, first_k_dense_replace=0)


register(
    Family(
        config=DeepseekConfig,
        model_types=("deepseek_v3", "kimi_k2", "glm4_moe_lite"),
        kinds=_kinds,
        layer_tables=layer_tables,
        outer_table=outer_specs,
        can_scan=True,
        module_layer=one_sparse_layer,
        recycles_normed=True,
        mtp_formats=("DeepSeek",),
    )
)
