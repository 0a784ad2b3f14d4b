"""Mamba-2's recurrence in closed form: the outputs of a window of tokens, and the state after it.

With a_t = dt_t A <= 0 and u_t = dt_t x_t, the state and the output of a head are

    S_t = exp(a_t) S_{t-1} + u_t B_t^T        y_t = S_t C_t

Both are therefore sums over the tokens since a known state, weighted by the decays between them.
The same sums hold for chains, in which a token sees all tokens before it, and for trees, in which
it sees its ancestors.

N is the number of heads, and G the number of groups of heads that share one B and one C. The other
letters of state-space layers are in ``shapes.py``.

Source: arXiv 2405.21060, sections 3 and 6; for trees arXiv 2505.14969.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.errors import ConfigError, ShapeError
from spec_jax.models.checks import check_sizes
from spec_jax.show.summary import short_repr

CHUNK = 64  # tokens; the closed form of a window is quadratic in its length


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """The shape of the part of a layer that mixes tokens through a state."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    conv_kernel: int
    norm_eps: float
    time_step_limit: tuple[float, float] = (0.0, math.inf)
    has_conv_bias: bool = True
    has_bias: bool = False

    __repr__ = short_repr()

    def __post_init__(self):
        check_sizes(
            self, "hidden_size", "num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"
        )
        if self.num_heads % self.n_groups:
            raise ConfigError(f"{self.num_heads} heads do not divide into {self.n_groups} groups")

    @property
    def width(self) -> int:
        """Of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """C, the channels of the convolution."""
        return self.width + 2 * self.n_groups * self.state_size


@flax.struct.dataclass
class Inputs:
    """The inputs of a window's tokens to the state of a layer."""

    raw: jax.Array  # dtype[B,W,C], before the convolution
    u: jax.Array  # f32[B,W,N,H], x after the convolution, times the time step
    b: jax.Array  # f32[B,W,G,Z], after the convolution
    log_decay: jax.Array  # f32[B,W,N], a


def write(held: jax.Array | None, new: jax.Array, offset: int | jax.Array) -> jax.Array:
    """Writes T new tokens into a window, after the first ``offset`` tokens.

    Args:
      held: dtype[B,W,...], the window so far; None if there is none.
      new: dtype[B,T,...]. At offset 0 it may be wider than the window, and then replaces it.
      offset: number of tokens that the window already holds.

    Returns:
      The window with the new tokens.

    Raises:
      ShapeError: while tracing, if the window has no room for the tokens.
    """
    width = 0 if held is None else held.shape[1]
    is_known = isinstance(offset, int)
    T = new.shape[1]
    if is_known and offset == 0 and T >= width:
        return new if held is None else new.astype(held.dtype)
    if T > width or (is_known and offset + T > width):
        where = offset if is_known else "a traced offset"
        raise ShapeError(
            f"{T} tokens at {where} do not fit a window of {width}: open_window of the model makes "
            "room for a window that several passes fill"
        )
    return jax.lax.dynamic_update_slice_in_dim(held, new.astype(held.dtype), offset, axis=1)


def convolve(
    before_BRC: jax.Array,
    raw_BWC: jax.Array,
    weight_CR: jax.Array,
    num_tokens: int,
    offset: int | jax.Array,
    is_seen: jax.Array | None = None,
) -> jax.Array:
    """Applies the depthwise causal convolution to T tokens of a window.

    Args:
      before_BRC: dtype[B,R-1,C], the latest inputs before the window.
      raw_BWC: dtype[B,W,C], the inputs of the window.
      weight_CR: dtype[C,R]; the last of R is for the token itself.
      num_tokens: T.
      offset: place of the first of the T tokens in the window.
      is_seen: bool[B|1,T,W], which tokens of the window each token sees, itself included; None
        if each sees all up to itself.

    Returns:
      dtype[B,T,C].
    """
    taps = weight_CR.shape[1]
    inputs = jnp.concatenate([before_BRC, raw_BWC.astype(before_BRC.dtype)], axis=1)
    if is_seen is None:
        size = num_tokens + taps - 1
        near = jax.lax.dynamic_slice_in_dim(inputs, offset, size, axis=1)
        return sum(near[:, i : i + num_tokens] * weight_CR[:, i] for i in range(taps))
    # The R latest inputs that a token sees: itself, tokens of the window, inputs before it.
    B, _, W = (len(raw_BWC), *is_seen.shape[1:])
    at = jnp.where(is_seen, jnp.arange(taps - 1, taps - 1 + W), -1)
    always = jnp.broadcast_to(jnp.arange(taps - 1), (*at.shape[:2], taps - 1))
    nearest, _ = jax.lax.top_k(jnp.concatenate([always, at], axis=2), taps)
    nearest = jnp.broadcast_to(nearest, (B, *nearest.shape[1:]))
    seen = jax.vmap(lambda row, index: row[index])(inputs, nearest[:, :, ::-1])
    return jnp.einsum("btrc,cr->btc", seen, weight_CR)


