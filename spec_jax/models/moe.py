"""Mixtures of experts: many feed-forward parts, of which each token uses a few.

Beside the letters of ``shapes.py``, X is the number of routed experts.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spec_jax.models.layers import linear
from spec_jax.models.specs import ParamSpec, gated_specs


def experts_table(hf: str, num_experts: int, D: int, F: int) -> dict[str, ParamSpec]:
    """Returns the stacked maps of the routed experts, ``experts_gate`` dtype[X,D,F] and so on."""
    return {
        name: spec._replace(shape=(num_experts, *spec.shape), axes=("experts", *spec.axes))
        for name, spec in gated_specs("experts_", f"{hf}.{{e}}", D, F).items()
    }


def gated(layer: dict[str, jax.Array], x_BTD: jax.Array, prefix: str = "") -> jax.Array:
    """Applies the gated feed-forward part of this prefix to normalised inputs, without residual."""
    h = jax.nn.silu(linear(x_BTD, layer, f"{prefix}gate")) * linear(x_BTD, layer, f"{prefix}up")
    return linear(h, layer, f"{prefix}down")


def mix_experts(layer: dict[str, jax.Array], x_BTD: jax.Array, weights_BTX: jax.Array) -> jax.Array:
    """Returns the weighted sum of all experts' outputs.

    Every expert runs for every token, even with weight zero. That is exact and needs no gather,
    but does X / (experts per token) times the arithmetic and reads all experts in each pass.

    Args:
      layer: has the maps of ``experts_table``.
      x_BTD: dtype[B,T,D], normalised inputs.
      weights_BTX: f32[B,T,X], from ``route`` or ``route_in_groups``.

    Returns:
      dtype[B,T,D].
    """
    with jax.named_scope("experts"):
        gate = jnp.einsum("btd,xdf->btxf", x_BTD, layer["experts_gate"])
        up = jnp.einsum("btd,xdf->btxf", x_BTD, layer["experts_up"])
        h = jax.nn.silu(gate) * up * weights_BTX[..., None].astype(x_BTD.dtype)
        return jnp.einsum("btxf,xfd->btd", h, layer["experts_down"])


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
