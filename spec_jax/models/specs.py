"""One declaration a weight: shape, logical axes, initialiser and external name.

From these tables come the initial parameters, the map to Hugging Face tensor names, the restore
target of a checkpoint and, through the logical axes, the sharding.
"""

from __future__ import annotations

from typing import NamedTuple


class ParamSpec(NamedTuple):
    """One weight.

    Attributes:
      shape: its size, a layer's axis left out.
      axes: the logical name of each dimension.
      hf_name: the tensor's name in a Hugging Face checkpoint; ``{i}`` is the layer and ``{e}``
        an expert, of which there is a tensor each there, stacked along the first axis here.
      is_linear: a linear map, stored ``[in, out]`` here and ``[out, in]`` there.
      init: "normal" (standard deviation 0.02), "residual" (scaled by depth), "ones", "zeros"; of
        state-space layers "decay" (the logarithms of 1, 2, ...), "time step" and "conv".
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_name: str
    is_linear: bool = False
    init: str = "normal"


def linear_specs(table, name, d_in, d_out, axes, hf, *, has_bias=False, init="normal"):
    """Adds a linear map, and its bias if it has one; ``hf`` is their external name."""
    table[name] = ParamSpec((d_in, d_out), axes, f"{hf}.weight", is_linear=True, init=init)
    if has_bias:
        table[f"{name}_bias"] = ParamSpec((d_out,), axes[1:], f"{hf}.bias", init="zeros")


def attention_specs(config, prefix: str) -> dict[str, ParamSpec]:
    """The weights of self-attention, by our name; ``prefix`` of their external names."""
    D, H = config.hidden_size, config.head_dim
    NH, GH = config.num_attention_heads * H, config.num_key_value_heads * H
    table: dict[str, ParamSpec] = {}
    bias = config.attention_bias
    linear_specs(table, "q", D, NH, ("embed", "heads"), f"{prefix}q_proj", has_bias=bias)
    linear_specs(table, "k", D, GH, ("embed", "kv_heads"), f"{prefix}k_proj", has_bias=bias)
    linear_specs(table, "v", D, GH, ("embed", "kv_heads"), f"{prefix}v_proj", has_bias=bias)
    linear_specs(
        table, "o", NH, D, ("heads", "embed"), f"{prefix}o_proj",
        has_bias=config.has_output_bias, init="residual",
    )
    if config.has_qk_norm:
        for name in ("q_norm", "k_norm"):
            table[name] = ParamSpec((H,), ("head_dim",), f"{prefix}{name}.weight", init="ones")
    return table


def mlp_specs(config, prefix: str) -> dict[str, ParamSpec]:
    """The weights of the gated feed-forward part, as ``attention_specs``."""
    D, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    table: dict[str, ParamSpec] = {}
    linear_specs(table, "gate", D, F, ("embed", "mlp"), f"{prefix}gate_proj", has_bias=bias)
    linear_specs(table, "up", D, F, ("embed", "mlp"), f"{prefix}up_proj", has_bias=bias)
    linear_specs(
        table, "down", F, D, ("mlp", "embed"), f"{prefix}down_proj", has_bias=bias, init="residual"
    )
    return table


def outer_specs(
    config, embed: str = "model.embed_tokens.weight", norm: str = "model.norm.weight"
) -> dict[str, ParamSpec]:
    """Embedding, final norm and head (absent when tied); the first two by external name."""
    D, V = config.hidden_size, config.vocab_size
    table = {
        "embed": ParamSpec((V, D), ("vocab", "embed"), embed),
        "final_norm": ParamSpec((D,), ("embed",), norm, init="ones"),
    }
    if not config.tie_word_embeddings:
        linear_specs(table, "head", D, V, ("embed", "vocab"), "lm_head")
    return table