def decays(log_decay_BWN: jax.Array, is_seen_BTW: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns how much is left, at each of T tokens, of the state before and of each input.

    Args:
      log_decay_BWN: f32[B,W,N], of the window's tokens.
      is_seen_BTW: bool[B|1,T,W], which tokens of the window each token sees.

    Returns:
      f32[B,T,N], the remaining part of the state before the window, and f32[B,T,W,N], of the
      input of each token; zero where a token is not seen.
    """
    seen = jnp.where(is_seen_BTW[..., None], log_decay_BWN[:, None], 0.0)
    # Summed from the end, so that the smallest decays are summed first and no two large sums are
    # subtracted.
    later = jnp.pad(seen[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))
    later = jax.lax.cumsum(later, axis=2, reverse=True)
    left = jnp.where(is_seen_BTW[..., None], jnp.exp(later), 0.0)
    return jnp.exp(seen.sum(axis=2)), left


def read(
    state_BNHZ: jax.Array, inputs: Inputs, c_BTGZ: jax.Array, is_seen_BTW: jax.Array
) -> jax.Array:
    """Returns the outputs of T tokens.

    Args:
      state_BNHZ: f32[B,N,H,Z], the state before the window.
      inputs: of the window's W tokens.
      c_BTGZ: dtype[B,T,G,Z], of the T tokens.
      is_seen_BTW: bool[B|1,T,W], which tokens of the window each token sees, itself included.

    Returns:
      f32[B,T,N,H].
    """
    B, T, G, Z = c_BTGZ.shape
    N, H = inputs.u.shape[2:]
    before, left = decays(inputs.log_decay, is_seen_BTW)
    c = c_BTGZ.astype(jnp.float32)
    scores = jnp.einsum("btgz,bwgz->btwg", c, inputs.b)
    weights = left * jnp.repeat(scores, N // G, axis=3)
    new = jnp.einsum("btwn,bwnh->btnh", weights, inputs.u)
    old = jnp.einsum("btgz,bgmz->btgm", c, state_BNHZ.reshape(B, G, -1, Z))
    return new + before[..., None] * old.reshape(B, T, N, H)


def fold(state_BNHZ: jax.Array, inputs: Inputs, is_kept_BW: jax.Array) -> jax.Array:
    """Returns the state after the kept tokens.

    Args:
      state_BNHZ: f32[B,N,H,Z], the state before the window.
      inputs: of the window's W tokens.
      is_kept_BW: bool[B|1,W]; a row that keeps none keeps its state.

    Returns:
      f32[B,N,H,Z].
    """
    B, W, G, Z = inputs.b.shape
    before, left = decays(inputs.log_decay, is_kept_BW[:, None])
    u = (left[:, 0, :, :, None] * inputs.u).reshape(B, W, G, -1)
    new = jnp.einsum("bwgm,bwgz->bgmz", u, inputs.b)
    return before[:, 0, :, None, None] * state_BNHZ + new.reshape(state_BNHZ.shape)


def read_chain(state_BNHZ: jax.Array, inputs: Inputs, c_BTGZ: jax.Array) -> jax.Array:
    """Returns what ``read`` does for a chain of T tokens, computed chunk by chunk."""

    def one_chunk(state, chunk, see_all):
        inputs, c = chunk
        return inputs, read(state, inputs, c, see_all)

    return scan_chunks(one_chunk, state_BNHZ, (inputs, c_BTGZ))


def scan_chunks(step: Callable[..., Any], state_BNHZ: jax.Array, arrays: Any) -> Any:
    """Runs a step over chunks of a chain of T tokens, each from the state after those before it.

    Args:
      step: ``(state, arrays of the chunk, is_seen bool[1,T',T']) -> (Inputs, outputs)`` of its T'
        tokens, where each sees all up to itself.
      state_BNHZ: f32[B,N,H,Z], the state before the tokens.
      arrays: dtype[B,T,...], a tree of them. Tokens of zeros may follow them.

    Returns:
      The outputs dtype[B,T,...] of all tokens.
    """
    B, T = jax.tree.leaves(arrays)[0].shape[:2]
    width = min(T, CHUNK)
    count = -(-T // width)
    see_all = jnp.tri(width, dtype=bool)[None]
    if count == 1:
        return step(state_BNHZ, arrays, see_all)[1]

    def split(x):
        x = jnp.pad(x, ((0, 0), (0, count * width - T), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(x.reshape(B, count, width, *x.shape[2:]), 1, 0)

    def join(x):
        return jnp.moveaxis(x, 0, 1).reshape(B, count * width, *x.shape[3:])[:, :T]

    def one_chunk(state, chunk):
        inputs, out = step(state, chunk, see_all)
        return fold(state, inputs, jnp.ones((1, width), bool)), out

    _, out = jax.lax.scan(one_chunk, state_BNHZ, jax.tree.map(split, arrays))
    return jax.tree.map(join, out)


def latest_seen(width: int, num_tokens: int, offset: int | jax.Array) -> jax.Array:
    """Returns bool[1,T,W], what the latest T tokens of a chain see of a window of ``width``.

    Args:
      width: W, of the window.
      num_tokens: T.
      offset: place of the first of the T tokens in the window.
    """
    return jnp.arange(width) <= (offset + jnp.arange(num_tokens))[None, :, None]
