"""The parts of a decoder layer, for targets and for heads that draft from their features."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec_jax.models.attention import causal_attention
from spec_jax.models.config import ModelConfig
from spec_jax.models.layout import matmul
from spec_jax.models.rope import rope_frequencies, rotate


class Window(NamedTuple):
    """Where the tokens of one call stand.

    Attributes:
      start: i32[B], the first slot of each row.
      mask: bool[B,T,S], slots of the cache that each token sees; None without slots.
      cos: f32[B,T,H/2], of the rotary embedding, H being the dimensions that it turns.
      sin: f32[B,T,H/2].
      offset: tokens of the window before these.
      is_seen: bool[B|1,T,W], what of the window each token sees; None: all up to its own.
    """

    start: jax.Array
    mask: jax.Array | None
    cos: jax.Array
    sin: jax.Array
    offset: int | jax.Array = 0
    is_seen: jax.Array | None = None

    @classmethod
    def behind(
        cls, config: ModelConfig, cache: Any, batch: int, num_tokens: int,
        window_offset: int | jax.Array = 0, positions: jax.Array | None = None,
        window_mask: jax.Array | None = None,
    ) -> Window:
        """The next tokens of every row, ``window_offset`` slots behind what the cache holds.

        Args:
          config: whose rotary embedding applies.
          cache: None where the tokens are the whole sequence.
          batch: B.
          num_tokens: T.
          window_offset: slots of the window that earlier calls since the last commit filled.
          positions: i32[B,T], rotary positions; by default the slots, in a tree of tokens the
            number of tokens seen before.
          window_mask: bool[B|1,T,W], which of the window's first W slots each token sees, its
            own among them, beside all that is committed; by default all up to its own.
        """  # fmt: skip
        length = jnp.zeros((batch,), jnp.int32) if cache is None else cache.length
        start = length + window_offset
        slots_BT = start[:, None] + jnp.arange(num_tokens, dtype=jnp.int32)
        mask = None
        slots = None if cache is None else cache.slots
        if window_mask is not None and positions is None:
            positions = length[:, None] + window_mask.sum(axis=2, dtype=jnp.int32) - 1
        if window_mask is not None and slots is not None:
            mask = _tree_mask(window_mask, length, slots)
        elif slots is not None:
            mask = jnp.arange(slots, dtype=jnp.int32) <= slots_BT[:, :, None]
        if positions is None:
            positions = slots_BT
        freq, factor = rope_frequencies(config.rope, config.rotary_dim)
        angle = positions[:, :, None].astype(jnp.float32) * freq
        cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor
        return cls(start, mask, cos, sin, window_offset, window_mask)


def _tree_mask(window_mask, length, slots):
    """bool[B,T,S]: the committed slots, and behind them what ``window_mask`` says."""
    B, (_, T, W) = length.shape[0], window_mask.shape
    window_mask = jnp.broadcast_to(window_mask, (B, T, W))
    is_committed = jnp.arange(slots, dtype=jnp.int32) < length[:, None, None]
    mask = jnp.broadcast_to(is_committed, (B, T, slots))
    for b in range(B):  # as in the cache: a vmapped update is a scatter
        mask = jax.lax.dynamic_update_slice(mask, window_mask[b : b + 1], (b, 0, length[b]))
    return mask


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divides by the root of the mean square over the last axis, in float32, and scales.

    Source: arXiv 1910.07467, equation 4.
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def linear(x: jax.Array, layer: dict, name: str) -> jax.Array:
    """The linear map of this name, with its bias if it has one."""
    y = matmul(x, layer[name])
    return y + layer[f"{name}_bias"] if f"{name}_bias" in layer else y


def attention(layer: dict, x_BTC: jax.Array, cache, index, window: Window, config: ModelConfig):
    """Self-attention of normalised inputs, residual left out.

    With a cache it writes its window there and attends over its slots.

    Args:
      layer: its weights.
      x_BTC: dtype[B,T,C], C being what q, k and v take.
      cache: or None.
      index: the layer's, in the cache.
      window: where the tokens stand.
      config: the model's shape.

    Returns:
      dtype[B,T,D] and the cache with the window written.
    """
    B, T, _ = x_BTC.shape
    heads = lambda name, n: linear(x_BTC, layer, name).reshape(B, T, n, config.head_dim)
    q = heads("q", config.num_attention_heads)
    k, v = heads("k", config.num_key_value_heads), heads("v", config.num_key_value_heads)
    if config.has_qk_norm:
        q = rms_norm(q, layer["q_norm"], config.rms_norm_eps)
        k = rms_norm(k, layer["k_norm"], config.rms_norm_eps)
    q = rotate(q, window.cos, window.sin)
    k = rotate(k, window.cos, window.sin).transpose(0, 2, 1, 3)
    v = v.transpose(0, 2, 1, 3)
    with jax.named_scope("attention"):
        out, cache = attend_window(q, k, v, cache, index, window)
        return linear(out, layer, "o"), cache


def attend_window(
    q_BTNH: jax.Array, k_BGTH: jax.Array, v_BGTH: jax.Array, cache, index, window: Window,
    scale: float | None = None,
):
    """Attention of the window over the cache, itself included; of whole sequences without one.

    Args:
      q_BTNH: dtype[B,T,N,H].
      k_BGTH: dtype[B,G,T,H].
      v_BGTH: dtype[B,G,T,H], of any width.
      cache: or None.
      index: the layer's, in the cache.
      window: where the tokens stand.
      scale: on the scores; by default 1/sqrt(H).

    Returns:
      dtype[B,T,N*H], H being the values' width, and the cache with the window written.
    """  # fmt: skip
    if cache is None:
        return causal_attention(q_BTNH, k_BGTH, v_BGTH, scale=scale), None
    return cache.attend(q_BTNH, k_BGTH, v_BGTH, index, window, scale)


def mlp(layer: dict, x_BTD: jax.Array, config: ModelConfig) -> jax.Array:
    """The gated feed-forward part, norm and residual included."""
    with jax.named_scope("mlp"):
        h = rms_norm(x_BTD, layer["mlp_norm"], config.rms_norm_eps)
        h = jax.nn.silu(linear(h, layer, "gate")) * linear(h, layer, "up")
        return x_BTD + linear(h, layer, "down")
