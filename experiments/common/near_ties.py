"""Where two greedy outputs part: whether the logits there are a near tie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.loading import LoadedModel
from spec_jax.meshes import mesh_of, use_mesh


class Difference(NamedTuple):
    """The first difference of an output from plain decoding's.

    Attributes:
      row: The number of the prompt.
      at: The position in the output, from 0.
      gap: How far, in float32, the worse of the two tokens lies below the best logit; None where
        one output ended.
      rounding: The largest error of a logit there in the dtype of the weights.
    """

    row: int
    at: int
    gap: float | None
    rounding: float | None

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding may exchange the two: each logit is off by up to ``rounding``."""
        return self.gap is not None and self.gap <= 2 * self.rounding


def last_logits(target: LoadedModel, ids: Sequence[int], dtype=None) -> np.ndarray:
    """Returns the logits f64[V] after ``ids``, of one pass without earlier rounds.

    Args:
      target: The target.
      ids: The prefix.
      dtype: What the weights are cast to; by default none.
    """
    params, model = target.params, target.model
    if dtype is not None:
        is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
        params = jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, params)
    with use_mesh(mesh_of(target.params)):
        cache = model.init_cache(params, 1, len(ids))
        hidden = model.forward(params, jnp.asarray([ids], jnp.int32), cache).hidden[:, -1:]
        return np.asarray(model.unembed(params, hidden)[0, 0], np.float64)


def examine(
    target: LoadedModel, row: int, prompt: Sequence[int], plain: Sequence[int],
    other: Sequence[int],
) -> Difference:  # fmt: skip
    """Computes the logits once more where two greedy outputs of one prompt first differ.

    Args:
      target: The target.
      row: The number of the prompt.
      prompt: Its ids.
      plain: The output of plain decoding.
      other: The other output.
    """
    pairs = list(zip(plain, other))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if at == len(pairs):
        return Difference(row, at, None, None)
    prefix = [*prompt, *plain[:at]]
    exact, rounded = last_logits(target, prefix, jnp.float32), last_logits(target, prefix)
    own = next(x.dtype for x in jax.tree.leaves(target.params))
    unit = float(jnp.finfo(own).eps) * np.abs(exact).max()  # of one rounding of a logit
    gap = exact.max() - min(exact[plain[at]], exact[other[at]])
    return Difference(row, at, float(gap), float(max(np.abs(exact - rounded).max(), unit)))
