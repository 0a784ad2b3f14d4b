"""The cache of state-space layers: a state that cannot rewind, and a window of pending inputs.

Invariant: ``forward`` writes the inputs of the window and leaves the committed state as it is.
``commit`` folds the accepted ones into the state, the first n or those along a path of a tree, and
forgets the others. So a rejected draft, or the padding of a prompt, never reaches the state, and
nothing is computed twice. The state is float32, whatever the dtype of the weights.

Between two rounds there is no window. A pass that begins one allocates it; if several passes fill
one window, ``open_window`` allocates it first.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from spec_jax.models.caches.snapshot import CacheSnapshot, check_fits
from spec_jax.models.ssm import Inputs, fold


@flax.struct.dataclass
class LayerState:
    """The committed state of one layer, and its window."""

    ssm: jax.Array  # f32[B,N,H,Z]
    conv: jax.Array  # dtype[B,R-1,C], the latest inputs of the convolution
    window: Inputs | None = None

    def axes(self) -> LayerState:
        """The logical axes of the arrays, see ``sharding``."""
        heads = P("batch", None, "state_heads")
        window = Inputs(raw=P("batch"), u=heads, b=P("batch"), log_decay=heads)
        return LayerState(P("batch", "state_heads"), P("batch"), self.window and window)

    def open_window(self, width: int) -> LayerState:
        """Makes room for a window of ``width`` tokens that several passes fill."""
        (B, N, H, Z), C = self.ssm.shape, self.conv.shape[2]
        zeros = lambda *shape: jnp.zeros((B, width, *shape), jnp.float32)
        window = Inputs(
            raw=zeros(C).astype(self.conv.dtype),
            u=zeros(N, H),
            log_decay=zeros(N),
            b=zeros((C - N * H) // (2 * Z), Z),
        )
        return self.replace(window=window)

    def commit(self, n: jax.Array, path: jax.Array | None) -> LayerState:
        """Folds ``n`` tokens of the window into the state, see ``StateCache.commit``."""
        if self.window is None:
            return self
        window = self.window
        if path is not None:
            along = lambda x: jax.vmap(lambda row, index: row[index])(x, path)
            window = jax.tree.map(along, window)
        width = window.raw.shape[1]
        ssm = fold(self.ssm, window, jnp.arange(width) < n[:, None])
        inputs = jnp.concatenate([self.conv, window.raw], axis=1)
        last = lambda row, n: jax.lax.dynamic_slice_in_dim(row, n, self.conv.shape[1])
        return LayerState(ssm, jax.vmap(last)(inputs, n))


@flax.struct.dataclass
class StateCache:
    """The states of all layers, and the number of tokens fed."""

    layers: tuple[LayerState, ...]
    length: jax.Array  # i32[B], tokens fed

    @classmethod
    def create(
        cls, mixer: Any, num_layers: int, batch: int, dtype: DTypeLike = jnp.float32
    ) -> StateCache:
        """Creates the state before any token.

        Args:
          mixer: the ``MixerConfig`` of the layers.
          num_layers: how many layers have a state.
          batch: B.
          dtype: of the inputs of the convolution.
        """
        ssm = (batch, mixer.num_heads, mixer.head_dim, mixer.state_size)
        conv = (batch, mixer.conv_kernel - 1, mixer.conv_dim)
        layer = lambda: LayerState(jnp.zeros(ssm, jnp.float32), jnp.zeros(conv, dtype))
        return cls(tuple(layer() for _ in range(num_layers)), jnp.zeros((batch,), jnp.int32))

    @property
    def slots(self) -> None:
        """None: a state has no slots, so it never runs full and nothing is masked."""

    def put(self, index: int, layer: LayerState) -> StateCache:
        """Returns the cache with another state for one layer."""
        return self.replace(layers=(*self.layers[:index], layer, *self.layers[index + 1 :]))

    def open_window(self, width: int) -> StateCache:
        """Makes room for a window of ``width`` tokens that several passes fill."""
        return self.replace(layers=tuple(layer.open_window(width) for layer in self.layers))

    def commit(self, n: jax.Array, path: jax.Array | None = None) -> StateCache:
        """Folds ``n`` tokens of the window into the state and forgets the others.

        Args:
          n: i32[B], how many tokens to keep; with 0 the state stays the same.
          path: i32[B,P], their places in the window, ascending, of which the first n count. None
            if they stand at its front.
        """
        layers = tuple(layer.commit(n, path) for layer in self.layers)
        return StateCache(layers, self.length + n)

    def insert_row(self, row: int | jax.Array, other: StateCache) -> StateCache:
        """Replaces row ``row`` by the only row of ``other``."""
        return jax.tree.map(lambda full, one: full.at[row].set(one[0]), self, other)

    def parts(self) -> dict[str, tuple[jax.Array, ...]]:
        """Returns copies of the committed arrays of every layer, for a snapshot."""
        copies = lambda name: tuple(jnp.copy(getattr(layer, name)) for layer in self.layers)
        return {"ssm": copies("ssm"), "conv": copies("conv")}

    def with_parts(self, parts: dict[str, tuple[jax.Array, ...]], length: jax.Array) -> StateCache:
        """Returns the cache with copies of the states of ``parts``, and without a window."""
        layers = zip(map(jnp.copy, parts["ssm"]), map(jnp.copy, parts["conv"]))
        return StateCache(tuple(LayerState(*layer) for layer in layers), jnp.copy(length))

    def snapshot(self) -> CacheSnapshot:
        """Returns a copy that outlives the cache, without its window."""
        return CacheSnapshot((self.parts(),), jnp.copy(self.length))

    def restore_from_snapshot(self, snapshot: CacheSnapshot) -> StateCache:
        """Returns the cache as it was when the snapshot was taken.

        Raises:
          SnapshotError: the snapshot is of another kind of cache, or of another shape or dtype.
        """
        check_fits(snapshot, jax.eval_shape(self.snapshot))
        return self.with_parts(snapshot.groups[0], snapshot.seq_len)
