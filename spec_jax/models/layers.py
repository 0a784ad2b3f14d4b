"""The parts of a decoder layer, for models and for heads that draft from their states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spec_jax.contracts import Cache
from spec_jax.errors import ConfigError
from spec_jax.models.attention import causal_attention
from spec_jax.models.config import ModelConfig
from spec_jax.models.cpu_layout import find, matmul
from spec_jax.models.rope import rope_frequencies, rotate
from spec_jax.models.sees import Sees
from spec_jax.sharding import constrain, gather_width, repeat_heads


class Window(NamedTuple):
    """The tokens of one forward pass: what each of them sees, and its rotary embedding.

    Attributes:
      sees: which positions each token sees.
      cos: f32[B,T,H/2], cosines of the rotary embedding, where H counts the rotated dimensions.
      sin: f32[B,T,H/2], its sines.
    """

    sees: Sees
    cos: jax.Array
    sin: jax.Array

    @classmethod
    def after(
        cls,
        config: ModelConfig,
        cache: Cache | None,
        batch: int,
        num_tokens: int,
        window_offset: int | jax.Array = 0,
        positions: jax.Array | None = None,
        window_mask: jax.Array | None = None,
        begins: jax.Array | None = None,
    ) -> Window:
        """Returns the window of the next tokens of every row.

        Args:
          config: its rotary embedding applies.
          cache: what was fed before; None if the tokens are whole sequences.
          batch: B.
          num_tokens: T.
          window_offset: number of slots that earlier calls since the last commit have filled.
          positions: i32[B,T], rotary positions. By default the number of tokens that a token
            sees before itself, which is its slot in a chain and its depth in a tree. In a block
            whose tokens see each other it is neither, so the caller says the positions.
          window_mask: bool[B|1,T,W], which of the window's first W slots each token sees, its
            own included, beside all committed slots. By default all up to its own.
          begins: i32[B,T], where each token's document begins, if the sequences are of several
            documents: it is position 0, and no token sees what is before. By default those of the
            cache, if it has any.

        Raises:
          ConfigError: ``begins`` is given with a cache of committed tokens or a ``window_mask``.
        """
        is_whole = cache is None or hasattr(cache, "begins")
        if begins is not None and not (is_whole and window_mask is None):
            raise ConfigError(
                "begins= is for whole sequences; a cache and a window_mask hold one document a row"
            )
        begins = getattr(cache, "begins", None) if begins is None else begins
        length = jnp.zeros((batch,), jnp.int32) if cache is None else cache.length
        first = 0 if begins is None else begins
        start = length + window_offset
        sees = Sees(start, num_tokens, window_offset, window_mask, first)
        if positions is None:
            seen = None if window_mask is None else window_mask.sum(axis=2, dtype=jnp.int32)
            positions = sees.positions if seen is None else length[:, None] + seen - 1
            positions = positions if begins is None else positions - begins
        freq, factor = rope_frequencies(config.rope, config.rotary_dim)
        angle = positions[:, :, None].astype(jnp.float32) * freq
        cos = jnp.cos(angle) * factor
        sin = jnp.sin(angle) * factor
        return cls(sees, cos, sin)

    def within(self, size: int | None) -> Window:
        """Returns the window of a layer whose tokens see the nearest ``size``, see ``Sees``."""
        return self._replace(sees=self.sees.within(size))


def check_one_document(window: Window) -> None:
    """Checks that a sequence is one document, for layers that keep a state of all tokens.

    Raises:
      ConfigError: It is not.
    """
    if window.sees.begins is not None:
        raise ConfigError(
            "a layer with a recurrent state would carry it from one document into the next: "
            "windows of several documents, each by itself, need a model whose layers all attend"
        )


def embed_tokens(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the embeddings dtype[B,T,D] of tokens i32[B,T] from a table dtype[V,D]."""
    # With its width split over the data axis every device would look up the tokens of all rows.
    table = gather_width(table, "vocab", "embed")
    return constrain(jnp.take(table, tokens, axis=0), "batch", None, None)


def constrain_logits(logits: jax.Array) -> jax.Array:
    """Splits logits dtype[B,...,V] by rows and vocabulary, see ``sharding.constrain``."""
    return constrain(logits, "batch", *[None] * (logits.ndim - 2), "vocab")


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Divides by the root mean square over the last axis, in float32, and multiplies by a weight.

    Source: arXiv 1910.07467, equation 4.

    Args:
      x: dtype[...,D].
      weight: dtype[D], or a number.
      eps: is added to the mean of the squares.

    Returns:
      dtype[...,D].
    """
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * scale).astype(x.dtype) * weight


def centred_norms(layer: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Returns weights in which norms are factors, where files hold them less one."""
    return {name: 1 + w if name.endswith("norm") else w for name, w in layer.items()}


def linear(x: jax.Array, layer: dict[str, jax.Array], name: str) -> jax.Array:
    """Applies the linear map of this name, and its bias if there is one.

    Of joined maps the whole product is computed, which XLA does once for all that ask for it.

    Args:
      x: dtype[...,in].
      layer: the layer's weights.
      name: of the map.

    Returns:
      dtype[...,out].
    """
    w, columns = find(layer, name)
    y = matmul(x, w)
    y = y if columns is None else y[..., columns]
    return y + layer[f"{name}_bias"] if f"{name}_bias" in layer else y


