"""One declaration a weight: shape, logical axes, initialiser and external name.

From this table come the initial parameters, the map to Hugging Face tensor names, the
restore target of a checkpoint and (through the logical axes) the sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec_jax.errors import WeightsError
from spec_jax.models.config import ModelConfig
from spec_jax.models.panels import join

_STD = 0.02  # of random weights
Params = dict[str, Any]


class ParamSpec(NamedTuple):
    """One weight.

    Attributes:
      shape: its size, a layer's axis left out.
      axes: the logical name of each dimension.
      hf_name: the tensor's name in a Hugging Face checkpoint; ``{i}`` is the layer and ``{e}``
        an expert, of which there is a tensor each there, stacked along the first axis here.
      is_linear: a linear map, stored ``[in, out]`` here and ``[out, in]`` there.
      init: "normal" (standard deviation 0.02), "residual" (scaled by depth), "ones", "zeros".
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    hf_name: str
    is_linear: bool = False
    init: str = "normal"


def _linear(table, name, d_in, d_out, axes, hf, *, has_bias=False, init="normal"):
    table[name] = ParamSpec((d_in, d_out), axes, f"{hf}.weight", is_linear=True, init=init)
    if has_bias:
        table[f"{name}_bias"] = ParamSpec((d_out,), axes[1:], f"{hf}.bias", init="zeros")


def layer_table(config: ModelConfig) -> dict[str, ParamSpec]:
    """The weights of one layer, by our name."""
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    NH, GH = config.num_attention_heads * H, config.num_key_value_heads * H
    attention, mlp = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
    table: dict[str, ParamSpec] = {}
    bias = config.attention_bias
    table["attention_norm"] = ParamSpec(
        (D,), ("embed",), "model.layers.{i}.input_layernorm.weight", init="ones"
    )
    _linear(table, "q", D, NH, ("embed", "heads"), attention + "q_proj", has_bias=bias)
    _linear(table, "k", D, GH, ("embed", "kv_heads"), attention + "k_proj", has_bias=bias)
    _linear(table, "v", D, GH, ("embed", "kv_heads"), attention + "v_proj", has_bias=bias)
    _linear(
        table, "o", NH, D, ("heads", "embed"), attention + "o_proj",
        has_bias=config.has_output_bias, init="residual",
    )
    if config.has_qk_norm:
        for name in ("q_norm", "k_norm"):
            table[name] = ParamSpec((H,), ("head_dim",), f"{attention}{name}.weight", init="ones")
    table["mlp_norm"] = ParamSpec(
        (D,), ("embed",), "model.layers.{i}.post_attention_layernorm.weight", init="ones"
    )
    bias = config.mlp_bias
    _linear(table, "gate", D, F, ("embed", "mlp"), mlp + "gate_proj", has_bias=bias)
    _linear(table, "up", D, F, ("embed", "mlp"), mlp + "up_proj", has_bias=bias)
    _linear(
        table, "down", F, D, ("mlp", "embed"), mlp + "down_proj", has_bias=bias, init="residual"
    )
    return table


def outer_table(config: ModelConfig) -> dict[str, ParamSpec]:
    """The weights outside of the layers: embedding, final norm, head (absent when tied)."""
    D, V = config.hidden_size, config.vocab_size
    table = {
        "embed": ParamSpec((V, D), ("vocab", "embed"), "model.embed_tokens.weight"),
        "final_norm": ParamSpec((D,), ("embed",), "model.norm.weight", init="ones"),
    }
    if not config.tie_word_embeddings:
        _linear(table, "head", D, V, ("embed", "vocab"), "lm_head")
    return table


def check_weights(params: Mapping[str, Any], shapes: Mapping[str, tuple], owner: str) -> None:
    """Checks that weights are there and have their shapes.

    Args:
      params: the weights by name.
      shapes: what is expected, by name.
      owner: what they are weights of, for the message.

    Raises:
      WeightsError: a weight that is missing or of another shape; it is named.
    """
    for name, expected in shapes.items():
        shape = params[name].shape if name in params else None
        if shape != expected:
            has = "is missing" if shape is None else f"has shape {list(shape)}"
            raise WeightsError(f"{owner}{name} {has}; its config asks for {list(expected)}")


