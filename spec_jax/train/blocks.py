"""Attention of blocks at anchors of a window, all of them in one pass.

The block at anchor a sees what every layer keeps of the places before a, and itself; two blocks
never see each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from spec_jax.models.attention import causal_attention, grouped, ungrouped
from spec_jax.models.sees import Sees
from spec_jax.train.chunks import cut_chunks, rows_at_once

_SCORES = 1 << 26  # of attention in a layer for the blocks that are computed together, on a device


class BlockShape(NamedTuple):
    """The length of blocks, and what each layer sees of them.

    Attributes:
      block_size: S.
      windows: by layer, how many tokens a token sees, itself included; None means all.
      is_causal: by layer, whether a token of the block sees the block only up to itself.
    """

    block_size: int
    windows: tuple[int | None, ...]
    is_causal: tuple[bool, ...]


@flax.struct.dataclass
class KeptKeys:
    """Whole sequences, in the place of a ``KVCache``; their keys and values are kept by layer."""

    length: jax.Array  # i32[B], zeros: all rows begin at position 0
    layers: tuple[tuple[jax.Array, jax.Array], ...] = ()  # dtype[B,G,T,H] twice
    begins: jax.Array | None = None  # i32[B,T], where each token's document begins

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BGTH: jax.Array,
        v_BGTH: jax.Array,
        index: int,
        sees: Sees,
        scale: float | None = None,
    ) -> tuple[jax.Array, KeptKeys]:
        """Computes the attention of the next layer, see ``layers.attend_window``.

        Args:
          q_BTNH: queries.
          k_BGTH: keys.
          v_BGTH: values.
          index: the layer's index in the cache.
          sees: what the tokens see.
          scale: of the scores; None: one over the root of H.
        """
        del index
        out = causal_attention(q_BTNH, k_BGTH, v_BGTH, sees, scale=scale)
        return out, self.replace(layers=(*self.layers, (k_BGTH, v_BGTH)))


@flax.struct.dataclass
class Blocks:
    """The keys and values that blocks see, in the place of a ``KVCache``.

    Its rows are the tokens of A blocks of S tokens each, one block after the other.
    """

    context: tuple[tuple[jax.Array, jax.Array], ...]  # of each layer, dtype[B,G,W,H] twice
    anchors: jax.Array  # i32[B,A]
    config: Any = flax.struct.field(pytree_node=False)  # a BlockShape, or what has its fields
    origins: jax.Array | int = 0  # i32[B,A], where the anchors' documents begin

    @property
    def length(self) -> jax.Array:
        """i32[B], zeros: the rows say their positions."""
        return jnp.zeros((len(self.anchors),), jnp.int32)

    @property
    def positions(self) -> jax.Array:
        """i32[B,A*S], those of the blocks' tokens."""
        first = self.anchors - self.origins
        positions = first[:, :, None] + jnp.arange(self.config.block_size)
        return positions.reshape(len(positions), -1)

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BGTH: jax.Array,
        v_BGTH: jax.Array,
        index: int,
        sees: Sees,
        scale: float | None = None,
    ) -> tuple[jax.Array, Blocks]:
        """Computes the attention of a layer, see ``layers.attend_window``.

        Args:
          q_BTNH: queries.
          k_BGTH: keys.
          v_BGTH: values.
          index: the layer's index in the cache.
          sees: what the tokens see.
          scale: of the scores; None: one over the root of H.
        """
        del sees  # what a row sees depends on its block
        A = self.anchors.shape[1]
        S = self.config.block_size
        keys, values = self.context[index]
        W, scale = keys.shape[2], q_BTNH.shape[-1] ** -0.5 if scale is None else scale
        product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

        def in_blocks(x):
            return x.reshape(*x.shape[:-2], A, S, x.shape[-1])

        q, own_k, own_v = map(in_blocks, (grouped(q_BTNH, keys.shape[1]), k_BGTH, v_BGTH))
        before = product("bgrash,bgwh->bgrasw", q, keys)
        own = product("bgrash,bgaoh->bgraso", q, own_k)
        scores = jnp.concatenate([before, own], axis=-1) * scale
        scores = jnp.where(self._sees(index, W)[:, None, None], scores, -1e30)
        weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
        out = jnp.einsum("bgrasw,bgwh->bgrash", weights[..., :W], values)
        out += jnp.einsum("bgraso,bgaoh->bgrash", weights[..., W:], own_v)
        return ungrouped(out.reshape(*out.shape[:3], A * S, -1)), self

    def _sees(self, index: int, num_tokens: int) -> jax.Array:
        """bool[B,A,S,W+S], what each row sees of the window's tokens and then of its own block.

        In a layer with a window only the positions that are nearer than its size.
        """
        size = self.config.windows[index]
        row = jnp.arange(self.config.block_size)
        anchor = self.anchors[:, :, None, None]
        token = jnp.broadcast_to(jnp.arange(num_tokens), (*anchor.shape[:3], num_tokens))
        position = jnp.concatenate([token, anchor + row], axis=-1)  # of the keys
        distance = anchor + row[:, None] - position
        before = token < anchor
        if not isinstance(self.origins, int):
            before &= token >= self.origins[:, :, None, None]
        seen = jnp.concatenate([before, jnp.ones((*anchor.shape[:3], len(row)), bool)], -1)
        if self.config.is_causal[index]:
            seen = seen & (distance >= 0)
        return seen if size is None else seen & (jnp.abs(distance) < size)


def origins(begins: jax.Array | None, anchors: jax.Array) -> jax.Array | int:
    """Returns where the documents of anchors i32[B,A] begin, of ``Batch.begins`` i32[B,W]."""
    return 0 if begins is None else jnp.take_along_axis(begins, anchors, axis=1)


def map_places(at: Callable[..., jax.Array], tokens: jax.Array, size: int, layer: Any) -> jax.Array:
    """Returns what is drafted at every place of texts, as [K,B,T], some anchors at a time.

    Args:
      at: ``anchors i32[B,a] -> [B,a,K]``.
      tokens: i32[B,T+2].
      size: S.
      layer: the config of the layers.
    """
    T = tokens.shape[1] - 2
    anchors = jnp.broadcast_to(jnp.arange(1, T + 1), (len(tokens), T))
    chunks = cut_chunks(anchors, 1, blocks_at_once(tokens, anchors, size, layer))
    drafts = jax.lax.map(at, chunks).transpose(3, 1, 0, 2)  # [K,B,chunks,a]
    return drafts.reshape(*drafts.shape[:2], -1)[:, :, :T]


def blocks_at_once(tokens: jax.Array, anchors: jax.Array, size: int, layer: Any) -> int:
    """Returns how many blocks of each window are computed together: logits and scores are bounded.

    Args:
      tokens: [B,W].
      anchors: [B,A].
      size: S.
      layer: the config of the layers.
    """
    B, W = tokens.shape
    rows = rows_at_once(B, max(_SCORES // (layer.num_attention_heads * (W + size)), 1))
    return min(max(rows // (B * size), 1), anchors.shape[1])
