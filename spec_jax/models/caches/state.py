"""The cache of state-space layers: a state that cannot rewind, and a window of pending inputs.

Invariant: ``forward`` writes the inputs of the window and leaves the committed state as it is.
``commit`` folds the accepted ones into the state, the first n or those along a path of a tree, and
forgets the others. So a rejected draft, or the padding of a prompt, never reaches the state, and
nothing is computed twice. The state is float32, whatever the dtype of the weights.

Between two rounds there is no window. A pass that begins one allocates it; if several passes fill
one window, ``open_window`` allocates it first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from spec_jax.models.caches.snapshot import Snapshotted
from spec_jax.models.ssm import Inputs, fold
from spec_jax.sharding import take_of_array


@flax.struct.dataclass
class LayerState:
    """The committed state of one layer, and its window; or of several, stacked along a first axis.

    ``open_window`` and ``commit`` are for one.
    """

    ssm: jax.Array  # f32[B,N,H,Z]
    conv: jax.Array  # dtype[B,R-1,C], the latest inputs of the convolution
    window: Inputs | None = None

    def axes(self) -> LayerState:
        """The logical axes of the arrays, see ``sharding``."""
        first = ("layers", "batch") if self.is_stacked else ("batch",)
        rows = P(*first)
        heads = P(*first, None, "state_heads")
        window = Inputs(raw=rows, u=heads, b=rows, log_decay=heads)
        return LayerState(P(*first, "state_heads"), rows, self.window and window)

    @property
    def is_stacked(self) -> bool:
        """Whether these are several layers."""
        return self.ssm.ndim == 5

    def insert_row(self, row: int | jax.Array, other: LayerState) -> LayerState:
        """Replaces row ``row`` by the only row of ``other``."""
        put = jax.lax.dynamic_update_slice_in_dim
        return jax.tree.map(lambda full, one: put(full, one, row, self.is_stacked), self, other)

    def take_rows(self, rows: jax.Array) -> LayerState:
        """Returns the states of the rows i32[P], in their order."""
        return jax.tree.map(lambda x: take_of_array(x, rows, int(self.is_stacked)), self)

    def open_window(self, width: int) -> LayerState:
        """Makes room for a window of ``width`` tokens that several passes fill."""
        B, N, H, Z = self.ssm.shape
        C = self.conv.shape[2]

        def zeros(*shape):
            return jnp.zeros((B, width, *shape), jnp.float32)

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

            def along(x):
                return jax.vmap(lambda row, index: row[index])(x, path)

            window = jax.tree.map(along, window)
        width = window.raw.shape[1]
        ssm = fold(self.ssm, window, jnp.arange(width) < n[:, None])
        inputs = jnp.concatenate([self.conv, window.raw], axis=1)

        def last(row, n):
            return jax.lax.dynamic_slice_in_dim(row, n, self.conv.shape[1])

        return LayerState(ssm, jax.vmap(last)(inputs, n))


def _is_layer(node: Any) -> bool:
    return isinstance(node, LayerState)


@flax.struct.dataclass
class StateCache(Snapshotted):
    """The states of all layers, stacked if the layers are scanned, and the number of tokens fed."""

    layers: tuple[LayerState, ...] | LayerState
    length: jax.Array  # i32[B], tokens fed

    @classmethod
    def create(
        cls,
        mixer: Any,
        num_layers: int,
        batch: int,
        dtype: DTypeLike = jnp.float32,
        is_stacked: bool = False,
    ) -> StateCache:
        """Creates the state before any token.

        Args:
          mixer: the ``MixerConfig`` of the layers.
          num_layers: how many layers have a state.
          batch: B.
          dtype: of the inputs of the convolution.
          is_stacked: several layers are held in one stack, from which a loop reads.
        """
        first = (num_layers, batch) if is_stacked and num_layers > 1 else (batch,)
        ssm = (*first, mixer.num_heads, mixer.head_dim, mixer.state_size)
        conv = (*first, mixer.conv_kernel - 1, mixer.conv_dim)

        def layer():
            return LayerState(jnp.zeros(ssm, jnp.float32), jnp.zeros(conv, dtype))

        layers = layer() if len(first) > 1 else tuple(layer() for _ in range(num_layers))
        return cls(layers, jnp.zeros((batch,), jnp.int32))

    @property
    def is_stacked(self) -> bool:
        """Whether the layers are stacked in one ``LayerState``."""
        return isinstance(self.layers, LayerState)

    def layer(self, index: int | jax.Array) -> LayerState:
        """Returns the state of one layer; ``index`` may be traced if the layers are stacked."""
        if not self.is_stacked:
            return self.layers[index]
        at = functools.partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
        return jax.tree.map(at, self.layers)

    def with_window(self, index: int | jax.Array, window: Inputs) -> StateCache:
        """Returns the cache with another window of one layer; of stacked layers it is open."""
        if not self.is_stacked:
            layer = self.layers[index].replace(window=window)
            return self.replace(layers=(*self.layers[:index], layer, *self.layers[index + 1 :]))
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
        window = jax.tree.map(put, self.layers.window, window)
        return self.replace(layers=self.layers.replace(window=window))

    def _each(self, function: Callable[[LayerState], LayerState]) -> Any:
        """What a function makes of every layer, held as the layers are."""
        function = jax.vmap(function) if self.is_stacked else function
        return jax.tree.map(function, self.layers, is_leaf=_is_layer)

    def open_window(self, width: int) -> StateCache:
        """Makes room for a window of ``width`` tokens that several passes or layers fill.

        An open window stays as it is.
        """
        if jax.tree.leaves(self.layers, is_leaf=_is_layer)[0].window:
            return self
        return self.replace(layers=self._each(lambda layer: layer.open_window(width)))

    def commit(self, n: jax.Array, path: jax.Array | None = None) -> StateCache:
        """Folds ``n`` tokens of the window into the state and forgets the others.

        Args:
          n: i32[B], how many tokens to keep; with 0 the state stays the same.
          path: i32[B,P], their places in the window, ascending, of which the first n count. None
            if they stand at its front.
        """
        return StateCache(self._each(lambda layer: layer.commit(n, path)), self.length + n)

    def insert_row(self, row: int | jax.Array, other: StateCache) -> StateCache:
        """Replaces row ``row`` by the only row of ``other``."""

        def put(ours, theirs):
            return ours.insert_row(row, theirs)

        layers = jax.tree.map(put, self.layers, other.layers, is_leaf=_is_layer)
        return StateCache(layers, self.length.at[row].set(other.length[0]))

    def parts(self) -> dict[str, tuple[jax.Array, ...]]:
        """Returns copies of the committed arrays of every layer, for a snapshot."""

        def copies(name):
            stacked = self.is_stacked and getattr(self.layers, name)
            each = stacked if self.is_stacked else (getattr(layer, name) for layer in self.layers)
            return tuple(map(jnp.copy, each))

        return {"ssm": copies("ssm"), "conv": copies("conv")}

    def with_parts(self, parts: dict[str, tuple[jax.Array, ...]], length: jax.Array) -> StateCache:
        """Returns the cache with copies of the states of ``parts``, and without a window."""
        if self.is_stacked:
            layers = LayerState(jnp.stack(parts["ssm"]), jnp.stack(parts["conv"]))
        else:
            pairs = zip(map(jnp.copy, parts["ssm"]), map(jnp.copy, parts["conv"]))
            layers = tuple(LayerState(*pair) for pair in pairs)
        return StateCache(layers, jnp.copy(length))
