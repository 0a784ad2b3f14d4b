"""The state of training, and one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from spec_jax.errors import ConfigError
from spec_jax.models.checks import require
from spec_jax.models.params import cast
from spec_jax.train.means import merge_stacked


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


def train_step(
    state: TrainState,
    batch: Any,
    frozen: Any = None,
    *,
    objective: Callable[..., tuple[jax.Array, dict]],
    optimizer: optax.GradientTransformation,
    dtype: DTypeLike | None = None,
    accumulate: int = 1,
) -> tuple[TrainState, dict[str, Any]]:
    """Computes one update. It is pure: jit it with the state donated.

    A batch of which nothing counts changes neither the parameters nor the optimizer's state.

    Args:
      state: The state; it is consumed.
      batch: What the objective reads, arrays whose first dimension is the batch.
      frozen: Parameters that the objective reads and that are not trained, or None.
      objective: ``(params, batch, frozen, counts=None) -> (loss f32[], figures)``, see
        ``Objective``.
      optimizer: What ``make_optimizer`` returns.
      dtype: The dtype to compute in. None means float32. The parameters and their updates are
        float32 in either case.
      accumulate: The number of parts of the batch that are computed one after the other, which
        needs less memory. The update and the figures are those of the whole batch.

    Returns:
      The next state, and the figures: ``loss``, ``grad_norm`` and the objective's own.

    Raises:
      ConfigError: The batch cannot be computed in parts.
    """

    def run(params, batch, *counts):
        return objective(cast(params, dtype), batch, frozen, *counts)

    graded = jax.value_and_grad(run, has_aux=True)
    if accumulate == 1:
        (value, figures), grads = graded(state.params, batch)
    else:
        parts = _parts(batch, accumulate)
        (value, figures), grads = _sum_of_parts(run, graded, state.params, parts)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), **figures}
    params = optax.apply_updates(state.params, updates)
    if terms := figures.get("terms"):
        is_empty = jnp.stack([jnp.all(term.count == 0) for term in terms.values()]).all()
        old = state.params, state.opt_state

        def keep(old, new):
            return jnp.where(is_empty, old, new)

        params, opt_state = jax.tree.map(keep, old, (params, opt_state))
    return TrainState(state.step + 1, params, opt_state), metrics


def _parts(batch: Any, count: int) -> Any:
    """Cuts a batch into ``count`` parts of every count-th row; rows stay on their devices."""
    sizes = {x.shape[0] if x.ndim else None for x in jax.tree.leaves(batch)}
    message = f"accumulate is {count}, but an array of the batch has no rows; expected a batch with"
    require(None not in sizes, f"{message} keys of its rows, see row_keys")
    message = f"accumulate is {count}; the batch has rows {sorted(sizes)}"
    is_divided = not any(size % count for size in sizes)
    require(is_divided, f"{message}: expected a multiple of {count}")
    return jax.tree.map(lambda x: x.reshape(-1, count, *x.shape[1:]).swapaxes(0, 1), batch)


def _sum_of_parts(run, graded, params, parts):
    """Loss, figures and gradients of a batch in parts; each part is divided by all parts' counts.

    Where these are counts of the batch alone, the compiler drops all else of the first pass.
    """

    def counts_of(part):
        _, figures = run(params, part)
        if "terms" not in figures:
            raise ConfigError(
                "the objective's figures have no terms, by which parts of a batch are weighed: "
                "return them (see Objective), or set accumulate to 1"
            )
        return {name: term.count for name, term in figures["terms"].items()}

    counts = jax.tree.map(lambda x: x.sum(axis=0), jax.lax.map(counts_of, parts))

    def add(sums, part):
        (value, figures), grads = graded(params, part, counts)
        return jax.tree.map(jnp.add, sums, (value, grads)), figures

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (value, grads), figures = jax.lax.scan(add, zeros, parts)
    return (value, merge_stacked(figures)), grads
