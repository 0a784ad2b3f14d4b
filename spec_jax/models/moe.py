"""Mixtures of experts: many feed-forward parts, of which each token uses a few.

Beside the letters of ``shapes.py``, X is the number of routed experts.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from spec_jax.models.checks import require
from spec_jax.models.specs import ParamSpec, gated_specs
from spec_jax.sharding import ambient, shard_map_over, spec

EXPERTS = ("experts_gate", "experts_up", "experts_down")
"""Names of the maps of the routed experts."""


class StackedWeight(NamedTuple):
    """One layer's weight, inside the stack of all layers; only what is indexed is read.

    Attributes:
      stack: of all layers, along the first axis.
      layer: i32[], its place in the stack.
    """

    stack: jax.Array
    layer: jax.Array

    def __getitem__(self, index: jax.Array) -> jax.Array:
        """Returns some matrices of the layer."""
        return self.stack[self.layer, index]


def _whole(weight):
    return weight.stack[weight.layer] if isinstance(weight, StackedWeight) else weight


def _axes(weight):
    is_stacked = isinstance(weight, StackedWeight)
    return StackedWeight(P(None, "experts"), P()) if is_stacked else P("experts")


def experts_table(hf: str, num_experts: int, D: int, F: int) -> dict[str, ParamSpec]:
    """Returns the stacked maps of the routed experts, ``experts_gate`` dtype[X,D,F] and so on.

    Args:
      hf: of the external names, without the number of the expert.
      num_experts: X.
      D: the outer width.
      F: the inner width of an expert.
    """
    return {
        name: spec._replace(shape=(num_experts, *spec.shape), axes=("experts", *spec.axes))
        for name, spec in gated_specs("experts_", f"{hf}.{{e}}", D, F).items()
    }


def check_groups(config: Any) -> None:
    """Checks the groups of experts of a config with the keys of DeepSeek-V3.

    Raises:
      ConfigError: The experts cannot be split so, or the groups kept have fewer than are chosen.
    """
    X = config.n_routed_experts
    groups = config.n_group
    kept = config.topk_group
    split = f"n_group {groups} of which topk_group {kept} are kept"
    is_split = X % groups == 0 and kept <= groups
    require(is_split, f"n_routed_experts {X} cannot be split into {split}")
    chosen = config.num_experts_per_tok
    held = X // groups * kept
    message = f"num_experts_per_tok is {chosen}; the {kept} groups kept have {held} experts"
    require(chosen <= held, message)


def mix_experts(
    layer: dict[str, jax.Array], x_BTD: jax.Array, weights_BTX: jax.Array, num_chosen: int
) -> jax.Array:
    """Returns the weighted sum of the outputs of each token's experts.

    Only experts that a token of the pass chose are read and computed: one after the other for all
    of its tokens; on a TPU each for the tokens that chose it, and on a GPU likewise where tokamax
    is installed, else for each choice by itself while those are few. On a mesh each device does so
    with the experts and the rows that it holds, and the results of the devices that share rows are
    added up. In the backward pass all experts are computed for all tokens.

    Args:
      layer: has the maps of ``experts_table``.
      x_BTD: dtype[B,T,D], normalised inputs.
      weights_BTX: f32[B,T,X], from ``route`` or ``route_in_groups``.
      num_chosen: how many experts a token has.

    Returns:
      dtype[B,T,D].
    """
    experts = tuple(layer[name] for name in EXPERTS)
    B, _, X = weights_BTX.shape
    mesh = ambient()
    # Rows are gathered if experts are split over the same axis of the mesh.
    rows = "batch" if mesh is None or spec(("experts", "batch"), (X, B), mesh)[1] else None
    in_axes = tuple(map(_axes, experts)), P(rows), P(rows, None, "experts")
    mix = functools.partial(_mix_rows, num_chosen=num_chosen)
    with jax.named_scope("experts"):
        run = shard_map_over(mix, in_axes, P(rows), summed=("experts", X))
        return run(experts, x_BTD, weights_BTX.astype(x_BTD.dtype))


def _mix_rows(experts, x_BTD, weights_BTX, num_chosen):
    """``mix_experts`` on one device, which may hold fewer experts than a token has."""
    X = weights_BTX.shape[-1]
    x = x_BTD.reshape(-1, x_BTD.shape[-1])
    mixed = _mix_chosen(experts, x, weights_BTX.reshape(-1, X), min(num_chosen, X))
    return mixed.reshape(x_BTD.shape)


Expert = jax.Array | StackedWeight
Experts = tuple[Expert, Expert, Expert]  # gate and up dtype[X,D,F], down dtype[X,F,D]


def mix_all(experts: Experts, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Computes all experts for every token dtype[...,D], even those of weight zero.

    Args:
      experts: the maps.
      x: dtype[M,D], tokens.
      weights: dtype[M,X], zero for experts that a token did not choose.

    Returns:
      dtype[M,D].
    """
    gate, up, down = map(_whole, experts)
    h = jax.nn.silu(jnp.einsum("...d,xdf->...xf", x, gate)) * jnp.einsum("...d,xdf->...xf", x, up)
    return jnp.einsum("...xf,xfd->...d", h * weights[..., None], down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _mix_chosen(experts: Experts, x: jax.Array, weights: jax.Array, num_chosen: int) -> jax.Array:
    sort = functools.partial(mix_sorted, num_chosen=num_chosen)
    grouped = _ragged_dot_of_gpu()
    if grouped is not None:
        cuda = functools.partial(sort, ragged_dot=grouped)
    elif len(x) * num_chosen <= weights.shape[1]:
        cuda = functools.partial(mix_each, num_chosen=num_chosen)
    else:
        cuda = mix_all
    return jax.lax.platform_dependent(experts, x, weights, tpu=sort, cuda=cuda, default=mix_in_turn)


def _ragged_dot_of_gpu() -> Callable[..., jax.Array] | None:
    """tokamax's product of groups of rows, if this is a process for GPUs that has it.

    jax's own is dense on a GPU.
    """
    if jax.default_backend() != "gpu":
        return None
    try:
        return importlib.import_module("tokamax").ragged_dot
    except ImportError:
        return None


def _forward(experts, x, weights, num_chosen):
    return _mix_chosen(experts, x, weights, num_chosen), (experts, x, weights)


def _backward(num_chosen, kept, gradient):
    del num_chosen
    return jax.vjp(mix_all, *kept)[1](gradient)


_mix_chosen.defvjp(_forward, _backward)


def mix_in_turn(experts: Experts, x: jax.Array, weights: jax.Array) -> jax.Array:
    """Computes the experts that any of the tokens dtype[M,D] chose, one after the other.

    Args:
      experts: the maps.
      x: dtype[M,D], tokens.
      weights: dtype[M,X], zero for experts that a token did not choose.

    Returns:
      dtype[M,D].
    """
    is_chosen = (weights != 0).any(axis=0)
    order = jnp.argsort(~is_chosen, stable=True)

    def add(i, out):
        gate, up, down = (w[order[i]] for w in experts)
        h = jax.nn.silu(x @ gate) * (x @ up)
        return out + (h * weights[:, order[i], None]) @ down

    return jax.lax.fori_loop(0, is_chosen.sum(), add, jnp.zeros_like(x))


def _groups(weight: Expert) -> tuple[jax.Array, int | jax.Array]:
    """Matrices dtype[X,...], and the number of the first that is meant."""
    if not isinstance(weight, StackedWeight):
        return weight, 0
    L, X, *matrix = weight.stack.shape
    return weight.stack.reshape(L * X, *matrix), weight.layer * X


def mix_sorted(
    experts: Experts,
    x: jax.Array,
    weights: jax.Array,
    num_chosen: int,
    ragged_dot: Callable[..., jax.Array] = jax.lax.ragged_dot,
) -> jax.Array:
    """Computes each expert for the tokens that chose it, which stand next to each other.

    A token that chose fewer than ``num_chosen`` of these experts has rows of no group, which stand
    after all others. Of a stack the experts of all layers are groups, and those of others empty.

    Args:
      experts: the maps.
      x: dtype[M,D], tokens.
      weights: dtype[M,X], zero for experts that a token did not choose.
      num_chosen: how many experts a token has.
      ragged_dot: the product of groups of rows with a matrix each.

    Returns:
      dtype[M,D].
    """
    (gate, first), (up, _), (down, _) = map(_groups, experts)
    chosen, ids = jax.lax.top_k(weights, num_chosen)
    ids = jnp.where(chosen != 0, first + ids, len(gate)).reshape(-1)
    order = jnp.argsort(ids, stable=True)
    rows = order // num_chosen
    sizes = jnp.bincount(ids, length=len(gate))
    product = functools.partial(ragged_dot, group_sizes=sizes.astype(jnp.int32))
    h = jax.nn.silu(product(x[rows], gate)) * product(x[rows], up)
    out = product(h * chosen.reshape(-1)[order, None], down)
    is_chosen = (jnp.arange(len(order)) < sizes.sum())[:, None]
    return jnp.zeros_like(x).at[rows].add(jnp.where(is_chosen, out, 0))


def mix_each(experts: Experts, x: jax.Array, weights: jax.Array, num_chosen: int) -> jax.Array:
    """Computes each token's experts by themselves, also those that other tokens chose.

    A product of one row is written as a sum of products in float32, which a GPU computes while it
    reads the expert. For ``dot`` it would write a copy of each expert first.

    Args:
      experts: the maps.
      x: dtype[M,D], tokens.
      weights: dtype[M,X], zero for experts that a token did not choose.
      num_chosen: how many experts a token has.

    Returns:
      dtype[M,D].
    """
    chosen, ids = jax.lax.top_k(weights.astype(jnp.float32), num_chosen)
    gate, up, down = experts

    def product(rows, weight):
        products = rows.astype(jnp.float32)[..., None] * weight[ids].astype(jnp.float32)
        return products.sum(axis=-2)

    rows = x[:, None]
    h = jax.nn.silu(product(rows, gate)) * product(rows, up)
    return (chosen[..., None] * product(h, down)).sum(axis=1).astype(x.dtype)


def route(logits: jax.Array, *, num_chosen: int, is_normalised: bool) -> jax.Array:
    """Returns the experts' weights by softmax over the logits.

    Args:
      logits: f32[B,T,X].
      num_chosen: number of experts per token.
      is_normalised: the chosen weights sum to one.

    Returns:
      f32[B,T,X], zero for experts that are not chosen.
    """
    weights = jnp.where(_is_top(logits, num_chosen), jax.nn.softmax(logits, axis=-1), 0.0)
    return weights / weights.sum(axis=-1, keepdims=True) if is_normalised else weights


def route_in_groups(
    logits: jax.Array,
    bias: jax.Array,
    *,
    num_chosen: int,
    num_groups: int,
    groups_chosen: int,
    is_normalised: bool,
    factor: float,
) -> jax.Array:
    """Returns the experts' weights by sigmoid scores, in the best groups of experts.

    A group scores the sum of its two best experts. The bias moves which experts are chosen, but
    not their weights.

    Source: DeepSeek-V3, arXiv 2412.19437, sections 2.1.2 and 3.2.2.

    Args:
      logits: f32[B,T,X].
      bias: f32[X], added to the scores for the choice.
      num_chosen: number of experts per token.
      num_groups: number of groups; neighbouring experts form a group.
      groups_chosen: number of groups per token.
      is_normalised: the chosen weights sum to one, before the factor.
      factor: multiplies the weights.

    Returns:
      f32[B,T,X], zero for experts that are not chosen.
    """
    scores = jax.nn.sigmoid(logits)
    choice = (scores + bias).reshape(*logits.shape[:-1], num_groups, -1)
    best = jax.lax.top_k(choice, min(2, choice.shape[-1]))[0].sum(axis=-1)
    choice = jnp.where(_is_top(best, groups_chosen)[..., None], choice, -jnp.inf)
    weights = jnp.where(_is_top(choice.reshape(logits.shape), num_chosen), scores, 0.0)
    if is_normalised:
        weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
    return weights * factor


def _is_top(x: jax.Array, k: int) -> jax.Array:
    """Returns a mask like x, True for the k largest entries of the last axis."""
    chosen = jax.lax.top_k(x, k)[1]
    return (chosen[..., None] == jnp.arange(x.shape[-1])).any(axis=-2)
