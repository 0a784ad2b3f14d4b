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

from spec_jax.errors import ConfigError, ShapeError
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
        """Creates an empty cache, see ``KVCache.create``.

        It is a plain ``KVCache`` if the row has no more tokens than there would be slots. The
        config has ``sliding_window`` and ``max_pass``.
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
          ShapeError: this pass, and those before it since the last commit, feed more than
            ``max_pass`` tokens. Of a traced offset ``open_window`` checks it.
        """
        is_known = not isinstance(sees.offset, jax.core.Tracer)
        self.open_window(sees.num_tokens + (int(sees.offset) if is_known else 0))
        return super().attend(q_BTNH, k_BGTH, v_BGTH, index, sees, scale)

    def open_window(self, width: int) -> RollingCache:
        """Returns the cache itself, which has room for ``width`` tokens after the committed ones.

        Raises:
          ShapeError: ``width`` is more than ``max_pass``.
        """
        if width > self.max_pass:
            raise ShapeError(
                f"{width} tokens are fed after the committed ones; the cache of layers with a "
                f"sliding window has room for {self.max_pass}: lower num_speculative_tokens, or "
                f"take prefill_chunk={self.max_pass}"
            )
        return self

    def rewind(self, n: jax.Array) -> RollingCache:
        """Forgets the last ``n`` (i32[B]) committed tokens.

        The caller ensures that ``n``, and the tokens after the committed ones that were fed and not
        kept, are together at most ``max_pass + 1``: more have replaced what is then in sight.
        """
        return super().rewind(n)


def check_rewind(state: Any, num_tokens: int) -> None:
    """Checks that the caches in a drafter's state can forget so many tokens.

    Args:
      state: of the drafter.
      num_tokens: committed tokens to rewind, and tokens fed after them.

    Raises:
      ConfigError: a cache of layers with a sliding window cannot, see ``RollingCache.rewind``.
    """

    def is_rolling(x):
        return isinstance(x, RollingCache)

    for cache in filter(is_rolling, jax.tree.leaves(state, is_leaf=is_rolling)):
        if num_tokens > cache.max_pass + 1:
            raise ConfigError(
                f"an overlapped draft forgets up to {num_tokens} tokens; the cache of its layers "
                f"with a sliding window can forget {cache.max_pass + 1}: lower "
                "num_speculative_tokens"
            )