def attention(
    layer: dict[str, jax.Array],
    x_BTC: jax.Array,
    cache: Cache | None,
    index: int | jax.Array,
    window: Window,
    config: ModelConfig,
) -> tuple[jax.Array, Cache | None]:
    """Applies self-attention to normalised inputs, without the residual.

    Args:
      layer: the layer's weights.
      x_BTC: dtype[B,T,C], where C is the input width of q, k and v.
      cache: is written, and attended over; None if the tokens are whole sequences.
      index: the layer's place in the cache.
      window: what the tokens see, and their rotary embedding.
      config: the shape of the layer.

    Returns:
      dtype[B,T,D], and the cache with the window written.
    """
    q = _turned(layer, x_BTC, "q", window, config)
    k, v = keys_values(layer, x_BTC, window, config)
    with jax.named_scope("attention"):
        kind = getattr(config, "attention", "auto")
        out, cache = attend_window(q, k, v, cache, index, window, kind=kind)
        return linear(out, layer, "o"), cache


def keys_values(
    layer: dict[str, jax.Array], x_BTC: jax.Array, window: Window, config: ModelConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns keys and values dtype[B,G,T,H], as ``attention`` writes them to a cache.

    A drafter whose layers attend over the target's states writes them by ``KVCache.write``, and
    runs no attention for these tokens. Arguments are those of ``attention``.
    """
    k = _turned(layer, x_BTC, "k", window, config)
    v = _heads(layer, x_BTC, "v", config)
    return k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)


def _heads(layer, x_BTC, name, config):
    """dtype[B,T,N,H], the heads of one of q, k and v; those of k and v as a cache holds them."""
    count = config.num_attention_heads if name == "q" else config.num_key_value_heads
    x = linear(x_BTC, layer, name).reshape(*x_BTC.shape[:2], count, config.head_dim)
    if name == "q":
        return constrain(x, "batch", None, "heads", None)
    return constrain(repeat_heads(x, axis=2), "batch", None, "kv_heads", None)


def _turned(layer, x_BTC, name, window, config):
    """dtype[B,T,N,H], queries or keys at their positions."""
    x = _heads(layer, x_BTC, name, config)
    if config.has_qk_norm:
        x = rms_norm(x, layer[f"{name}_norm"], config.rms_norm_eps)
    return rotate(x, window.cos, window.sin)


def attend_window(
    q_BTNH: jax.Array,
    k_BGTH: jax.Array,
    v_BGTH: jax.Array,
    cache: Cache | None,
    index: int | jax.Array,
    window: Window,
    scale: float | None = None,
    kind: str = "auto",
) -> tuple[jax.Array, Cache | None]:
    """Attends from the window over the cache and the window itself.

    Args:
      q_BTNH: dtype[B,T,N,H], queries.
      k_BGTH: dtype[B,G,T,H], keys.
      v_BGTH: dtype[B,G,T,H], values, of any width.
      cache: is written, and attended over; None if the tokens are whole sequences.
      index: the layer's place in the cache.
      window: what the tokens see, and their rotary embedding.
      scale: multiplies the scores; by default 1/sqrt(H).
      kind: of whole sequences, see ``causal_attention``; a cache has its own.

    Returns:
      dtype[B,T,N*H], where H is the width of the values, and the cache with the window written.
    """
    if cache is None:
        sees = window.sees
        return causal_attention(q_BTNH, k_BGTH, v_BGTH, sees, scale=scale, kind=kind), None
    return cache.attend(q_BTNH, k_BGTH, v_BGTH, index, window.sees, scale)


def mlp(layer: dict[str, jax.Array], x_BTD: jax.Array, config: ModelConfig) -> jax.Array:
    """Applies the gated feed-forward part, with its norm and residual.

    Args:
      layer: the layer's weights.
      x_BTD: dtype[B,T,D].
      config: of the model.

    Returns:
      dtype[B,T,D].
    """
    with jax.named_scope("mlp"):
        return x_BTD + gated(layer, rms_norm(x_BTD, layer["mlp_norm"], config.rms_norm_eps))


def gated(layer: dict[str, jax.Array], x_BTD: jax.Array, prefix: str = "") -> jax.Array:
    """Applies the gated maps of ``mlp``, or those of a prefix, without its norm and residual.

    Args:
      layer: the layer's weights.
      x_BTD: dtype[B,T,D], normalised inputs.
      prefix: of the maps' names.

    Returns:
      dtype[B,T,D].
    """
    h = jax.nn.silu(linear(x_BTD, layer, f"{prefix}gate")) * linear(x_BTD, layer, f"{prefix}up")
    return linear(h, layer, f"{prefix}down")


def pre_norm_layer(attention: Callable[..., Any], mlp: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a family's layer: attention after a norm, then the feed-forward part.

    Args:
      attention: ``(layer, x, cache, index, window, config) -> (x, cache)``, see ``attention``.
      mlp: ``(layer, x, config) -> x``, with its norm and residual, see ``mlp``.

    Returns:
      The function that ``Family.layer`` is.
    """

    def decoder_layer(layer, x_BTD, cache, index, window, config):
        with jax.named_scope("attention"):
            h = rms_norm(x_BTD, layer["attention_norm"], config.rms_norm_eps)
            h, cache = attention(layer, h, cache, index, window, config)
        return mlp(layer, x_BTD + h, config), cache

    return decoder_layer
