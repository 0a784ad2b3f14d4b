"""Which of the target's ids a draft can propose."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.contracts import Model
from spec_jax.errors import WeightsError
from spec_jax.models.layers import constrain_logits


@functools.cache
def aligned(model: Model, target: Model) -> Model:
    """Returns a draft model whose logits are over the target's ids.

    Models of one tokenizer may pad their embeddings to different sizes. Ids that the target does
    not have are cut off, and ids that only pad get -inf, so none of them is ever drafted.

    Args:
      model: the draft. It must embed every token of the target.
      target: the model that it drafts for.

    Returns:
      The same object where nothing has to change.
    """
    V = target.vocab_size
    last = min(target.last_id, model.last_id)
    if model.vocab_size == V and model.last_id == last:
        return model

    def unembed(params, hidden):
        logits = model.unembed(params, hidden)[..., :V]
        missing = [(0, 0)] * (logits.ndim - 1) + [(0, V - logits.shape[-1])]
        logits = jnp.pad(logits, missing, constant_values=-jnp.inf)
        return constrain_logits(jnp.where(jnp.arange(V) <= last, logits, -jnp.inf))

    num_tokens = None if last == V - 1 else last + 1
    return model._replace(vocab_size=V, unembed=unembed, num_tokens=num_tokens)


def resized(weight: jax.Array, axis: int, vocab_size: int) -> jax.Array:
    """Returns a weight with ``vocab_size`` ids along an axis: cut, or padded with zeros."""
    weight = jax.lax.slice_in_dim(weight, 0, min(weight.shape[axis], vocab_size), axis=axis)
    missing = [(0, 0)] * weight.ndim
    missing[axis] = (0, vocab_size - weight.shape[axis])
    return jnp.pad(weight, missing)


def draft_ids(head: dict) -> jax.Array | None:
    """The target's ids i32[U] that a reduced vocabulary holds; None where it is not reduced."""
    return jnp.arange(len(head["d2t"])) + head["d2t"] if "d2t" in head else None  # offsets


def check_offsets(d2t: np.ndarray, t2d: np.ndarray | None, vocab_size: int) -> np.ndarray:
    """The offsets i32[U] from draft ids to the target's, when they are sound.

    Draft id i is the target's ``i + d2t[i]``.

    Args:
      d2t: int[U], as it is stored.
      t2d: bool[V] or zeros and ones, true at the target's ids that can be drafted, or None.
      vocab_size: V.

    Raises:
      WeightsError: the target's ids are not strictly increasing, not all inside of the
        vocabulary, or not those of ``t2d``; or ``d2t`` holds ids.
    """
    if not np.issubdtype(d2t.dtype, np.integer):
        raise WeightsError(f"d2t has dtype {d2t.dtype.name}; expected integers")
    d2t = d2t.astype(np.int64)
    ids = np.arange(len(d2t)) + d2t
    kept = None if t2d is None else _true_at(t2d)
    is_agreed = kept is not None and np.array_equal(kept, ids)
    if not is_agreed and _looks_absolute(d2t, vocab_size):
        raise WeightsError(
            f"d2t looks like ids of the target ({_few(d2t)}); expected offsets, the target's id "
            f"less the position ({_few(d2t - np.arange(len(d2t)))})"
        )
    falls = np.flatnonzero(np.diff(ids) <= 0)
    if len(falls):
        i = int(falls[0])
        raise WeightsError(
            f"d2t is not a table of offsets: draft ids {i} and {i + 1} are the target's {ids[i]} "
            f"and {ids[i + 1]}; expected strictly increasing ids"
        )
    if ids[0] < 0 or ids[-1] >= vocab_size:
        raise WeightsError(
            f"d2t leads to the target's ids {ids[0]} to {ids[-1]}; expected 0 to {vocab_size - 1}"
        )
    if kept is not None and not is_agreed:
        first = np.setxor1d(kept, ids)[0]
        has, lacks = ("t2d", "d2t") if first in kept else ("d2t", "t2d")
        raise WeightsError(f"d2t and t2d disagree: {has} has the target's id {first}, {lacks} not")
    return d2t.astype(np.int32)


def _true_at(t2d: np.ndarray) -> np.ndarray:
    if t2d.dtype.kind not in "biu" or not np.isin(t2d, (0, 1)).all():
        raise WeightsError(f"t2d of dtype {t2d.dtype.name} is not a mask; expected booleans")
    return np.flatnonzero(t2d)


def _looks_absolute(d2t: np.ndarray, vocab_size: int) -> bool:
    """Strictly increasing offsets would mean that no two neighbouring ids can be drafted."""
    return len(d2t) > 1 and bool((np.diff(d2t) > 0).all() and d2t[0] >= 0 and d2t[-1] < vocab_size)


def _few(values: np.ndarray) -> str:
    return ", ".join(map(str, values[:4])) + ("" if len(values) <= 4 else ", …")
