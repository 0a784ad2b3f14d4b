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

from spec_jax.models.caches.kv import KVCache


@flax.struct.dataclass
class LatentCache(KVCache):
    """A ``KVCache`` of one head whose values are its keys; ``values`` is None.

    Attention's result is as wide as a key: what stands past the latent's width is to be left out.
    """

    @staticmethod
    def widths(config: Any) -> tuple[int, None]:
        """Returns the width of a latent and its rotary key."""
        return config.latent_dim, None

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
