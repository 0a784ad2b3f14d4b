"""Means of batches, kept as sums and counts, so that several batches are averaged as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.models.checks import require


@flax.struct.dataclass
class Mean:
    """A mean before its division; those of several batches are added up, see ``merge``."""

    total: jax.Array  # f32[...]
    count: jax.Array  # f32[...], of the same shape: how much was summed

    @classmethod
    def of(cls, values: jax.Array, weights: jax.Array) -> Mean:
        """Sums values that have weights.

        Args:
          values: f32[...].
          weights: bool[...] or f32[...]; a value without weight may be anything.
        """
        weights = weights.astype(jnp.float32)
        return cls(jnp.where(weights > 0, values * weights, 0.0).sum(), weights.sum())

    @property
    def value(self) -> jax.Array:
        """f32[...], 0 where nothing counts."""
        return self.over(self.count)

    def over(self, count: jax.Array) -> jax.Array:
        """Returns f32[...], the total divided by another count, such as that of all batches."""
        return self.total * reciprocal(count)


def reciprocal(count: jax.Array) -> jax.Array:
    """Returns f32[...], 1 over a count, or 0 where that is 0."""
    return (count > 0) / jnp.where(count > 0, count, 1.0)


def loss_of(terms: Mapping[str, Mean], counts: Mapping[str, jax.Array] | None = None) -> jax.Array:
    """Returns the loss f32[], the sum of all means of all terms.

    Args:
      terms: By name; a term with a weight has it in its total.
      counts: What each term is divided by. None: its own count.
    """
    over = {name: term.count for name, term in terms.items()} if counts is None else counts
    return sum(jnp.sum(term.over(over[name])) for name, term in terms.items())


def merge(*figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of several batches as one batch's: ``Mean``s are added, others averaged.

    Args:
      *figures: By name; each a ``Mean``, an array, or a dict of these.

    Raises:
      ConfigError: There are no batches.
    """
    require(len(figures) > 0, "there are no figures to merge; expected those of one batch or more")
    return merge_stacked(jax.tree.map(lambda *x: np.stack(x), *figures))


def merge_stacked(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Does what ``merge`` does to figures whose first dimension is that of the batches."""

    def one(figure):
        if isinstance(figure, Mean):
            return Mean(figure.total.sum(axis=0), figure.count.sum(axis=0))
        return figure.mean(axis=0)

    return jax.tree.map(one, dict(figures), is_leaf=lambda x: isinstance(x, Mean))


def report(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Returns figures as numbers: ``Mean``s are divided, and the loss is that of its ``terms``.

    A mean of nothing is NaN. With ``teacher_forced_accept``, the acceptance of drafts by position,
    comes ``teacher_forced_tau``, what a round emits at these rates. Likewise ``tau_sampled`` with
    ``chain_acceptance``, how likely a chain of drafts gets as far as each position.
    """
    numbers = dict(figures)
    if "terms" in numbers:
        numbers["loss"] = loss_of(numbers.pop("terms"))
    if "teacher_forced_accept" in numbers:
        rates = np.asarray(numbers["teacher_forced_accept"].value)
        numbers["teacher_forced_tau"] = 1 + np.cumprod(rates).sum()
    if "chain_acceptance" in numbers:
        numbers["tau_sampled"] = 1 + np.asarray(numbers.pop("chain_acceptance").value).sum()
    for name, figure in numbers.items():
        if isinstance(figure, Mean):
            numbers[name] = np.where(figure.count > 0, figure.value, np.nan)
    return numbers
