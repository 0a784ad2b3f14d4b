"""A decoder-only transformer as a pure function over a nested dict of weights."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from spec_jax.contracts import ForwardOutput, Model
from spec_jax.models.attention import attend, causal_attention
from spec_jax.models.cache import KVCache
from spec_jax.models.config import ModelConfig, RopeConfig
from spec_jax.models.panels import cut, matmul
from spec_jax.models.params import Params, init_params

__all__ = ["forward", "init_params", "logits", "model", "rope_frequencies", "unembed"]


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[jax.Array, float]:
    """Angular frequencies of rotary embedding and the factor on its cosines and sines.

    Source: RoFormer, arXiv 2104.09864; "linear": position interpolation, arXiv
    2306.15595; "yarn": arXiv 2309.00071, equations 19-22; "llama3": the Llama 3.1 release.

    Returns:
      f32[H/2] in radians a position, and a scalar.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    freq = 1.0 / (rope.rope_theta**exponent)
    if rope.rope_type == "linear":
        return freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        wavelength = 2 * math.pi / freq
        original = rope.original_max_position_embeddings
        low, high = rope.low_freq_factor, rope.high_freq_factor
        smooth = jnp.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
        return (1 - smooth) * freq / rope.factor + smooth * freq, 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim, freq)
    return freq, 1.0


def _yarn(rope: RopeConfig, head_dim: int, freq: jax.Array) -> tuple[jax.Array, float]:
    def dimension(rotations):  # the dimension that turns so often over the original length
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (
            2 * math.log(rope.rope_theta)
        )

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
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


def _rms_norm(x, weight, eps):
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def _rotate(x_BTNH, cos_BTH, sin_BTH):
    """Rotates the pairs (j, j + H/2), the convention of Hugging Face's weights."""
    x1, x2 = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BTH[:, :, None], sin_BTH[:, :, None]
    rotated = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def _linear(x, layer, name):
    y = matmul(x, layer[name])
    return y + layer[f"{name}_bias"] if f"{name}_bias" in layer else y


def _layer(layer, x_BTD, cache, index, start, mask, cos, sin, config: ModelConfig):
    """One decoder layer. With a cache it writes its window there and attends over its slots."""
    B, T, _ = x_BTD.shape
    heads = lambda x, n: x.reshape(B, T, n, config.head_dim)
    h = _rms_norm(x_BTD, layer["attention_norm"], config.rms_norm_eps)
    q = heads(_linear(h, layer, "q"), config.num_attention_heads)
    k = heads(_linear(h, layer, "k"), config.num_key_value_heads)
    v = heads(_linear(h, layer, "v"), config.num_key_value_heads)
    if config.has_qk_norm:
        q = _rms_norm(q, layer["q_norm"], config.rms_norm_eps)
        k = _rms_norm(k, layer["k_norm"], config.rms_norm_eps)
    q = _rotate(q, cos, sin)
    k, v = _rotate(k, cos, sin).transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    with jax.named_scope("attention"):
        if cache is None:
            h = causal_attention(q, k, v)
        else:
            cache = cache.write(index, k, v, start)
            h = attend(q, *cache.layer(index), mask)
        x_BTD = x_BTD + _linear(h, layer, "o")
    with jax.named_scope("mlp"):
        h = _rms_norm(x_BTD, layer["mlp_norm"], config.rms_norm_eps)
        h = jax.nn.silu(_linear(h, layer, "gate")) * _linear(h, layer, "up")
        return x_BTD + _linear(h, layer, "down"), cache


def forward(
    params: Params,
    tokens: jax.Array,
    cache: KVCache | None = None,
    *,
    config: ModelConfig,
    window_offset: int | jax.Array = 0,
    positions: jax.Array | None = None,
    mask: jax.Array | None = None,
) -> ForwardOutput:
    """Feeds T tokens a row behind what the cache holds.

    Writes slots ``length + window_offset ...`` and leaves ``length`` where it is; the
    caller keeps ``length + window_offset + T <= S``. Without a cache the tokens are the
    whole sequence.

    Args:
      params: the weights.
      tokens: i32[B,T].
      cache: what was fed before, or None.
      config: the model's shape.
      window_offset: slots of the window that earlier calls since the last commit filled.
      positions: i32[B,T], rotary positions; by default the slots.
      mask: bool[B,T,S], slots of the cache that each query sees; by default all up to its own.

    Returns:
      ``hidden`` dtype[B,T,D] after the final norm, and the cache with the window written.
    """
    B, T = tokens.shape
    start = jnp.zeros((B,), jnp.int32) if cache is None else cache.length + window_offset
    slots_BT = start[:, None] + jnp.arange(T, dtype=jnp.int32)
    if positions is None:
        positions = slots_BT
    if mask is None and cache is not None:
        mask = jnp.arange(cache.slots, dtype=jnp.int32) <= slots_BT[:, :, None]
    freq, factor = rope_frequencies(config.rope, config.head_dim)
    angle = positions[:, :, None].astype(jnp.float32) * freq
    cos, sin = jnp.cos(angle) * factor, jnp.sin(angle) * factor

    x = jnp.take(params["embed"], tokens, axis=0)
    step = functools.partial(_layer, start=start, mask=mask, cos=cos, sin=sin, config=config)
    if config.scan_layers:

        def body(carry, scanned):
            layer, index = scanned
            return step(layer, *carry, index), None

        index = jnp.arange(config.num_hidden_layers)
        (x, cache), _ = jax.lax.scan(body, (x, cache), (params["layers"], index))
    else:
        for i in range(config.num_hidden_layers):
            x, cache = step(params["layers"][str(i)], x, cache, i)
    return ForwardOutput(_rms_norm(x, params["final_norm"], config.rms_norm_eps), cache)


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """Logits f32[..., V] of final hidden states dtype[..., D]."""
    with jax.named_scope("unembed"):
        if "head" in params:
            return matmul(hidden, params["head"]).astype(jnp.float32)
        return jnp.einsum("...d,vd->...v", hidden, params["embed"]).astype(jnp.float32)


def for_cpu(params: Params) -> Params:
    """The same weights, laid out for decoding on a CPU; nothing else changes.

    A tied head becomes an array of its own, ``[in, out]``: a product with the transposed
    embedding takes twice the time. Separate layers are cut into panels. Not for training,
    which would untie the head.
    """
    head = params["head"] if "head" in params else params["embed"].T
    layers = params["layers"]
    if "q" not in layers:  # not stacked
        layers = jax.tree.map(lambda w: cut(w) if w.ndim == 2 else w, layers)
    return {**params, "layers": layers, "head": cut(jnp.array(head))}


def logits(params: Params, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Logits f32[B,T,V] of whole sequences i32[B,T], causal and without a cache."""
    return unembed(params, forward(params, tokens, config=config).hidden)


@functools.cache
def model(config: ModelConfig) -> Model:
    """The ``Model`` of this shape: what the decoder and the drafters call.

    The same config gives the same object, so compiled programs are shared.
    """
    return Model(
        vocab_size=config.vocab_size,
        max_length=config.max_position_embeddings,
        init_cache=lambda params, batch, slots: KVCache.create(
            config, batch, slots, params["embed"].dtype
        ),
        forward=functools.partial(forward, config=config),
        unembed=unembed,
    )
