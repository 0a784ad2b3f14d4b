"""Anchors of block drafters: where blocks begin in a window, what counts in them, and how much.

A block at anchor a is what a round drafts after token a, the pending one: draft k is compared with
token a + k. It sees the tokens before a alone.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.config.checks import check_name
from spec_jax.train.objective import Batch, row_keys

SLOT_WEIGHTS = ("decay", "dpace")
_FLOOR = 0.5  # of "dpace"


def choose_anchors(
    batch: Batch, count: int, every: int | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what is to be predicted of windows, their anchors, and which of them count.

    No block begins at a document's first token, or goes on there.

    Args:
      batch: the windows.
      count: A, of anchors that are drawn, see ``draw_anchors``.
      every: tokens between two anchors, for evaluation; None: they are drawn.

    Returns:
      bool[B,W], i32[B,A] and bool[B,A].
    """
    mask = batch.mask & (batch.place(0, batch.mask.shape[1]) > 0)
    if every is None:
        return mask, *draw_anchors(batch.key, mask, count)
    return mask, *every_anchor(mask, every)


def can_begin(mask: jax.Array) -> jax.Array:
    """Returns bool[B,W], where a block may begin: the anchor and the token after it count.

    A pending token is one that the target wrote, after at least one token.

    Args:
      mask: bool[B,W], True where the token is to be predicted.
    """
    after = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    return mask & after & (jnp.arange(mask.shape[1]) > 0)


def draw_anchors(key: jax.Array, mask: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Draws anchors without replacement, in each row on its own.

    Source: DFlash, arXiv 2602.06036, section 4.2.

    Args:
      key: see ``Batch``; it is consumed.
      mask: bool[B,W], True where the token is to be predicted.
      count: A, at most W.

    Returns:
      i32[B,A], ascending, and bool[B,A], False past the last place where a block may begin.
    """
    is_open = can_begin(mask)
    keys = row_keys(key, len(mask))
    order = jax.vmap(lambda key: jax.random.uniform(key, mask.shape[1:]))(keys)
    order = jnp.where(is_open, order, -1.0)
    _, anchors = jax.lax.top_k(order, min(count, mask.shape[1]))
    anchors = jnp.where(jnp.take_along_axis(is_open, anchors, axis=1), anchors, mask.shape[1])
    anchors = jnp.sort(anchors, axis=1)
    is_kept = anchors < mask.shape[1]
    return jnp.where(is_kept, anchors, 0), is_kept


def every_anchor(mask: jax.Array, step: int) -> tuple[jax.Array, jax.Array]:
    """Returns the anchors at every ``step`` tokens from the second on, as ``draw_anchors`` does."""
    anchors = jnp.arange(1, mask.shape[1] - 1, step, dtype=jnp.int32)
    anchors = jnp.broadcast_to(anchors, (len(mask), len(anchors)))
    is_kept = jnp.take_along_axis(can_begin(mask), anchors, axis=1)
    return jnp.where(is_kept, anchors, 0), is_kept


def slots(x: jax.Array, anchors: jax.Array, first: int, count: int) -> jax.Array:
    """Returns the columns after each anchor of a window.

    Columns past the end of the window are those of its last token.

    Args:
      x: dtype[B,W,...].
      anchors: i32[B,A], columns.
      first: How many columns after its anchor the first one is.
      count: How many columns of each anchor.

    Returns:
      dtype[B,A,count,...].
    """
    B, A = anchors.shape
    index = anchors[:, :, None] + first + jnp.arange(count)
    index = jnp.minimum(index, x.shape[1] - 1).reshape(B, A * count, *[1] * (x.ndim - 2))
    return jnp.take_along_axis(x, index, axis=1).reshape(B, A, count, *x.shape[2:])


def counted(mask: jax.Array, anchors: jax.Array, is_kept: jax.Array, num_draft: int) -> jax.Array:
    """Returns bool[B,A,K], which drafts count: their token and all before it are to be predicted.

    Args:
      mask: bool[B,W], True where the token is to be predicted.
      anchors: i32[B,A].
      is_kept: bool[B,A], the blocks that count.
      num_draft: K.
    """
    padded = jnp.pad(mask, ((0, 0), (0, num_draft)))
    counts = slots(padded, anchors, 1, num_draft) & is_kept[:, :, None]
    return jnp.cumprod(counts, axis=2, dtype=jnp.int32) > 0


def sum_slots(values: Any, counts: jax.Array) -> Any:
    """Returns the sums f32[K] of arrays [B,A,K] over what counts.

    Args:
      values: a pytree of arrays.
      counts: bool[B,A,K], see ``counted``.
    """

    def by_slot(x):
        return jnp.where(counts, x.astype(jnp.float32), 0.0).sum(axis=(0, 1))

    return jax.tree.map(by_slot, values)


def chains(counts: jax.Array, is_right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns which drafts a chain reaches and which it passes, bool[B,A,K] and i32[B,A,K].

    Args:
      counts: bool[B,A,K], see ``counted``.
      is_right: bool[B,A,K], the drafts that count and are the text's tokens.
    """
    hits = jnp.cumprod(is_right, axis=2, dtype=jnp.int32)
    before = jnp.pad(hits[:, :, :-1] > 0, ((0, 0), (0, 0), (1, 0)), constant_values=True)
    return counts & before, hits


def weigh_slots(kind: str, counts: jax.Array, label_probs: jax.Array, *, decay: float) -> jax.Array:
    """Computes what the loss of each draft is multiplied by, without a gradient.

    With "decay" draft k has weight ``decay ** (k - 1)``. With "dpace" it has the probability,
    by the draft itself, that the chain gets that far, summed over all ends that it may have: the
    sum over i >= k of the product over j <= i of ``(1 + p_j) / 2``.

    Source: DFlash, arXiv 2602.06036, section 4.2; D-PACE is that of SpecForge and speculators.

    Args:
      kind: "decay" or "dpace".
      counts: bool[B,A,K], see ``counted``.
      label_probs: f32[B,A,K], the draft's probability of the right token, for "dpace".
      decay: of "decay".

    Returns:
      f32[B,A,K], 0 where nothing counts.

    Raises:
      ConfigError: The kind is unknown.
    """
    check_name("slot_weights", kind, SLOT_WEIGHTS)
    if kind == "decay":
        return counts * decay ** jnp.arange(counts.shape[-1], dtype=jnp.float32)
    smooth = jax.lax.stop_gradient((1 - _FLOOR) * label_probs + _FLOOR)
    reach = jnp.where(counts, jnp.cumprod(jnp.where(counts, smooth, 1.0), axis=-1), 0.0)
    return jnp.where(counts, jnp.cumsum(reach[..., ::-1], axis=-1)[..., ::-1], 0.0)