def num_params(config: ModelConfig) -> int:
    """How many parameters the model has; a tied head is counted once."""
    count = lambda table: sum(_size(spec.shape) for spec in table.values())
    return count(outer_table(config)) + config.num_hidden_layers * count(layer_table(config))


def _size(shape):
    size = 1
    for dim in shape:
        size *= dim
    return size


def assemble(config: ModelConfig, leaf) -> Params:
    """Builds the nested dict from ``leaf(spec, layer)``, ``layer`` being None outside of layers.

    Unrolled: ``params["layers"]["3"]["q"]``. Scanned: ``params["layers"]["q"]``, stacked
    ``[L, ...]``.
    """
    params: Params = {name: leaf(spec, None) for name, spec in outer_table(config).items()}
    layers = range(config.num_hidden_layers)
    table = layer_table(config)
    if config.scan_layers:
        stack = lambda spec: jax.tree.map(lambda *x: jnp.stack(x), *[leaf(spec, i) for i in layers])
        params["layers"] = {name: stack(spec) for name, spec in table.items()}
    else:
        params["layers"] = {
            str(i): {name: leaf(spec, i) for name, spec in table.items()} for i in layers
        }
    return params


def walk(config: ModelConfig, params: Params) -> Iterator[tuple[ParamSpec, int | None, Any]]:
    """Yields ``(spec, layer, array)`` for every weight, a stacked one layer by layer.

    Arrays have their spec's shape, whatever layout the parameters are in.
    """
    whole = lambda spec, array: join(array) if spec.is_linear else array
    for name, spec in outer_table(config).items():
        yield spec, None, whole(spec, params[name])
    for i in range(config.num_hidden_layers):
        for name, spec in layer_table(config).items():
            layers = params["layers"]
            array = layers[name][i] if config.scan_layers else layers[str(i)][name]
            yield spec, i, whole(spec, array)


def init_table(
    table: Mapping[str, ParamSpec], key: jax.Array, dtype=jnp.float32, one: float = 1.0
) -> dict[str, jax.Array]:
    """Random weights of one table, beside a target's: all from one normal law.

    Args:
      table: the weights.
      key: one PRNG key, consumed.
      dtype: of the weights.
      one: what norms that leave their input as it is hold.
    """

    def leaf(spec: ParamSpec, index: int):
        if spec.init in ("ones", "zeros"):
            return jnp.full(spec.shape, one if spec.init == "ones" else 0.0, dtype)
        return (_STD * jax.random.normal(jax.random.fold_in(key, index), spec.shape)).astype(dtype)

    return {name: leaf(spec, i) for i, (name, spec) in enumerate(table.items())}


def init_params(config: ModelConfig, key: jax.Array, dtype=jnp.float32) -> Params:
    """Random parameters, the same for stacked and separate layers. The key is consumed.

    Args:
      config: the model's shape.
      key: one PRNG key.
      dtype: of every weight.

    Returns:
      The nested dict that ``transformer.forward`` takes.
    """
    table = layer_table(config)
    outer, inner = ([s.hf_name for s in t.values()] for t in (outer_table(config), table))

    def leaf(spec: ParamSpec, layer):
        if layer is None:
            number = outer.index(spec.hf_name)
        else:
            number = len(outer) + layer * len(inner) + inner.index(spec.hf_name)
        this = jax.random.fold_in(key, number)
        if spec.init in ("ones", "zeros"):
            return jnp.full(spec.shape, float(spec.init == "ones"), dtype)
        std = _STD
        if spec.init == "residual":
            std /= (2 * config.num_hidden_layers) ** 0.5
        return (std * jax.random.normal(this, spec.shape)).astype(dtype)

    return assemble(config, leaf)
