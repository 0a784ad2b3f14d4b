"""Declarations of weights: shape, logical axes, initialiser and external name of each.

A model's parameters are declared once, as tables ``{name: ParamSpec}``. From these tables come the
initial parameters, the map to Hugging Face tensor names, the restore target of a checkpoint and,
through the logical axes, the sharding.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class ParamSpec(NamedTuple):
    """The declaration of one weight.

    Attributes:
      shape: its shape in one layer, whether layers are stacked or not.
      axes: the logical name of each dimension.
      hf_name: the tensor's name in a Hugging Face checkpoint. ``{i}`` stands for the layer.
        ``{e}`` stands for an expert: checkpoints have one tensor an expert, which are stacked
        along the first axis here.
      is_linear: it is a linear map, stored ``[in, out]`` here and ``[out, in]`` in checkpoints.
      init: how random weights are drawn. "normal" (standard deviation 0.02), "residual" (normal,
        scaled down by the depth), "ones" or "zeros"; in state-space layers also "decay" (the
        logarithms of 1, 2, ...), "time step" and "conv"; in heads also "first tap" (of taps by
        channels, ones in the first tap and zeros in the others).
      is_map: it is a linear map that is stored ``[out, in]`` here as well.
      dtype: of the weight, whatever that of the others; None: the same.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_name: str
    is_linear: bool = False
    init: str = "normal"
    is_map: bool = False
    dtype: str | None = None


def tensor_names(spec: ParamSpec, layer: int | None) -> list[str]:
    """Returns the names of a weight's tensors in files: one, or one an expert.

    Args:
      spec: its declaration.
      layer: the number of the layer; None outside of the layers.
    """
    count = spec.shape[0] if "{e}" in spec.hf_name else 1
    return [spec.hf_name.format(i=layer, e=e) for e in range(count)]


def norm_spec(size: int, hf: str, axis: str = "embed") -> ParamSpec:
    """Returns the declaration of a norm's weight, whose external name is ``{hf}.weight``.

    Args:
      size: number of dimensions.
      hf: the external name, without ``.weight``.
      axis: the logical name of the dimension.
    """
    return ParamSpec((size,), (axis,), f"{hf}.weight", init="ones")


def linear_specs(
    table: dict[str, ParamSpec],
    name: str,
    d_in: int,
    d_out: int,
    axes: tuple[str, str],
    hf: str,
    *,
    has_bias: bool = False,
    init: str = "normal",
) -> None:
    """Adds a linear map to a table, and its bias if it has one.

    Args:
      table: gets ``name``, and ``{name}_bias``.
      name: our name.
      d_in: number of inputs.
      d_out: number of outputs.
      axes: the logical names of inputs and outputs.
      hf: the external name, without ``.weight`` or ``.bias``.
      has_bias: whether there is a bias.
      init: of the map, see ``ParamSpec``; a bias begins with zeros.
    """
    table[name] = ParamSpec((d_in, d_out), axes, f"{hf}.weight", is_linear=True, init=init)
    if has_bias:
        table[f"{name}_bias"] = ParamSpec((d_out,), axes[1:], f"{hf}.bias", init="zeros")


def attention_specs(
    config: Any, prefix: str, *, num_queries: int = 1, init: str = "residual"
) -> dict[str, ParamSpec]:
    """Returns the weights of ``layers.attention``.

    Args:
      config: the model's shape.
      prefix: of the external names, with its last dot.
      num_queries: how many outputs ``q`` has for each dimension of a query.
      init: of ``o``, see ``ParamSpec``.
    """
    D = config.hidden_size
    H = config.head_dim
    NH = config.num_attention_heads * H
    GH = config.num_key_value_heads * H
    table: dict[str, ParamSpec] = {}

    def project(name, d_in, d_out, axes, has_bias, init="normal"):
        hf = f"{prefix}{name}_proj"
        linear_specs(table, name, d_in, d_out, axes, hf, has_bias=has_bias, init=init)

    project("q", D, num_queries * NH, ("embed", "heads"), config.attention_bias)
    project("k", D, GH, ("embed", "kv_heads"), config.attention_bias)
    project("v", D, GH, ("embed", "kv_heads"), config.attention_bias)
    project("o", NH, D, ("heads", "embed"), config.has_output_bias, init)
    if config.has_qk_norm:
        for name in ("q_norm", "k_norm"):
            table[name] = norm_spec(H, f"{prefix}{name}", "head_dim")
    return table


def gated_specs(
    prefix: str, hf: str, D: int, F: int, *, has_bias: bool = False, init: str = "normal"
) -> dict[str, ParamSpec]:
    """Returns the three maps of a gated feed-forward part.

    Args:
      prefix: of our names, ``{prefix}gate``, ``{prefix}up`` and ``{prefix}down``.
      hf: of the external names, without the last dot.
      D: the outer width.
      F: the inner width.
      has_bias: whether the maps have biases.
      init: of ``{prefix}down``, see ``ParamSpec``.
    """
    table: dict[str, ParamSpec] = {}
    for name in ("gate", "up"):
        axes = ("embed", "mlp")
        hf_name = f"{hf}.{name}_proj"
        linear_specs(table, f"{prefix}{name}", D, F, axes, hf_name, has_bias=has_bias)
    axes = ("mlp", "embed")
    hf_name = f"{hf}.down_proj"
    linear_specs(table, f"{prefix}down", F, D, axes, hf_name, has_bias=has_bias, init=init)
    return table


def layer_specs(
    config: Any,
    mixer: dict[str, ParamSpec],
    feed: dict[str, ParamSpec],
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
) -> dict[str, ParamSpec]:
    """Returns the weights of a layer of ``layers.pre_norm_layer``.

    Args:
      config: the model's shape.
      mixer: the weights of attention, or of what stands in its place.
      feed: those of the feed-forward part.
      norms: the external names of their norms, without what all of a layer begin with.
    """
    first, second = (norm_spec(config.hidden_size, f"model.layers.{{i}}.{hf}") for hf in norms)
    return {"attention_norm": first, **mixer, "mlp_norm": second, **feed}


def mlp_specs(config: Any, prefix: str) -> dict[str, ParamSpec]:
    """Returns the weights of ``layers.mlp``; their external names begin with ``prefix``."""
    return gated_specs(
        "",
        prefix.removesuffix("."),
        config.hidden_size,
        config.intermediate_size,
        has_bias=config.mlp_bias,
        init="residual",
    )


def outer_specs(
    config: Any, embed: str = "model.embed_tokens", norm: str = "model.norm"
) -> dict[str, ParamSpec]:
    """Returns the weights outside of the layers: embedding, final norm, and head unless tied.

    Args:
      config: the model's shape.
      embed: the external name of the embedding, without ``.weight``.
      norm: the external name of the final norm, without ``.weight``.
    """
    D = config.hidden_size
    V = config.vocab_size
    table = {
        "embed": ParamSpec((V, D), ("vocab", "embed"), f"{embed}.weight"),
        "final_norm": norm_spec(D, norm),
    }
    if not config.tie_word_embeddings:
        linear_specs(table, "head", D, V, ("embed", "vocab"), "lm_head")
    return table
