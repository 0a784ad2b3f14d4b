"""The cache of latent attention: one latent and one rotary key a token, for all query heads.

A slot's key is [latent | rotary key], and its value is that key's beginning, so both products of
attention take the same array and nothing is stored twice.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from spec_jax.models.caches.kv import KVCache, zeros
from spec_jax.sharding import kv_replication


@flax.struct.dataclass
class LatentCache(KVCache):
    """A ``KVCache`` of one head whose values are its keys; ``values`` is None.

    Attention's result is as wide as a key: what stands past the latent's width is to be left out.
    """

    @classmethod
    def create(
        cls,
        config: Any,
        batch: int,
        slots: int,
        dtype: DTypeLike = jnp.float32,
        num_layers: int | None = None,
    ) -> LatentCache:
        """Creates an empty cache for ``batch`` rows of ``slots`` tokens.

        Args:
          config: of the model; ``latent_dim`` is the width of a slot.
          batch: B.
          slots: S.
          dtype: of the latents and rotary keys.
          num_layers: number of layers that attend; by default all layers of the model.
        """
        L = config.num_hidden_layers if num_layers is None else num_layers
        copies = kv_replication("kv_heads", 1)
        keys = zeros(config, L, batch, copies, slots, config.latent_dim, dtype=dtype)
        return cls(keys, None, jnp.zeros((batch,), jnp.int32), kv_replication=copies)

    def layer(self, index: int | jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys of one layer, which are its values too."""
        keys = self.keys[index if self.is_stacked or len(self.keys) > 1 else 0]
        # Else a CPU writes a copy in the shape of the products; of a stack it takes one anyway.
        if keys.ndim == 4 and not self.is_stacked:
            keys = jax.lax.optimization_barrier(keys)
        return keys, keys

    def write(
        self, layer: int | jax.Array, keys: jax.Array, values: None, start: jax.Array
    ) -> LatentCache:
        """Writes T new slots per row, see ``KVCache.write``; ``values`` is None.

        A key that is not finite becomes NaN in its last number alone, past what is read as a value.
        """
        is_last = jnp.arange(keys.shape[-1]) == keys.shape[-1] - 1
        is_finite = jnp.isfinite(keys).all(axis=-1, keepdims=True)
        keys = jnp.where(is_finite, keys, jnp.where(is_last, jnp.nan, 0).astype(keys.dtype))
        return self.replace(keys=self._put(self.keys, layer, keys, start))
