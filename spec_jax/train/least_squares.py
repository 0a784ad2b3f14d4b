"""Least squares over batches: the linear map that predicts best, in closed form.

A head that begins with this map predicts before its first step what it would otherwise learn in
many, and the optimizer begins with the sizes of the map's inputs, see ``with_input_scales``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax.scipy.linalg import solve

_RIDGE = 0.01  # of each input's sum of squares


@flax.struct.dataclass
class Sums:
    """Sums over rows of inputs f32[N] and of the outputs f32[D] that they are to predict."""

    products: jax.Array  # f32[N,N], of the inputs with each other
    outputs: jax.Array  # f32[N,D], of the inputs with the outputs
    sizes: jax.Array  # f32[N], of the inputs' absolute values, which outliers change little
    count: jax.Array  # f32[], rows

    @classmethod
    def of(cls, inputs: jax.Array, outputs: jax.Array, is_counted: jax.Array) -> Sums:
        """Sums the rows of a batch.

        Args:
          inputs: dtype[B,T,N].
          outputs: dtype[B,T,D].
          is_counted: bool[B,T], the rows that count.
        """
        x, y = (
            jnp.where(is_counted[..., None], rows.astype(jnp.float32), 0.0)
            for rows in (inputs, outputs)
        )
        product = functools.partial(jnp.einsum, "btn,btm->nm", x, precision="highest")
        sizes = jnp.abs(x).sum(axis=(0, 1))
        return cls(product(x), product(y), sizes, is_counted.sum().astype(jnp.float32))

    def solve(self) -> jax.Array:
        """Returns the linear map f32[N,D] with the least squared error, a ridge regression.

        The ridge is a share of each input's own sum of squares, so that the map does not depend
        on the units of the inputs.
        """
        size = jnp.sqrt(jnp.maximum(jnp.diag(self.products), 1e-30))
        unit = self.products / size[:, None] / size + _RIDGE * jnp.eye(len(size))
        return solve(unit, self.outputs / size[:, None], assume_a="pos") / size[:, None]

    def mean_sizes(self, width: int, num_parts: int) -> jax.Array:
        """Returns f32[N',1], for each input of the first parts the mean size of its part.

        Args:
          width: the inputs of a part.
          num_parts: the parts; N' is their product.
        """
        sizes = self.sizes[: width * num_parts].reshape(num_parts, width).mean(axis=1)
        sizes = jnp.maximum(sizes / self.count, 1e-6)
        return jnp.repeat(sizes, width)[:, None]


class Start(NamedTuple):
    """How the heads of an objective begin with a map of least squares.

    Attributes:
      names: of the weights that ``scales`` returns, linear maps f32[N,D].
      sums: ``(head, batch, target, *, config, model) -> Sums``, of a batch with its view.
      weights: ``(head, sums, *, config) -> head`` with the map in its weights.
      scales: ``(sums, *, config) -> {name: f32[N,1]}``, the sizes of their inputs, for the
        optimizer.
    """

    names: tuple[str, ...]
    sums: Callable[..., Sums]
    weights: Callable[..., dict[str, Any]]
    scales: Callable[..., dict[str, jax.Array]]
