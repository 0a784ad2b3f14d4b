"""The cache of models that compute every pass from the tokens alone."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class TokenCache:
    """The tokens that were fed: committed ones, and after them those of the window."""

    tokens: jax.Array  # i32[B,S]
    length: jax.Array  # i32[B]

    @classmethod
    def create(cls, batch: int, slots: int) -> TokenCache:
        """Returns an empty cache for ``slots`` tokens of each row."""
        return cls(jnp.zeros((batch, slots), jnp.int32), jnp.zeros((batch,), jnp.int32))

    def write(
        self, tokens: jax.Array, window_offset: int | jax.Array
    ) -> tuple[TokenCache, jax.Array]:
        """Writes tokens i32[B,T] into the window; returns also their slots, i32[B,T]."""
        B, T = tokens.shape
        start = self.length + window_offset
        slots = start[:, None] + jnp.arange(T, dtype=jnp.int32)
        rows = jnp.arange(B)[:, None]
        return self.replace(tokens=self.tokens.at[rows, slots].set(tokens)), slots

    def commit(self, n: jax.Array, path: jax.Array | None = None) -> TokenCache:
        tokens = self.tokens
        if path is not None:
            rows = jnp.arange(len(n))[:, None]
            front = jnp.arange(path.shape[1])
            slots = self.length[:, None]
            tokens = tokens.at[rows, slots + front].set(tokens[rows, slots + path])
        return self.replace(tokens=tokens, length=self.length + n)

    def rewind(self, n: jax.Array) -> TokenCache:
        return self.replace(length=self.length - n)

    def insert_row(self, row: int | jax.Array, other: TokenCache) -> TokenCache:
        def put(full, one):
            return full.at[row].set(one[0])

        return jax.tree.map(put, self, other)

    def snapshot(self) -> TokenCache:
        return jax.tree.map(jnp.copy, self)

    def restore_from_snapshot(self, snapshot: TokenCache) -> TokenCache:
        return snapshot
