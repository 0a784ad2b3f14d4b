"""Training-time test: unrolls a head over its own states, as it will draft.

Row t of step j is the j-th draft after pair t, and all rows are computed at once. It joins a
state with token t + 1 + j and predicts token t + 2 + j; the state is the target's if j is 0, and
else the head's own of row t at step j - 1. Its attention sees what the cache would hold in
decoding: the true pairs 0..t, which are the rows of step 0, and its own earlier drafts, which
are row t of the later steps.

Source: EAGLE-3, arXiv 2503.01840, section 3.2 and figure 6.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.contracts import Head
from spec_jax.models.attention import block_size


@flax.struct.dataclass
class UnrolledCache:
    """The keys and values of the steps so far, in the place of a ``KVCache`` of one layer.

    A pass's ``window_offset`` is the step, which shifts the rotary positions: row t of step j
    is at position t + j.
    """

    keys: tuple[jax.Array, ...]  # dtype[B,G,T,H], by step
    values: tuple[jax.Array, ...]  # dtype[B,G,T,H], by step
    length: jax.Array  # i32[B], zeros: all rows begin at position 0
    slots: int = flax.struct.field(pytree_node=False)

    @classmethod
    def create(cls, batch: int, num_rows: int) -> UnrolledCache:
        """Makes an empty cache for B sequences of T rows."""
        return cls((), (), jnp.zeros((batch,), jnp.int32), num_rows)

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BGTH: jax.Array,
        v_BGTH: jax.Array,
        index: Any,
        window: Any,
        scale: float | None = None,
    ) -> tuple[jax.Array, UnrolledCache]:
        """Computes the attention of one step's rows, see ``layers.attend_window``."""
        del index, window  # there is one layer, and the step says what a row sees
        keys, values = (*self.keys, k_BGTH), (*self.values, v_BGTH)
        out = _attend_unrolled(q_BTNH, keys, values, scale)
        return out, self.replace(keys=keys, values=values)


def _attend_unrolled(q_BTNH, keys, values, scale):
    """One softmax over the rows of step 0 up to each row, and its own row of later steps."""
    B, T, N, H = q_BTNH.shape
    G = keys[0].shape[1]
    scale = H**-0.5 if scale is None else scale
    q = q_BTNH.reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4)  # B G R T H
    own = [jnp.einsum("bgrth,bgth->bgrt", q, k) for k in keys[1:]]
    block, outs = block_size(T), []
    for begin in range(0, T, block):
        end = min(begin + block, T)
        rows = slice(begin, end)
        true = jnp.einsum("bgrmh,bgsh->bgrms", q[..., rows, :], keys[0][:, :, :end])
        sees = jnp.arange(end) <= jnp.arange(begin, end)[:, None]
        scores = jnp.where(sees, true.astype(jnp.float32) * scale, -1e30)
        later = [x[..., rows, None].astype(jnp.float32) * scale for x in own]
        weights = jax.nn.softmax(jnp.concatenate([scores, *later], axis=-1), axis=-1)
        weights = weights.astype(values[0].dtype)
        out = jnp.einsum("bgrms,bgsh->bgrmh", weights[..., :end], values[0][:, :, :end])
        for i, v in enumerate(values[1:]):
            out += weights[..., end + i, None] * v[:, :, None, rows]
        outs.append(out)
    out = jnp.concatenate(outs, axis=3)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, -1)


def shifted(x: jax.Array, by: int, num_rows: int) -> jax.Array:
    """Returns the columns ``by`` to ``by + num_rows`` of ``x[B,T,...]``, zeros past its end."""
    part = x[:, by : by + num_rows]
    short = num_rows - part.shape[1]
    return jnp.pad(part, [(0, 0), (0, short)] + [(0, 0)] * (x.ndim - 2)) if short else part


def unroll(
    head: Head,
    params: dict,
    features: jax.Array,
    tokens: jax.Array,
    num_steps: int,
    *,
    is_remat: bool = False,
) -> list[jax.Array]:
    """Computes the head's states of every pair of a sequence, for K steps.

    Args:
      head: The head.
      params: ``{"head": ..., "target": ...}``, as the head takes them.
      features: dtype[B,T+2,E], the target's tapped states.
      tokens: i32[B,T+2].
      num_steps: K.
      is_remat: Whether the backward pass computes each step again instead of storing it.

    Returns:
      K arrays dtype[B,T,D]. Row t of step j (from 0) predicts token t + 2 + j. The last j rows
      of step j are meaningless, as the tokens that they join lie outside of the window.
    """
    B, T = tokens.shape[0], tokens.shape[1] - 2
    feed = jax.checkpoint(head.feed, static_argnums=(4,)) if is_remat else head.feed
    state = head.join(params, features[:, :T])
    cache = UnrolledCache.create(B, T)
    states = []
    for step in range(num_steps):
        with jax.named_scope(f"step_{step}"):
            x, cache = feed(params, state, shifted(tokens, 1 + step, T), cache, step, None)
            states.append(x)
            state = head.recycle(params, x)
    return states
