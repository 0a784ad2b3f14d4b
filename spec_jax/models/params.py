"""The weights of a model, built from the tables that its family declares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh
from jax.typing import DTypeLike

from spec_jax.errors import SpecJaxError, WeightsError
from spec_jax.models.cpu_layout import find, from_panels
from spec_jax.models.families import AnyConfig, family_of
from spec_jax.models.runs import name_of, runs_of, stacks_of
from spec_jax.models.specs import ParamSpec
from spec_jax.sharding import AxisRules, check_divides, log_once, shardings, unsplit_weights

_STD = 0.02  # of random weights
_LISTED = 8  # weights that a message names
Params = dict[str, Any]


def is_float(x: Any) -> bool:
    """Returns whether this is an array of floating-point numbers."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def cast(tree: Any, dtype: DTypeLike | None) -> Any:
    """Casts the floating arrays of a pytree to ``dtype``; None leaves them as they are."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


def layer_tables(config: AnyConfig) -> list[dict[str, ParamSpec]]:
    """Returns the declared weights of every layer, by our name."""
    return family_of(config).layer_tables(config)


def outer_table(config: AnyConfig) -> dict[str, ParamSpec]:
    """Returns the declared weights outside of the layers, by our name."""
    return family_of(config).outer_table(config)


def flat_table(table: dict[str, Any]) -> dict[str, ParamSpec]:
    """Returns the declared weights of nested tables in one, their names joined by dots."""
    return traverse_util.flatten_dict(table, sep=".")


def nest(flat: dict[str, Any]) -> Params:
    """Returns the opposite of ``flat_table``, of weights or of anything else by name."""
    return traverse_util.unflatten_dict(flat, sep=".")


def check_weights(params: dict[str, Any], table: dict[str, Any], owner: str) -> None:
    """Checks that weights are present and have the expected shapes.

    Args:
      params: the weights.
      table: what has their shapes, such as a ``ParamSpec``, nested as they are.
      owner: what the message begins with.

    Raises:
      WeightsError: a weight is missing or has another shape; the message names it.
    """
    flat = flat_table(params)
    for name, spec in flat_table(table).items():
        shape = flat[name].shape if name in flat else None
        if shape != spec.shape:
            has = "is missing" if shape is None else f"has shape {list(shape)}"
            raise WeightsError(f"{owner}{name} {has}; its config asks for {list(spec.shape)}")


def num_params(config: AnyConfig) -> int:
    """Returns the number of parameters of a model; a tied head is counted once."""
    return sum(math.prod(spec.shape) for _, spec, _ in declared(config))


def _stack(arrays: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *x: jnp.stack(x), *arrays)


def assemble(
    config: AnyConfig,
    leaf: Callable[[ParamSpec, int | None], Any],
    stack: Callable[[Sequence[Any]], Any] = _stack,
) -> Params:
    """Builds a model's parameters from a function that returns one weight.

    Args:
      config: the model's shape.
      leaf: ``(spec, layer) -> array``; ``layer`` is None outside of the layers.
      stack: joins what ``leaf`` returns for the layers of a stacked weight.

    Returns:
      A nested dict. Layers are separate, ``params["layers"]["3"]["q"]``, or with
      ``config.scan_layers`` those that repeat are stacked along a leading axis, and named by
      their numbers: ``params["layers"]["0:32"]["q"]``, see ``runs.name_of``.
    """
    params: Params = {name: leaf(spec, None) for name, spec in outer_table(config).items()}
    tables = layer_tables(config)

    def weights(spec, layers):
        each = [leaf(spec, i) for i in layers]
        return stack(each) if len(each) > 1 else each[0]

    params["layers"] = {
        name_of(layers): {name: weights(spec, layers) for name, spec in tables[layers[0]].items()}
        for run in runs_of(config)
        for layers in run
    }
    return params


def assemble_named(
    config: AnyConfig, leaf: Callable[[str, int | None], Any], dtype: DTypeLike, owner: str
) -> Params:
    """Builds a model's parameters from a function of their names, see ``LoadedModel.from_params``.

    Args:
      config: the model's shape.
      leaf: ``(name, layer) -> array``.
      dtype: of the weights.
      owner: whose weights they are, for messages.

    Raises:
      WeightsError: ``leaf`` raises a KeyError or returns None, an array of another shape or one
        that is not finite; the message lists all such weights. ``leaf`` raises another error.
    """
    found = {}
    wrong = []
    for name, spec, layer in declared(config):
        where = name if layer is None else f"{name} of layer {layer}"
        try:
            array = leaf(name, layer)
        except KeyError:
            array = None
        except SpecJaxError:
            raise
        except Exception as error:  # a transform may raise of any kind
            raise WeightsError(f"weights of {owner}: {where}: {error!r}") from error
        if array is None:
            wrong.append(f"{where} is missing; expected {list(spec.shape)}")
        elif np.shape(array) != spec.shape:
            shape = list(np.shape(array))
            wrong.append(f"{where} has shape {shape}; expected {list(spec.shape)}")
        else:
            found[spec.hf_name, layer] = array = jnp.asarray(array, spec.dtype or dtype)
            if not (isinstance(array, jax.core.Tracer) or jnp.isfinite(array).all()):
                wrong.append(f"{where} is not finite in {array.dtype}")
    if wrong:
        more = f"; and {len(wrong) - _LISTED} more" * (len(wrong) > _LISTED)
        raise WeightsError(f"weights of {owner}: {'; '.join(wrong[:_LISTED])}{more}")
    return assemble(config, lambda spec, layer: found[spec.hf_name, layer])


def layer_weights(config: AnyConfig, params: Params, layer: int) -> dict[str, Any]:
    """Returns the weights of one layer by name, whether they are stacked or separate.

    Args:
      config: the model's shape.
      params: the model's weights.
      layer: the number of the layer.
    """
    layers, place = stacks_of(config)[layer]
    weights = params["layers"][name_of(layers)]
    return weights if len(layers) == 1 else jax.tree.map(lambda w: w[place], weights)


def head_counts(config: Any) -> dict[str, int]:
    """Returns how many units the mesh has to divide for each logical axis of heads or experts."""
    names = {"heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    counts = {axis: getattr(config, name) for axis, name in names.items() if hasattr(config, name)}
    mixer = getattr(config, "mixer", None)
    if mixer is not None:
        counts["state_heads"] = mixer.num_heads
    for name in ("num_experts", "n_routed_experts"):
        if getattr(config, name, None) is not None:
            counts["experts"] = getattr(config, name)
    return counts


def param_table(config: AnyConfig) -> Params:
    """Returns the declared weights of a model, nested and stacked as its parameters are."""

    def stacked(layers):
        first = layers[0]
        return first._replace(shape=(len(layers), *first.shape), axes=("layers", *first.axes))

    return assemble(config, lambda spec, layer: spec, stacked)


def param_shardings(config: AnyConfig, mesh: Mesh, axis_rules: AxisRules | None = None) -> Params:
    """Returns where a model's weights lie on a mesh, nested as its parameters are.

    Args:
      config: the model's shape.
      mesh: the devices.
      axis_rules: by default those of ``sharding.use_axis_rules``.
    """
    return shardings(param_table(config), mesh, axis_rules, head_counts(config))


def placement(owner: str, config: AnyConfig, mesh: Mesh, axis_rules: AxisRules) -> Params:
    """Returns where a model's weights lie, of a mesh that divides its heads.

    Args:
      owner: the model's name, for messages.
      config: the model's shape.
      mesh: the devices.
      axis_rules: which dimensions are split.

    Raises:
      ConfigError: the mesh does not divide the heads.
    """
    return table_placement(owner, config, param_table(config), mesh, axis_rules)


def table_placement(
    owner: str, layer: Any, table: Mapping[str, Any], mesh: Mesh, axis_rules: AxisRules
) -> Params:
    """Returns where the weights of a table lie, of a mesh that divides its heads.

    What else the mesh does not divide is logged.

    Args:
      owner: the name of the model or head, for messages.
      layer: the config that counts the heads; None: there are none.
      table: the declared weights, nested as the parameters are.
      mesh: the devices.
      axis_rules: which dimensions are split.

    Raises:
      ConfigError: the mesh does not divide the heads.
    """
    counts = head_counts(layer)
    check_divides(owner, counts, mesh, axis_rules)
    for line in unsplit_weights(owner, table, mesh, axis_rules, counts):
        log_once(line)
    return shardings(table, mesh, axis_rules, counts)


def declared(config: AnyConfig) -> Iterator[tuple[str, ParamSpec, int | None]]:
    """Yields ``(name, spec, layer)`` of every weight; ``layer`` is None outside of the layers."""
    tables = [(None, outer_table(config)), *enumerate(layer_tables(config))]
    for layer, table in tables:
        for name, spec in table.items():
            yield name, spec, layer


def walk(config: AnyConfig, params: Params) -> Iterator[tuple[ParamSpec, int | None, Any]]:
    """Yields ``(spec, layer, array)`` for every weight; stacked weights come layer by layer.

    Arrays have the shape of their declaration, even if the parameters are laid out in panels.
    """
    for name, spec, i in declared(config):
        layers, place = (range(1), 0) if i is None else stacks_of(config)[i]
        held, columns = find(params if i is None else params["layers"][name_of(layers)], name)
        array = from_panels(held)
        array = array if columns is None else array[:, columns]
        yield spec, i, array if len(layers) == 1 else array[place]


def _time_steps(key, shape):
    """The inverse softplus of steps that are log-uniform between 0.001 and 0.1."""
    step = jnp.exp(jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))


_INITS = {
    "ones": lambda key, shape: jnp.ones(shape),
    "zeros": lambda key, shape: jnp.zeros(shape),
    "decay": lambda key, shape: jnp.log(jnp.arange(1.0, shape[0] + 1)),
    "time step": _time_steps,
    "conv": lambda key, shape: jax.random.uniform(key, shape, minval=-1) / shape[-1] ** 0.5,
    "first tap": lambda key, shape: jnp.zeros(shape).at[..., 0, :].set(1),
}


def _draw(spec: ParamSpec, key: jax.Array, dtype: DTypeLike, std: float = _STD) -> jax.Array:
    """Returns one random weight."""
    init = _INITS.get(spec.init, lambda key, shape: std * jax.random.normal(key, shape))
    return init(key, spec.shape).astype(spec.dtype or dtype)


def init_table(
    table: Mapping[str, Any], key: jax.Array, dtype: DTypeLike = jnp.float32, one: float = 1.0
) -> Params:
    """Returns random weights of one table, such as a head's, all from one normal distribution.

    Args:
      table: the declared weights, or such tables by name.
      key: one PRNG key, consumed.
      dtype: of the weights.
      one: the value of weights declared as "ones"; 0.0 for norms that are stored less one.
    """

    def leaf(spec: ParamSpec | Mapping[str, Any], index: int):
        this = jax.random.fold_in(key, index)
        if isinstance(spec, Mapping):
            return init_table(spec, this, dtype, one)
        if spec.init == "ones":
            return jnp.full(spec.shape, one, spec.dtype or dtype)
        return _draw(spec, this, dtype)

    return {name: leaf(spec, i) for i, (name, spec) in enumerate(table.items())}


def init_params(config: AnyConfig, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Params:
    """Returns random parameters. They are the same whether layers are stacked or separate.

    Args:
      config: the model's shape.
      key: one PRNG key, consumed.
      dtype: of every weight.

    Returns:
      The nested dict that ``transformer.forward`` takes, see ``assemble``.
    """
    names = [(layer, spec.hf_name) for _, spec, layer in declared(config)]
    number = {name: i for i, name in enumerate(names)}

    def leaf(spec: ParamSpec, layer):
        this = jax.random.fold_in(key, number[layer, spec.hf_name])
        std = _STD
        if spec.init == "residual":
            std /= (2 * config.num_hidden_layers) ** 0.5
        return _draw(spec, this, dtype, std)

    return assemble(config, leaf)
