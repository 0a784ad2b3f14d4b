"""The state of training and one step of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax


@flax.struct.dataclass
class TrainState:
    """Everything that training carries from step to step."""

    step: jax.Array  # i32[], steps done
    params: Any  # nested dict, float32
    opt_state: Any

    @classmethod
    def create(cls, params, optimizer: optax.GradientTransformation) -> TrainState:
        """These parameters and an untouched optimizer."""
        return cls(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def cast(tree, dtype):
    """The same pytree, floating arrays in ``dtype``; None leaves it as it is."""
    if dtype is None:
        return tree
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


def train_step(
    state: TrainState, batch: Any, frozen: Any = None, *, objective: Callable, optimizer,
    dtype=None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update. Pure; jit it with the state donated.

    Args:
      state: consumed.
      batch: what the objective reads.
      frozen: parameters that it reads and that stay as they are, or None.
      objective: ``(params, batch, frozen) -> (scalar, figures)``.
      optimizer: of ``make_optimizer``.
      dtype: to compute in; the parameters and their update stay float32. None: float32.

    Returns:
      The next state, and ``loss``, ``grad_norm`` and the objective's own figures.
    """  # fmt: skip
    run = lambda params: objective(cast(params, dtype), batch, frozen)
    (value, figures), grads = jax.value_and_grad(run, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), **figures}
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state), metrics
