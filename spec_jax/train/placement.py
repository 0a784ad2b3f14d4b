"""Where the arrays of training lie on a mesh of devices.

Windows are split over the mesh's data axis and the width of every layer over its tensor axis.
Fully sharded, the weights and the states of the optimizer are split over the data axis too: a
device holds a part of each, which is gathered where a layer needs it, and gradients are summed
into the parts. Without a mesh everything is as on one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spec_jax.errors import ConfigError
from spec_jax.meshes import to_mesh, use_mesh
from spec_jax.models.checks import require
from spec_jax.sharding import FULLY_SHARDED, SHARDED, AxisRules, named, use_axis_rules
from spec_jax.train.step import TrainState


def follow_params(state: Any, params: Any, where: Any, otherwise: Any) -> Any:
    """Returns a sharding for each array of a state that holds arrays shaped as the parameters.

    An array belongs to a parameter if its path ends with the parameter's and the shapes agree.

    Args:
      state: Arrays or their shapes, such as a ``TrainState`` or the state of an optimizer.
      params: The parameters or their shapes.
      where: The sharding of each parameter, nested as the parameters are.
      otherwise: The sharding of arrays that belong to no parameter, such as counts of steps.
    """
    paths = jax.tree_util.tree_leaves_with_path(params)
    known = {path: (x.shape, s) for (path, x), s in zip(paths, jax.tree.leaves(where))}

    def leaf(path, x):
        ends = (known.get(path[i:]) for i in range(len(path)))
        shape, sharding = next((found for found in ends if found), (None, None))
        return sharding if shape == x.shape else otherwise

    return jax.tree_util.tree_map_with_path(leaf, state)


def device_bytes(tree: Any, where: Any | None = None) -> int:
    """Returns the bytes that one device holds of a pytree of arrays.

    Args:
      tree: The arrays, or their shapes.
      where: The sharding of each, nested as the arrays are; None means their own.
    """
    arrays = jax.tree.leaves(tree)
    where = [x.sharding for x in arrays] if where is None else jax.tree.leaves(where)
    sizes = [math.prod(s.shard_shape(x.shape)) for x, s in zip(arrays, where)]
    return sum(size * x.dtype.itemsize for size, x in zip(sizes, arrays))


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of a training run, and what is split over them.

    Attributes:
      mesh: The devices; None means that jax chooses one.
      is_fully_sharded: Whether weights and the optimizer's states are split over the data axis.
    """

    mesh: Mesh | None = None
    is_fully_sharded: bool = False

    @classmethod
    def of(cls, mesh: Mesh | str | None, is_fully_sharded: bool = False) -> Placement:
        """Makes a placement.

        Args:
          mesh: From ``make_mesh`` or as text, such as "data:2,tensor:4"; None or "" for no mesh.
          is_fully_sharded: Whether weights and the optimizer's states are split over the data
            axis.

        Raises:
          ConfigError: There are fewer devices, or parameters are to be split without a mesh.
        """
        mesh = to_mesh(mesh or None)
        if is_fully_sharded and mesh is None:
            raise ConfigError("is_fully_sharded is True, but there is no mesh; give one: data:8")
        return cls(mesh, is_fully_sharded)

    @property
    def axis_rules(self) -> AxisRules:
        """Which dimensions of the weights are split."""
        return FULLY_SHARDED if self.is_fully_sharded else SHARDED

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of what is replicated on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def check_batch(self, name: str, size: int) -> None:
        """Checks that the data axis divides a batch.

        Raises:
          ConfigError: It does not; the message has both numbers.
        """
        over = 1 if self.mesh is None else self.mesh.shape.get("data", 1)
        message = f"{name} is {size}, which the mesh axis data:{over} does not divide"
        require(size % over == 0, f"{message}; expected a multiple of {over}")

    def rows(self, shape: tuple[int, ...]) -> NamedSharding | None:
        """Returns where rows of this shape lie, see ``place``; None without a mesh."""
        return None if self.mesh is None else named(("batch",), shape, self.mesh)

    def place(self, batch: Any) -> Any:
        """Splits the rows of a batch over the data axis; what it does not divide is copied.

        Args:
          batch: A pytree of arrays, whose first dimension is the batch. Every process has the
            whole batch. Random keys stay where they are.
        """
        return batch if self.mesh is None else jax.tree.map(self._place, batch)

    def _place(self, x):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        rows = self.rows(x.shape)
        if isinstance(x, jax.Array) and len(x.devices()) > 1:
            return jax.device_put(x, rows)
        x = np.asarray(x)
        return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])

    def jit(self, function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        """Jits a function, which is then traced and run on the mesh.

        Args:
          function: Of arrays.
          **options: Of ``jax.jit``.
        """
        if self.mesh is None:
            return jax.jit(function, **options)

        @functools.partial(jax.jit, **options)
        def traced(*args):
            with use_axis_rules(self.axis_rules):
                return function(*args)

        def on_mesh(method):
            @functools.wraps(method)
            def run(*args):
                with use_mesh(self.mesh):
                    return method(*args)

            return run

        run = on_mesh(traced)
        run.lower = on_mesh(traced.lower)
        return run

    def state_shardings(
        self, params: Any, make: Callable[..., TrainState], *args: Any
    ) -> TrainState | None:
        """Returns the sharding of every array of the state, the optimizer's as the parameters'.

        Args:
          params: The sharding of each parameter, nested as the parameters are.
          make: ``(*args) -> TrainState``, which is not run.
          *args: Arrays, or pytrees of them.

        Returns:
          Shardings nested as the state is; None without a mesh.
        """
        if self.mesh is None:
            return None
        shapes = jax.eval_shape(make, *args)
        return follow_params(shapes, shapes.params, params, self.replicated)

    def create(
        self, make: Callable[..., TrainState], state: TrainState | None, *args: Any
    ) -> TrainState:
        """Makes the state before the first step, each array on the devices that will hold it.

        Args:
          make: ``(*args) -> TrainState``.
          state: The sharding of each array, see ``state_shardings``.
          *args: Arrays, or pytrees of them.
        """
        return make(*args) if self.mesh is None else self.jit(make, out_shardings=state)(*args)

    def jit_step(self, step: Callable[..., Any], state: TrainState | None) -> Callable[..., Any]:
        """Jits a training step, which consumes its state and returns the next in the same places.

        Args:
          step: ``(state, *args) -> (state, figures)``.
          state: The sharding of each array of the state, see ``state_shardings``.
        """
        if self.mesh is None:
            return jax.jit(step, donate_argnums=0)
        return self.jit(step, donate_argnums=0, out_shardings=(state, self.replicated))
