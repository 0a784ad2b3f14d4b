"""Who sees whom: which positions of a row each token of a pass attends to.

A position counts the tokens of a row in the order in which they were fed: the committed ones, and
after them those of the window. Where a position's key lies is the cache's business.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

_BITS = 32  # nodes of a tree that one number holds


@flax.struct.dataclass
class Sees:
    """What the T tokens of a pass see: chains, trees, blocks, documents and sliding windows.

    Calling it with positions says which of them each token sees.
    """

    start: jax.Array  # i32[B], the position of each row's first token
    num_tokens: int = flax.struct.field(pytree_node=False)  # T
    offset: int | jax.Array = 0  # tokens of the cache's window that come before these
    # bool[B|1,T,W], which of the window's tokens each token sees; None: all up to itself.
    inside: jax.Array | None = None
    first: int | jax.Array = 0  # the first position that any token sees, or i32[B,T] of each
    # The nearest tokens that a token sees, itself included; None: all. In a tree those of its path.
    size: int | None = flax.struct.field(pytree_node=False, default=None)

    @property
    def begins(self) -> jax.Array | None:
        """i32[B,T], where each token's document begins; None if there is one a sequence."""
        return self.first if jnp.ndim(self.first) else None

    @property
    def positions(self) -> jax.Array:
        """i32[B,T], of the tokens themselves."""
        return self.start[:, None] + jnp.arange(self.num_tokens, dtype=jnp.int32)

    @property
    def end(self) -> jax.Array:
        """i32[B], the position after the last token."""
        return self.start + self.num_tokens

    @property
    def low(self) -> jax.Array | int:
        """i32[B,T] or a number, the lowest position that each token sees."""
        if self.size is None:
            return self.first
        last = self.positions
        if self.inside is not None:
            depth = self.inside.sum(axis=2, dtype=jnp.int32) - 1
            last = (self.start - self.offset)[:, None] + depth
        return jnp.maximum(last - self.size + 1, self.first)

    def __call__(self, positions: jax.Array) -> jax.Array:
        """Returns bool[B,T,S], whether each token sees each of the positions i32[S] or i32[B,S]."""
        keys = positions[..., None, :]
        if self.inside is None:
            seen = keys <= self.positions[:, :, None]
        else:
            place = keys - (self.start - self.offset)[:, None, None]
            seen = (place < 0) | self._is_inside(place)
        low = self.low
        if isinstance(low, int) and low == 0:
            return seen
        return seen & (keys >= (low[:, :, None] if jnp.ndim(low) else low))

    def _is_inside(self, place):
        """Whether each token sees the places i32[B,1,S] in the window; False outside of it.

        What a token sees is packed into the bits of integers, from which each place takes its own.
        """
        inside = self.inside
        if self.size is not None:
            later = jnp.cumsum(inside[:, :, ::-1], axis=2, dtype=jnp.int32)[:, :, ::-1]
            inside = inside & (later <= self.size)  # of a path, the last ``size`` nodes
        W = inside.shape[2]
        words = jnp.pad(inside, ((0, 0), (0, 0), (0, -W % _BITS)))
        words = words.reshape(*inside.shape[:2], -1, _BITS).astype(jnp.uint32)
        words = (words << jnp.arange(_BITS, dtype=jnp.uint32)).sum(axis=3, dtype=jnp.uint32)
        seen = jnp.zeros((), bool)
        for i in range(words.shape[2]):
            at = place - i * _BITS
            bit = words[:, :, i, None] >> jnp.clip(at, 0, _BITS - 1).astype(jnp.uint32) & 1
            seen |= (bit > 0) & (at >= 0) & (at < _BITS)
        return seen

    def within(self, size: int | None) -> Sees:
        """Returns what tokens see of the nearest ``size`` tokens; None: of all."""
        return self if size is None else self.replace(size=size)

    def on_devices(self) -> tuple[Sees, Sees]:
        """Returns itself with arrays alone, and the logical axes of these, see ``sharding``."""
        arrays = jax.tree.map(jnp.asarray, self)
        return arrays, jax.tree.map(lambda x: P("batch") if x.ndim else P(), arrays)
