"""Gated delta nets: layers whose state forgets, and replaces what a key held by a new value.

With a decay a_t <= 0, a rate beta_t and a key k_t of length one, the state and the output of a
head are

    u_t = beta_t (v_t - exp(a_t) S_{t-1} k_t)
    S_t = exp(a_t) S_{t-1} + u_t k_t^T              y_t = S_t q_t

This is the recurrence of ``ssm.py`` with u_t in place of its input, k_t of its B and q_t of its C.
So state, window, reading and folding are Mamba-2's, for chains and trees. What is left is u: the u
of a window are the solution of a triangular system, as each depends on those that its token sees.
A token's u never depends on tokens that it does not see, so it stays right whatever is accepted.

Letters are those of ``ssm.py``: G is the number of key heads, and N that of value heads.

Source: Gated Delta Networks, arXiv 2412.06464; the triangular system, arXiv 2406.06484, section 3.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from spec_jax.models.caches.state import StateCache
from spec_jax.models.layers import Window, check_one_document, linear, rms_norm
from spec_jax.models.specs import ParamSpec, linear_specs
from spec_jax.models.ssm import (
    Inputs,
    MixerConfig,
    convolve,
    decays,
    latest_seen,
    read,
    scan_chunks,
    write,
)
from spec_jax.sharding import constrain

_EPS = 1e-6  # of the lengths of queries and keys
_FEW = 8  # tokens up to which a CPU solves a triangular system in one thread, without a wait


def delta_table(
    config: MixerConfig, prefix: str, *, is_by_key_head: bool = False
) -> dict[str, ParamSpec]:
    """Returns the declared weights of one delta net.

    Args:
      config: its shape; ``num_heads`` counts value heads, and ``n_groups`` key heads.
      prefix: of their external names, with its last dot.
      is_by_key_head: two maps make all inputs, as in Qwen3-Next: of each key head its query, its
        key, and values and gates of its value heads; and their rates and steps.
    """
    D = config.hidden_size
    N = config.num_heads
    C = config.conv_dim
    width = config.width
    table: dict[str, ParamSpec] = {}
    apart = (
        ("qkv", "in_proj_qkv", C, "state_inputs"),
        ("z", "in_proj_z", width, "state_heads"),
        ("rate", "in_proj_b", N, "state_heads"),
        ("step", "in_proj_a", N, "state_heads"),
    )
    together = (
        ("qkvz", "in_proj_qkvz", C + width, "state_inputs"),
        ("rate_step", "in_proj_ba", 2 * N, "state_inputs"),
    )
    for name, hf, size, axis in together if is_by_key_head else apart:
        linear_specs(table, name, D, size, ("embed", axis), f"{prefix}{hf}")
    axes = ("state_heads", "embed")
    hf = f"{prefix}out_proj"
    linear_specs(table, "out", width, D, axes, hf, init="residual")
    shape = (C, 1, config.conv_kernel)
    axes = ("channels", "one", "reach")
    return table | {
        "conv": ParamSpec(shape, axes, f"{prefix}conv1d.weight", init="conv"),
        "time_bias": ParamSpec((N,), ("state_heads",), f"{prefix}dt_bias", init="ones"),
        "decay": ParamSpec((N,), ("state_heads",), f"{prefix}A_log", init="decay"),
        "gate_scale": ParamSpec(
            (config.head_dim,), ("head_dim",), f"{prefix}norm.weight", init="ones"
        ),
    }


def correct(
    state_BNHZ: jax.Array,
    inputs: Inputs,
    v_BTNH: jax.Array,
    rate_BTN: jax.Array,
    is_seen_BTW: jax.Array,
    offset: int | jax.Array,
) -> jax.Array:
    """Returns the u of T tokens of a window.

    Args:
      state_BNHZ: f32[B,N,H,Z], the state before the window.
      inputs: of the window's W tokens; ``u`` only counts for tokens before the T.
      v_BTNH: f32[B,T,N,H], values.
      rate_BTN: f32[B,T,N], beta.
      is_seen_BTW: bool[B|1,T,W], which tokens of the window each token sees, itself included. Of
        the T tokens it sees none that comes later.
      offset: place of the first of the T tokens in the window.

    Returns:
      f32[B,T,N,H].
    """
    B, T, N, H = v_BTNH.shape
    G = inputs.b.shape[2]

    def take(x, axis):
        return jax.lax.dynamic_slice_in_dim(x, offset, T, axis)

    before, left = decays(inputs.log_decay, is_seen_BTW)
    k = take(inputs.b, 1)
    scores = jnp.einsum("btgz,bwgz->btwg", k, inputs.b)
    weights = rate_BTN[:, :, None] * left * jnp.repeat(scores, N // G, axis=3)
    old = jnp.einsum("btgz,bgmz->btgm", k, state_BNHZ.reshape(B, G, -1, k.shape[-1]))
    known = rate_BTN[..., None] * (v_BTNH - before[..., None] * old.reshape(B, T, N, H))
    if not (isinstance(offset, int) and offset == 0):
        is_earlier = (jnp.arange(weights.shape[2]) < offset)[:, None]
        known -= jnp.einsum("btwn,bwnh->btnh", jnp.where(is_earlier, weights, 0.0), inputs.u)
    return _solve(take(weights, 2).transpose(0, 3, 1, 2), known.transpose(0, 2, 1, 3)).transpose(
        0, 2, 1, 3
    )


def _solve(weights: jax.Array, known: jax.Array) -> jax.Array:
    """The u f32[B,N,T,H] of tokens whose u is ``known``, less those before times their weights."""
    T = weights.shape[-1]
    if T > _FEW:
        inverse = invert_unit_lower(weights)
        return jnp.matmul(inverse, known, precision=jax.lax.Precision.HIGHEST)
    own = jnp.tril(weights, -1) + jnp.eye(T)
    return jax.lax.linalg.triangular_solve(
        own, known, left_side=True, lower=True, unit_diagonal=True
    )


def invert_unit_lower(x: jax.Array) -> jax.Array:
    """Returns the inverses of lower triangular matrices with ones on the diagonal.

    The inverse of [[A, 0], [C, D]] is [[A', 0], [-D' C A', D']], where A' and D' are those of A and
    D: blocks of one, two, four rows and so on are inverted in turn, by products alone.

    Args:
      x: f32[...,T,T]; what is on the diagonal and above is not read.

    Returns:
      f32[...,T,T].
    """
    T = x.shape[-1]
    product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
    inverse = jnp.broadcast_to(jnp.eye(T, dtype=x.dtype), x.shape)
    size = 1
    while size < T:
        block = jnp.arange(T) // size
        is_left_below = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
        inverse -= product(product(inverse, jnp.where(is_left_below, x, 0)), inverse)
        size *= 2
    return inverse


def _run_chain(state, k, v, rate, log_decay, q):
    """The u and the outputs of a chain of T tokens that begins a window."""

    def one_chunk(state, chunk, see_all):
        k, v, rate, log_decay, q = chunk
        inputs = Inputs(raw=k, u=v, b=k, log_decay=log_decay)
        inputs = inputs.replace(u=correct(state, inputs, v, rate, see_all, 0))
        return inputs, (inputs.u, read(state, inputs, q, see_all))

    return scan_chunks(one_chunk, state, (k, v, rate, log_decay, q))


def delta_net(
    layer: dict[str, jax.Array],
    x_BTD: jax.Array,
    cache: StateCache | None,
    index: int,
    window: Window,
    config: Any,
) -> tuple[jax.Array, StateCache | None]:
    """Applies a gated delta net to normalised inputs, without the residual.

    Args:
      layer: the layer's weights.
      x_BTD: dtype[B,T,D].
      cache: is read and written; None if the tokens are whole sequences.
      index: the layer's place in the cache.
      window: the tokens' places, and what each of them sees.
      config: of the model; its ``mixer`` is the shape.

    Returns:
      dtype[B,T,D], and the cache with the window written.
    """
    config = config.mixer
    B, T, _ = x_BTD.shape
    f32 = jnp.float32
    N = config.num_heads
    H = config.head_dim
    G = config.n_groups
    Z = config.state_size
    check_one_document(window)
    with jax.named_scope("delta"):
        whole = StateCache.create(config, 1, B, x_BTD.dtype) if cache is None else cache
        held = whole.layer(index if cache is not None else 0)
        old = held.window
        offset = window.sees.offset

        def put(name, new):
            return write(old and getattr(old, name), new, offset)

        raw, z, rate, step = _project(layer, x_BTD, config)
        raw = put("raw", raw)
        mixed = convolve(held.conv, raw, layer["conv"][:, 0], T, offset, window.sees.inside)
        q, k, v = jnp.split(jax.nn.silu(mixed).astype(f32), (G * Z, 2 * G * Z), axis=-1)
        q, k = (_unit(x.reshape(B, T, G, Z)) for x in (q, k))
        v = constrain(v.reshape(B, T, N, H), "batch", None, "state_heads")
        q *= Z**-0.5
        rate = jax.nn.sigmoid(rate.astype(f32))
        time = step.astype(f32) + layer["time_bias"].astype(f32)
        log_decay = -jnp.exp(layer["decay"].astype(f32)) * jax.nn.softplus(time)
        if window.sees.inside is None and isinstance(offset, int) and offset == 0:
            u, y = _run_chain(held.ssm, k, v, rate, log_decay, q)
            inputs = Inputs(raw, put("u", u), put("b", k), put("log_decay", log_decay))
        else:
            width = raw.shape[1]
            is_seen = window.sees.inside
            is_seen = latest_seen(width, T, offset) if is_seen is None else is_seen

            def cut(inputs):
                return jax.tree.map(lambda x: x[:, : is_seen.shape[2]], inputs)

            blank = jnp.zeros((B, width, N, H), f32) if old is None else old.u
            inputs = Inputs(raw, blank, put("b", k), put("log_decay", log_decay))
            u = correct(held.ssm, cut(inputs), v, rate, is_seen, offset)
            inputs = inputs.replace(u=put("u", u))
            y = read(held.ssm, cut(inputs), q, is_seen)
        y = rms_norm(y, layer["gate_scale"].astype(f32), config.norm_eps).reshape(B, T, -1)
        y *= jax.nn.silu(z.astype(f32))
        out = linear(y.astype(x_BTD.dtype), layer, "out")
    return out, cache and whole.with_window(index, inputs)


def _project(layer, x_BTD, config):
    """The inputs of the convolution, the gates, and each value head's rate and step."""

    # Parts of a map are not split where the mesh splits the whole, so it is gathered once.
    def whole(name):
        return constrain(linear(x_BTD, layer, name), "batch", None, None)

    if "qkvz" not in layer:
        z, rate, step = (linear(x_BTD, layer, name) for name in ("z", "rate", "step"))
        return whole("qkv"), z, rate, step
    B, T, _ = x_BTD.shape
    G = config.n_groups
    Z = config.state_size

    def by_head(name):
        return whole(name).reshape(B, T, G, -1)

    width = config.width // G
    parts = jnp.split(by_head("qkvz"), (Z, 2 * Z, 2 * Z + width), axis=-1)
    parts += jnp.split(by_head("rate_step"), 2, axis=-1)
    q, k, v, z, rate, step = (x.reshape(B, T, -1) for x in parts)
    return jnp.concatenate([q, k, v], axis=-1), z, rate, step


def _unit(x: jax.Array) -> jax.Array:
    """Vectors of length one."""
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + _EPS)
