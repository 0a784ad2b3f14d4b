"""The state of training, and one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike


@flax.struct.dataclass
class TrainState:
    """Everything that training carries from one step to the next."""

    step: jax.Array  # i32[], steps done
    params: Any  # nested dict, float32
    opt_state: Any

    @classmethod
    def create(cls, params: Any, optimizer: optax.GradientTransformation) -> TrainState:
        """Makes the state before the first step."""
        return cls(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def cast(tree: Any, dtype: DTypeLike | None) -> Any:
    """Casts the floating arrays of a pytree to ``dtype``; None leaves them as they are."""
    if dtype is None:
        return tree
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


def train_step(
    state: TrainState,
    batch: Any,
    frozen: Any = None,
    *,
    objective: Callable[..., tuple[jax.Array, dict]],
    optimizer: optax.GradientTransformation,
    dtype: DTypeLike | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Computes one update. It is pure: jit it with the state donated.

    Args:
      state: The state; it is consumed.
      batch: What the objective reads.
      frozen: Parameters that the objective reads and that are not trained, or None.
      objective: ``(params, batch, frozen) -> (loss f32[], figures)``.
      optimizer: What ``make_optimizer`` returns.
      dtype: The dtype to compute in. None means float32. The parameters and their updates are
        float32 in either case.

    Returns:
      The next state, and the figures: ``loss``, ``grad_norm`` and the objective's own.
    """
    run = lambda params: objective(cast(params, dtype), batch, frozen)
    (value, figures), grads = jax.value_and_grad(run, has_aux=True)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), **figures}
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state), metrics
