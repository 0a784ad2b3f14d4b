"""Training-time test: unrolls a head over its own states, as it will draft.

Row t of step j is the j-th draft after pair t, and all rows are computed at once. It joins a
state with token t + 1 + j and predicts token t + 2 + j; the state is the target's if j is 0, and
else the head's own of row t at step j - 1. Its attention sees what the cache would hold in
decoding: the true pairs 0..t, which are the rows of step 0, and its own earlier drafts, which
are row t of the later steps.

Source: EAGLE-3, arXiv 2503.01840, section 3.2 and figure 6.
"""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.contracts import Head
from spec_jax.models.attention import SUMS, causal_attention, causal_parts, grouped, ungrouped
from spec_jax.models.sees import Sees


@flax.struct.dataclass
class UnrolledCache:
    """The keys and values of the steps so far, in the place of a ``KVCache`` of one layer.

    A pass's ``window_offset`` is the step, which shifts the rotary positions: row t of step j
    is at position t + j.
    """

    length: jax.Array  # i32[B], zeros: all rows begin at position 0
    begins: jax.Array | None = None  # i32[B,T], where each row's document begins
    true: tuple[jax.Array, ...] = ()  # keys and values of step 0, dtype[B,G,T,H]
    later: tuple[jax.Array, ...] = ()  # of steps 1.., dtype[K-1,B,G,T,H]

    def of_steps(self, num_steps: int) -> UnrolledCache:
        """Makes a cache for several steps, from one that a step has returned, or its shapes."""

        def empty(*lead):
            return tuple(jnp.zeros((*lead, *x.shape), x.dtype) for x in self.true)

        length = jnp.zeros(self.length.shape, jnp.int32)
        return UnrolledCache(length, self.begins, empty(), empty(num_steps - 1))

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BGTH: jax.Array,
        v_BGTH: jax.Array,
        index: Any,
        sees: Sees,
        scale: float | None = None,
    ) -> tuple[jax.Array, UnrolledCache]:
        """Computes the attention of one step's rows, see ``layers.attend_window``."""
        del index  # there is one layer
        step = sees.offset
        new = (k_BGTH, v_BGTH)
        if not self.true:
            out = causal_attention(q_BTNH, *new, sees, scale=scale)
            return out, self.replace(true=new)
        true = tuple(jnp.where(step == 0, x, old) for x, old in zip(new, self.true))

        # At step 0 a place is written that the mask hides until its own step writes it.
        later = tuple(old.at[jnp.maximum(step - 1, 0)].set(x) for x, old in zip(new, self.later))
        out = _attend_unrolled(q_BTNH, true, later, step, sees, scale)
        return out.astype(v_BGTH.dtype), self.replace(true=true, later=later)


def _attend_unrolled(q_BTNH, true, later, step, sees, scale):
    """One softmax over the rows of step 0 up to each row, and its own row of later steps."""
    k, v = true
    own_k, own_v = later
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    q = grouped(q_BTNH, k.shape[1])
    highest, total, out = causal_parts(q, k, v, sees, scale=scale)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    own = product("bgrth,jbgth->jbgrt", q, own_k) * scale
    before = jnp.arange(len(own)) - step
    is_before = before < 0
    if sees.size is not None:
        is_before &= before >= -sees.size
    own = jnp.where(is_before[:, None, None, None, None], own, -1e30)
    high = jnp.maximum(highest, jax.lax.stop_gradient(own).max(axis=0))
    kept = jnp.exp(highest - high)
    weights = jnp.exp(own - high)
    total = total * kept + weights.sum(axis=0)
    out = out * kept[..., None] + product("jbgrt,jbgth->bgrth", weights.astype(v.dtype), own_v)
    return ungrouped(out / total[..., None])


def shifted(x: jax.Array, by: int, num_rows: int) -> jax.Array:
    """Returns columns of an array, zeros past its end.

    Args:
      x: dtype[B,T,...].
      by: The first column.
      num_rows: How many columns.

    Returns:
      dtype[B,num_rows,...].
    """
    part = x[:, by : by + num_rows]
    short = num_rows - part.shape[1]
    return jnp.pad(part, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2)) if short else part


# What the backward pass finds stored, of each step. Without a policy a loop would store each array
# that is read by the gradient, such as each part of a norm.
_SUMS = jax.checkpoint_policies.save_only_these_names(SUMS)
_PRODUCTS = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _SUMS
)


def unroll(
    head: Head,
    params: dict,
    features: jax.Array,
    tokens: jax.Array,
    num_steps: int,
    begins: jax.Array | None = None,
    *,
    is_remat: bool = False,
) -> jax.Array:
    """Computes the head's states of every pair of a sequence, for K steps.

    The steps are one loop, so compile time does not depend on K.

    Args:
      head: The head.
      params: ``{"head": ..., "target": ...}``, as the head takes them.
      features: dtype[B,T+2,E], the target's tapped states.
      tokens: i32[B,T+2].
      num_steps: K.
      begins: i32[B,T+2], where each token's document begins, see ``Batch``.
      is_remat: If True, only the sums of each step's attention are stored for the backward pass,
        which computes the rest again; otherwise products of matrices are stored as well.

    Returns:
      dtype[K,B,T,D]. Row t of step j (from 0) predicts token t + 2 + j. The last j rows
      of step j are meaningless, as the tokens that they join lie outside of the window.
    """
    B = tokens.shape[0]
    T = tokens.shape[1] - 2
    policy = _SUMS if is_remat else _PRODUCTS
    feed = jax.checkpoint(head.feed, policy=policy, prevent_cse=num_steps == 1)

    def run(carry, step):
        state, cache = carry
        joined = jax.lax.dynamic_slice_in_dim(padded, 1 + step, T, axis=1)
        x, cache = feed(params, state, joined, cache, step, None)
        return (head.recycle(params, x).astype(state.dtype), cache), x

    padded = shifted(tokens, 0, T + num_steps)
    begins = None if begins is None else begins[:, :T]
    joined = head.join(params, features[:, :T])
    start = joined, UnrolledCache(jnp.zeros((B,), jnp.int32), begins)
    if num_steps == 1:
        return run(start, 0)[1][None]
    (_, cache), _ = jax.eval_shape(lambda: run(start, 0))
    cache = cache.replace(begins=begins).of_steps(num_steps)
    return jax.lax.scan(run, (start[0], cache), jnp.arange(num_steps))[1]
