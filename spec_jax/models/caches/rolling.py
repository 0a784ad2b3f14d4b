"""The cache of layers with a sliding window: slots are used again when they are out of sight.

Position p lies in slot ``p % S``, where S is the window's size and the tokens of the largest pass,
see ``ModelConfig.max_pass``. So what a pass writes replaces only what neither its tokens see, nor
any token that follows the committed ones, however many of the pass are rejected.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from spec_jax.errors import ShapeError
from spec_jax.models.caches.kv import KVCache
from spec_jax.models.sees import Sees


@flax.struct.dataclass
class RollingCache(KVCache):
    """A ``KVCache`` of fewer slots than tokens."""

    max_pass: int = flax.struct.field(pytree_node=False, default=1)

    is_rolling: ClassVar[bool] = True

    @classmethod
    def create(
        cls,
        config: Any,
        batch: int,
        slots: int,
        dtype: DTypeLike = jnp.float32,
        num_layers: int | None = None,
    ) -> Self | KVCache:
        """Creates an empty cache, see ``KVCache.create``; one for all tokens if that is no larger.

        The config has ``sliding_window`` and ``max_pass``.
        """
        size = config.sliding_window + config.max_pass
        if slots <= size:
            return KVCache.create(config, batch, slots, dtype, num_layers)
        cache = super().create(config, batch, size, dtype, num_layers)
        return cache.replace(max_pass=config.max_pass)

    def positions(self, slots: jax.Array, end: jax.Array) -> jax.Array:
        """Returns the latest position before ``end`` in each slot, see ``KVCache.positions``."""
        last = end[:, None] - 1
        return last - (last - slots) % self.slots

    def slots_of(self, positions: jax.Array) -> jax.Array:
        """Returns the slots of positions."""
        return positions % self.slots

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BGTH: jax.Array,
        v_BGTH: jax.Array,
        index: int | jax.Array,
        sees: Sees,
        scale: float | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """See ``KVCache.attend``.

        Raises:
          ShapeError: the pass, or a window that passes fill, has more than ``max_pass`` tokens.
        """
        num_tokens = sees.num_tokens + (sees.offset if isinstance(sees.offset, int) else 0)
        if num_tokens > self.max_pass:
            raise ShapeError(
                f"a window of {num_tokens} tokens is fed to layers with a sliding window, whose "
                f"cache has room for {self.max_pass}: feed fewer, as by "
                f"prefill_chunk={self.max_pass}, or set max_pass of the config"
            )
        return super().attend(q_BTNH, k_BGTH, v_BGTH, index, sees, scale)
