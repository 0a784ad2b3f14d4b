"""A decoder-only model as a pure function over a nested dict of weights, whatever its layers."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from spec_jax.contracts import ForwardOutput, Model
from spec_jax.errors import ConfigError
from spec_jax.models.families import AnyConfig, family_of
from spec_jax.models.layers import Window, rms_norm
from spec_jax.models.layout import matmul
from spec_jax.models.params import Params, init_params

__all__ = ["forward", "init_cache", "init_params", "logits", "model", "unembed"]


def forward(
    params: Params,
    tokens: jax.Array,
    cache=None,
    *,
    config: AnyConfig,
    window_offset: int | jax.Array = 0,
    positions: jax.Array | None = None,
    window_mask: jax.Array | None = None,
    taps: tuple[int, ...] = (),
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
      positions: i32[B,T], rotary positions; by default the slots, in a tree of tokens the
        number of tokens seen before.
      window_mask: bool[B|1,T,W], which of the window's first W slots each token sees, its own
        among them, beside all that is committed; by default all up to its own.
      taps: states to return beside the result: 0..L-1, the residual stream before that
        layer; L, after the last layer; L+1, after the final norm too.

    Returns:
      ``hidden`` dtype[B,T,D] after the final norm, the cache with the window written, and as
      ``features`` dtype[B,T,E] the tapped states, in the order of ``taps``, side by side.
    """
    L = config.num_hidden_layers
    window = Window.behind(config, cache, *tokens.shape, window_offset, positions, window_mask)
    x = jnp.take(params["embed"], tokens, axis=0)
    tapped = {i: x for i in taps}  # each replaced by its own state when it is reached
    step = functools.partial(family_of(config).layer, window=window, config=config)
    if config.scan_layers:

        def body(carry, scanned):
            x, cache, tapped = carry
            layer, index = scanned
            tapped = {i: jnp.where(index == i, x, old) for i, old in tapped.items()}
            return (*step(layer, x, cache, index), tapped), None

        carry = (x, cache, tapped)
        (x, cache, tapped), _ = jax.lax.scan(body, carry, (params["layers"], jnp.arange(L)))
    else:
        for i in range(L):
            if i in tapped:
                tapped[i] = x
            x, cache = step(params["layers"][str(i)], x, cache, i)
    hidden = rms_norm(x, params["final_norm"], config.rms_norm_eps)
    hidden = hidden.astype(params["embed"].dtype)  # a residual stream may be in float32
    tapped |= {L: x, L + 1: hidden}
    features = jnp.concatenate([tapped[i] for i in taps], axis=-1) if taps else None
    return ForwardOutput(hidden, cache, features)


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
    """Logits f32[..., V] of final hidden states dtype[..., D]."""
    with jax.named_scope("unembed"):
        if "head" in params:
            return matmul(hidden, params["head"]).astype(jnp.float32)
        return jnp.einsum("...d,vd->...v", hidden, params["embed"]).astype(jnp.float32)


def logits(params: Params, tokens: jax.Array, *, config: AnyConfig) -> jax.Array:
    """Logits f32[B,T,V] of whole sequences i32[B,T], causal and without a cache."""
    return unembed(params, forward(params, tokens, config=config).hidden)


def _open_window(cache, width: int):
    return cache.open_window(width)


def init_cache(config: AnyConfig, batch: int, slots: int, dtype=jnp.float32):
    """An empty cache for ``batch`` rows of ``slots`` tokens, of the kind that the layers take."""
    return family_of(config).init_cache(config, batch, slots, dtype)


@functools.cache
def model(
    config: AnyConfig, taps: tuple[int, ...] = (), num_tokens: int | None = None
) -> Model:
    """The ``Model`` of this shape: what the decoder and the drafters call.

    The same arguments give the same object, so compiled programs are shared.

    Args:
      config: the shape.
      taps: states that every pass returns as features, see ``forward``.
      num_tokens: where the embedding is padded, how many of its ids are tokens.

    Raises:
      ConfigError: a tap that the model does not have, or more tokens than ids.
    """
    wrong = [i for i in taps if not 0 <= i <= config.num_hidden_layers + 1]
    if wrong:
        raise ConfigError(
            f"taps {wrong} do not exist: a model of {config.num_hidden_layers} layers has 0 to "
            f"{config.num_hidden_layers + 1}"
        )
    if num_tokens is not None and not 0 < num_tokens <= config.vocab_size:
        raise ConfigError(f"num_tokens is {num_tokens}; the model has {config.vocab_size} ids")
    is_padded = num_tokens not in (None, config.vocab_size)

    def unembed_tokens(params, hidden):
        logits = unembed(params, hidden)
        return jnp.where(jnp.arange(config.vocab_size) < num_tokens, logits, -jnp.inf)

    return Model(
        vocab_size=config.vocab_size,
        max_length=config.max_position_embeddings,
        init_cache=lambda params, batch, slots: init_cache(
            config, batch, slots, params["embed"].dtype
        ),
        forward=functools.partial(forward, config=config, taps=taps),
        unembed=unembed_tokens if is_padded else unembed,
        num_tokens=num_tokens if is_padded else None,
        open_window=_open_window,
    )
