"""Losses of drafts, a chunk of rows at a time.

The gradient of a loss with respect to logits is as large as the logits, and can be computed as
soon as they are. So each chunk's gradient follows its loss at once, and neither logits nor
probabilities outlive their chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.sharding import ambient, constrain, copies_of_rows
from spec_jax.train.means import Mean, reciprocal
from spec_jax.train.objective import Batch, chain_figures
from spec_jax.train.unroll import shifted

_ROWS = 2048  # of logits in a chunk, about, on each device


def chain_loss(
    measure: Callable[[Any, jax.Array, Any], tuple[jax.Array, jax.Array]],
    params: Any,
    states: jax.Array,
    batch: Batch,
    true: Any,
    shares: jax.Array,
    counts: jax.Array | None = None,
) -> tuple[jax.Array, dict]:
    """Computes the weighted sum over K steps of the mean loss of the tokens that count.

    Column s of every step, of which a chunk has C, is the draft in the place of token s + 2.

    Args:
      measure: ``(params, states dtype[B,K,C,D], true) -> (losses f32[B,K,C], drafts i32[B,K,C])``
        of a chunk of columns.
      params: arrays that the losses are differentiated by.
      states: dtype[K,B,T,D] of ``unroll``, likewise.
      batch: the windows.
      true: arrays dtype[B,T,...] that column s is compared with; they have no gradient.
      shares: f32[K], what the steps' means are multiplied by.
      counts: f32[K], what each step's losses are divided by; None: how many of them count.

    Returns:
      The loss; of each step its ``Mean`` f32[K] in the loss's ``terms``, as "tokens", without its
      share as ``loss_by_step``, and ``teacher_forced_accept``.
    """
    K, B, T, _ = states.shape
    is_after = batch.place(2, T)[:, None] - 2 >= jnp.arange(K)[:, None]  # a pair of its document
    is_counted = shifted(batch.mask, 2, T)[:, None] & is_after
    own = is_counted.sum(axis=(0, 2)).astype(jnp.float32)
    weights = shares * reciprocal(own if counts is None else counts)
    late = [jnp.pad(x, [(0, 0), (step, 0), (0, 0)])[:, :T] for step, x in enumerate(states)]
    states = jnp.stack(late, axis=1)

    def chunk(params, states, rest):
        is_counted, true = rest
        losses, drafts = measure(params, states, true)
        sums = jnp.where(is_counted, losses, 0.0).sum(axis=(0, 2))
        return jnp.sum(sums * weights), (sums, drafts)

    most = max(rows_at_once(B) // (B * K), 16)
    size = -(-T // -(-T // most))  # chunks of one size, since the last one is padded

    def cut(x, axis):
        return cut_chunks(x, axis, size)

    rest = cut(is_counted, 2), jax.tree.map(lambda x: cut(x, 1), true)
    loss, sums, drafts = sum_chunks(chunk, params, cut(states, 2), rest)
    drafts = jnp.moveaxis(drafts, 0, 2).reshape(B, K, -1)

    def row(x, step):
        return shifted(x[:, step], step, T)

    drafts, are_counted = ([row(x, step) for step in range(K)] for x in (drafts, is_counted))
    figures = {"terms": {"tokens": Mean(shares * sums, own)}, "loss_by_step": Mean(sums, own)}
    return loss, figures | chain_figures(drafts, batch, are_counted)


def rows_at_once(batch: int, most: int = _ROWS) -> int:
    """Returns about how many rows of a batch are computed together, on all devices.

    Args:
      batch: B.
      most: on each device; their logits allow no more than ``_ROWS``.
    """
    over = 1 if ambient() is None else ambient().size // copies_of_rows(batch)
    return min(most, _ROWS) * over


def cut_chunks(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Cuts an axis into chunks; the last one is padded with zeros.

    Args:
      x: dtype[...].
      axis: The axis that is cut.
      size: Its size in a chunk.

    Returns:
      dtype[chunks,...,size,...].
    """
    x = jnp.pad(x, [(0, -n % size if i == axis else 0) for i, n in enumerate(x.shape)])
    x = x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :])
    return constrain(jnp.moveaxis(x, axis, 0), None, "batch")


def sum_chunks(
    chunk: Callable[[Any, Any, Any], tuple[jax.Array, tuple[Any, Any]]],
    params: Any,
    states: Any,
    rest: Any,
) -> tuple[jax.Array, Any, Any]:
    """Sums a loss over chunks, and its gradients with it.

    Args:
      chunk: ``(params, states, rest) -> (loss f32[], (sums, kept))`` of one chunk.
      params: arrays that all chunks read and are differentiated by.
      states: arrays by chunk that the loss is differentiated by, see ``cut_chunks``.
      rest: arrays by chunk without a gradient.

    Returns:
      The sum of the losses, which alone has a gradient; the sums of ``sums``, f32 arrays; and
      ``kept`` of all chunks, one after the other.
    """

    def run(function, params, states, rest, *zeros):
        def add(sums, inputs):
            added, kept = function(params, *inputs)
            return jax.tree.map(jnp.add, sums, added), kept

        first = jax.tree.map(lambda x: x[0], (states, rest))
        sums = jax.eval_shape(chunk, params, *first)[1][0]
        zeros = (jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros(x.shape), sums), *zeros)
        return jax.lax.scan(add, zeros, (states, rest))

    def plain(params, states, rest):
        loss, (sums, kept) = chunk(params, states, rest)
        return (loss, sums), kept

    def with_gradient(params, states, rest):
        graded = jax.value_and_grad(chunk, argnums=(0, 1), has_aux=True)
        (loss, (sums, kept)), (d_params, d_states) = graded(params, states, rest)
        return (loss, sums, d_params), (kept, d_states)

    @jax.custom_vjp
    def summed(params, states, rest):
        (loss, sums), kept = run(plain, params, states, rest)
        return loss, sums, kept

    def forward(params, states, rest):
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
        (loss, sums, d_params), (kept, d_states) = run(with_gradient, params, states, rest, zeros)
        d_params = jax.tree.map(lambda x, of: x.astype(of.dtype), d_params, params)
        return (loss, sums, kept), (d_params, d_states)

    def backward(gradients, d_outputs):
        def scaled(x):
            return (x * d_outputs[0]).astype(x.dtype)

        return *jax.tree.map(scaled, gradients), None

    summed.defvjp(forward, backward)
    return summed(params, states, rest)
