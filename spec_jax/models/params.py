"""One declaration a weight: shape, logical axes, initialiser and external name.

From this table come the initial parameters, the map to Hugging Face tensor names, the
restore target of a checkpoint and (through the logical axes) the sharding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec_jax.errors import WeightsError
from spec_jax.models.config import ModelConfig
from spec_jax.models.layout import from_panels

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


def outer_specs(config, embed: str, norm: str) -> dict[str, ParamSpec]:
    """Embedding, final norm and head (absent when tied); the first two by external name."""
    D, V = config.hidden_size, config.vocab_size
    table = {
        "embed": ParamSpec((V, D), ("vocab", "embed"), embed),
        "final_norm": ParamSpec((D,), ("embed",), norm, init="ones"),
    }
    if not config.tie_word_embeddings:
        linear_specs(table, "head", D, V, ("embed", "vocab"), "lm_head")
    return table


def layer_table(config: ModelConfig) -> dict[str, ParamSpec]:
    """The weights of one layer, by our name, of a model whose layers are all alike."""
    prefix, D = "model.layers.{i}.", config.hidden_size
    norm = lambda hf: ParamSpec((D,), ("embed",), f"{prefix}{hf}.weight", init="ones")
    return {
        "attention_norm": norm("input_layernorm"),
        **attention_specs(config, f"{prefix}self_attn."),
        "mlp_norm": norm("post_attention_layernorm"),
        **mlp_specs(config, f"{prefix}mlp."),
    }


@functools.singledispatch
def layer_tables(config: ModelConfig) -> list[dict[str, ParamSpec]]:
    """The weights of every layer, by our name. Families register their own."""
    return [layer_table(config)] * config.num_hidden_layers


@functools.singledispatch
def outer_table(config: ModelConfig) -> dict[str, ParamSpec]:
    """The weights outside of the layers. Families register their own."""
    return outer_specs(config, "model.embed_tokens.weight", "model.norm.weight")


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
    return sum(map(count, (outer_table(config), *layer_tables(config))))


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
    tables = layer_tables(config)
    if config.scan_layers:
        layers = range(len(tables))
        stack = lambda spec: jax.tree.map(lambda *x: jnp.stack(x), *[leaf(spec, i) for i in layers])
        params["layers"] = {name: stack(spec) for name, spec in tables[0].items()}
    else:
        params["layers"] = {
            str(i): {name: leaf(spec, i) for name, spec in table.items()}
            for i, table in enumerate(tables)
        }
    return params


def walk(config: ModelConfig, params: Params) -> Iterator[tuple[ParamSpec, int | None, Any]]:
    """Yields ``(spec, layer, array)`` for every weight, a stacked one layer by layer.

    Arrays have their spec's shape, whatever layout the parameters are in.
    """
    whole = lambda spec, array: from_panels(array) if spec.is_linear else array
    for name, spec in outer_table(config).items():
        yield spec, None, whole(spec, params[name])
    layers = params["layers"]
    for i, table in enumerate(layer_tables(config)):
        for name, spec in table.items():
            array = layers[name][i] if config.scan_layers else layers[str(i)][name]
            yield spec, i, whole(spec, array)


def _time_steps(key, shape):
    """What softplus turns into steps between 0.001 and 0.1, even in their logarithm."""
    step = jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))


_INITS = {
    "ones": lambda key, shape: jnp.ones(shape),
    "zeros": lambda key, shape: jnp.zeros(shape),
    "decay": lambda key, shape: jnp.log(jnp.arange(1.0, shape[0] + 1)),
    "time step": _time_steps,
    "conv": lambda key, shape: jax.random.uniform(key, shape, minval=-1) / shape[-1] ** 0.5,
}


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
    tables = [(None, outer_table(config)), *enumerate(layer_tables(config))]
    names = [(layer, spec.hf_name) for layer, table in tables for spec in table.values()]
    number = {name: i for i, name in enumerate(names)}

    def leaf(spec: ParamSpec, layer):
        this = jax.random.fold_in(key, number[layer, spec.hf_name])
        if spec.init in _INITS:
            return _INITS[spec.init](this, spec.shape).astype(dtype)
        std = _STD
        if spec.init == "residual":
            std /= (2 * config.num_hidden_layers) ** 0.5
        return (std * jax.random.normal(this, spec.shape)).astype(dtype)

    return assemble(config, leaf)
