"""Learning-rate schedules and optimizers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spec_jax.config.checks import check_name

OPTIMIZERS = ("muon", "adamw")
_NOT_INNER = ("embed", "head")  # matrices that AdamW updates beside Muon


def warmup_stable_decay(peak: float, steps: int, warmup: int, decay_share: float) -> optax.Schedule:
    """Warms up linearly to ``peak``, stays there, and falls linearly to zero at the end.

    The schedule does not depend on ``steps`` before the decay begins, so until then a run may
    be shortened or lengthened.

    Args:
      peak: The highest rate.
      steps: The number of updates.
      warmup: The number of updates of the warm-up.
      decay_share: The part of the updates, in [0, 1], over which the rate falls to zero.
    """
    begin = decay_begin(steps, decay_share)
    return optax.join_schedules(
        [
            optax.linear_schedule(0.0, peak, warmup),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0.0, steps - begin),
        ],
        [warmup, max(begin, warmup)],
    )


def decay_begin(steps: int, decay_share: float) -> int:
    """Returns the update at which the decay begins."""
    return steps - max(1, round(steps * decay_share))


def make_optimizer(
    name: str,
    *,
    steps: int,
    warmup: int,
    decay_share: float,
    lr: float,
    matrix_lr: float,
    weight_decay: float,
    clip: float,
) -> optax.GradientTransformation:
    """Makes AdamW, or Muon for the inner matrices with AdamW for the rest.

    The inner matrices are all matrices except the embedding and the output head.

    Source: Muon, Jordan et al. 2024 (optax.contrib.muon): momentum whose matrices are
    orthogonalised before the update.

    Args:
      name: "adamw" or "muon".
      steps: The number of updates of the whole run.
      warmup: The number of updates of the warm-up.
      decay_share: The part of the run over which the rate falls to zero.
      lr: The peak rate of AdamW.
      matrix_lr: The peak rate of Muon.
      weight_decay: Decoupled weight decay, on matrices (the embedding included).
      clip: The largest norm of the whole gradient.

    Raises:
      ConfigError: The name is unknown.
    """
    check_name("optimizer", name, OPTIMIZERS)
    schedule = functools.partial(
        warmup_stable_decay, steps=steps, warmup=warmup, decay_share=decay_share
    )
    is_matrix = functools.partial(jax.tree.map, lambda x: x.ndim == 2)
    if name == "adamw":
        update = optax.adamw(schedule(lr), b2=0.95, weight_decay=weight_decay, mask=is_matrix)
    else:
        update = optax.contrib.muon(
            schedule(matrix_lr),
            adam_learning_rate=schedule(lr),
            adam_b2=0.95,
            weight_decay=weight_decay,
            weight_decay_mask=is_matrix,
            muon_weight_dimension_numbers=_inner_matrices,
        )
    return optax.chain(optax.clip_by_global_norm(clip), update)


class EndState(NamedTuple):
    """The state of ``with_end``."""

    inner: Any
    count: jax.Array  # i32[], updates done
    end: jax.Array  # i32[], updates of the whole run; 0 until it is known


def with_end(
    optimizer: optax.GradientTransformation, decay_share: float
) -> optax.GradientTransformation:
    """Lets the updates of an optimizer fall to zero at an end that its state holds.

    The last updates fall as those of ``warmup_stable_decay``. The end may be set when the step is
    compiled already, see ``set_end``.

    Args:
      optimizer: Of constant rates.
      decay_share: The part of the updates over which they fall.
    """

    def init(params):
        return EndState(optimizer.init(params), jnp.int32(0), jnp.int32(0))

    def update(updates, state, params=None):
        updates, inner = optimizer.update(updates, state.inner, params)
        falling = jnp.maximum(1.0, jnp.round(state.end * decay_share))
        scale = jnp.clip((state.end - state.count) / falling, 0.0, 1.0)
        updates = jax.tree.map(lambda x: x * scale, updates)
        return updates, EndState(inner, state.count + 1, state.end)

    return optax.GradientTransformation(init, update)


def set_end(state: EndState, end: int) -> EndState:
    """Returns the state of ``with_end`` with a number of updates of the whole run."""
    return state._replace(end=jnp.full_like(state.end, end))


class ScaledState(NamedTuple):
    """The state of ``with_input_scales``."""

    inner: Any
    input_scales: dict[str, jax.Array]  # f32[N,1] by the name of a map f32[N,D]


def with_input_scales(
    optimizer: optax.GradientTransformation, names: Sequence[str]
) -> optax.GradientTransformation:
    """Updates linear maps as if each of their inputs were divided by a number of its own.

    An update of Muon is as large for small inputs as for large ones, so among inputs of several
    sizes the largest move the outputs most, such as a target's states after later layers. The map
    and what it computes stay in the inputs' own units. The numbers are held by the state, and are 1
    until they are set, ``optax.tree.set(state, input_scales=...)``.

    Args:
      optimizer: Of a dict of parameters.
      names: Of the maps, f32[N,D].
    """

    def scaled(tree, scales, sign):
        return {**tree, **{name: tree[name] * x**sign for name, x in scales.items()}}

    def init(params):
        scales = {name: jnp.ones((len(params[name]), 1)) for name in names}
        return ScaledState(optimizer.init(params), scales)

    def update(updates, state, params=None):
        scales = state.input_scales
        params = None if params is None else scaled(params, scales, 1)
        updates, inner = optimizer.update(scaled(updates, scales, -1), state.inner, params)
        return scaled(updates, scales, -1), ScaledState(inner, scales)

    return optax.GradientTransformation(init, update)


def _inner_matrices(params):
    def leaf(path, x):
        is_inner = x.ndim == 2 and path[-1].key not in _NOT_INNER
        return optax.contrib.MuonDimensionNumbers() if is_inner else None

    return jax.tree_util.tree_map_with_path(leaf, params)
