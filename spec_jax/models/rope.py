"""Rotary position embedding."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from spec_jax.models.config import RopeConfig


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[jax.Array, float]:
    """Returns the angular frequencies of the rotary embedding and the scale of its cos and sin.

    Source: RoFormer, arXiv 2104.09864; "linear": position interpolation, arXiv
    2306.15595; "yarn": arXiv 2309.00071, equations 19-22; "llama3": the Llama 3.1 release.

    Args:
      rope: which variant, and its parameters.
      head_dim: H, the number of dimensions that are rotated.

    Returns:
      f32[H/2], radians per position, and a scalar that multiplies cosines and sines.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    freq = 1.0 / (rope.rope_theta**exponent)
    if rope.rope_type == "linear":
        return freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        wavelength = 2 * math.pi / freq
        original = rope.original_max_position_embeddings
        low = rope.low_freq_factor
        high = rope.high_freq_factor
        smooth = jnp.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        return (1 - smooth) * freq / rope.factor + smooth * freq, 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, freq)
    return freq, 1.0


def _yarn(rope: RopeConfig, head_dim: int, freq: jax.Array) -> tuple[jax.Array, float]:
    def dimension(rotations):  # which rotates this many times over the original length
        length = rope.original_max_position_embeddings
        return (
            head_dim
            * math.log(length / (rotations * 2 * math.pi))
            / (2 * math.log(rope.rope_theta))
        )

    low = dimension(rope.beta_fast)
    high = dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / max(high - low, 1e-3)
    keep = 1.0 - jnp.clip(ramp, 0.0, 1.0)

    def mscale(scale):
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    factor = rope.attention_factor
    if factor is None and rope.mscale and rope.mscale_all_dim:
        factor = mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    elif factor is None:
        factor = mscale(1.0)
    return freq / rope.factor * (1 - keep) + freq * keep, factor


def rotate(x_BTNH: jax.Array, cos_BTH: jax.Array, sin_BTH: jax.Array) -> jax.Array:
    """Rotates the pairs of dimensions (j, j + H/2), which is Hugging Face's convention.

    Args:
      x_BTNH: dtype[B,T,N,H'], queries or keys, H' >= H. Dimensions past H stay as they are.
      cos_BTH: f32[B,T,H/2].
      sin_BTH: f32[B,T,H/2].

    Returns:
      An array like ``x_BTNH``.
    """
    turned, rest = jnp.split(x_BTNH, [2 * cos_BTH.shape[-1]], axis=-1)
    x1, x2 = jnp.split(turned.astype(jnp.float32), 2, axis=-1)
    cos = cos_BTH[:, :, None]
    sin = sin_BTH[:, :, None]
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x_BTNH.dtype), rest], axis=-1)
