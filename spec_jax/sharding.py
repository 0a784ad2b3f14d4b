"""Where arrays lie on a mesh of devices.

Dimensions have logical names ("batch", "heads", "vocab"), and ``AxisRules`` say which axis of the
mesh each of them is split over. Weights declare their names in ``ParamSpec.axes``, states in a
method ``axes``. A dimension that the mesh does not divide is replicated, and so is every dimension
that has no rule; where an array lies never changes a value.

``jax.set_mesh`` makes a mesh known to the functions below while a program is traced. Without one
they do nothing, and the compiled program is that of one device.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spec_jax.errors import ConfigError, ShapeError
from spec_jax.meshes import with_copies

AxisRules = Mapping[str, str]

SHARDED: AxisRules = {
    "batch": "data",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "experts": "tensor",
    "vocab": "tensor",
    "features": "tensor",
    "state_heads": "tensor",
    "state_inputs": "tensor",
}
"""Rows over "data", the width of every layer over "tensor"."""

SAMPLED_ROWS = "sampled_rows"
"""Logical axis of the rows of a batch where they are sampled: over all axes of the mesh, whatever
the axis_rules. Where the mesh does not divide them they lie as "batch" does.
"""

REPLICATED: AxisRules = {"batch": "data"}
"""Rows over "data" and everything else whole: for drafts too small to be worth splitting."""

FULLY_SHARDED: AxisRules = {**SHARDED, "embed": "data"}
"""For weights and optimizer states in training: the model's width also over "data"."""

_log = logging.getLogger(__name__)
_rules = contextvars.ContextVar("axis_rules", default=SHARDED)


@contextlib.contextmanager
def use_axis_rules(axis_rules: AxisRules) -> Iterator[None]:
    """Applies other axis_rules than ``SHARDED`` to what is traced inside."""
    token = _rules.set(axis_rules)
    try:
        yield
    finally:
        _rules.reset(token)


def check_divides(owner: str, counts: Mapping[str, int], mesh: Mesh, axis_rules: AxisRules) -> None:
    """Checks that a mesh divides the heads of a model.

    Of key-value heads it may also be a multiple: each then lies on several devices.

    Args:
      owner: the model's name.
      counts: the numbers of heads by logical axis.
      mesh: the devices.
      axis_rules: which dimensions are split.

    Raises:
      ConfigError: it does neither.
    """
    for name, count in counts.items():
        over = axis_rules.get(name)
        size = mesh.shape.get(over, 1)
        is_repeated = name == "kv_heads" and size % count == 0
        if count % size and not is_repeated:
            fit = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            if name == "kv_heads":
                fit += f" and multiples of {count}"
            what = name.replace("kv_", "key-value ").replace("_", " ")
            raise ConfigError(
                f"{owner} has {count} {what}, which the mesh axis {over}:{size} does not divide; "
                f"sizes that do are {fit}. A draft may be replicated instead: "
                "is_draft_replicated=True"
            )


def unsplit_weights(
    owner: str,
    table: Mapping[str, Any],
    mesh: Mesh,
    axis_rules: AxisRules,
    counts: Mapping[str, int],
) -> list[str]:
    """Returns a sentence for each size that axis_rules would split and the mesh does not divide.

    Args:
      owner: the model's name.
      table: of ``ParamSpec``, by name, or of such tables.
      mesh: the devices.
      axis_rules: which dimensions are split.
      counts: of logical axes that hold whole units, see ``spec``.
    """
    said: dict[str, None] = {}
    for entry in table.values():
        if not hasattr(entry, "axes"):
            said |= dict.fromkeys(unsplit_weights(owner, entry, mesh, axis_rules, counts))
            continue
        used = spec(entry.axes, entry.shape, mesh, axis_rules, counts)
        for name, size in zip(entry.axes, entry.shape):
            if axis_rules.get(name) in used:  # another dimension is split in place of this one
                continue
            lines = _whole(name, counts.get(name, size), mesh, axis_rules)
            said |= dict.fromkeys(f"{owner}: {line}" for line in lines)
    return [*said]


def _whole(name: str, size: int, mesh: Mesh, axis_rules: AxisRules) -> list[str]:
    over = axis_rules.get(name)
    if size % mesh.shape.get(over, 1) == 0 or kv_replication(name, size, mesh, axis_rules) > 1:
        return []
    return [
        f"{name.replace('_', ' ')} of size {size} is not divided by the mesh axis "
        f"{over}:{mesh.shape[over]}, so every device along it holds all of it"
    ]


def unsplit_batch(batch: int, mesh: Mesh) -> list[str]:
    """Returns a sentence if a mesh does not divide the rows of a batch."""
    return _whole("batch", batch, mesh, SHARDED)


@functools.cache
def log_once(text: str) -> None:
    """Logs a warning the first time that it is given."""
    _log.warning("%s", text)


def ambient() -> Any | None:
    """The mesh of ``jax.set_mesh``; None without one, and inside of ``shard_map_over``."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if any(kind == AxisType.Auto for kind in mesh.axis_types or ()) else None


def spec(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Any,
    axis_rules: AxisRules | None = None,
    counts: Mapping[str, int] | None = None,
) -> PartitionSpec:
    """Returns how an array is split.

    Args:
      axes: the logical name of each dimension; None and missing ones at the end are whole.
      shape: of the array.
      mesh: whose axes it is split over.
      axis_rules: by default those of ``use_axis_rules``.
      counts: of logical axes that hold whole units, such as heads: the number that has to divide
        in place of the dimension's size.
    """
    axis_rules = _rules.get() if axis_rules is None else axis_rules
    used: set[str] = set()

    def split(name, size):
        size = size if counts is None else counts.get(name, size)
        if name == SAMPLED_ROWS:
            if not used and size % mesh.size == 0:
                used.update(mesh.axis_names)
                return tuple(mesh.axis_names)
            name = "batch"
        over = axis_rules.get(name)
        if over in used or over not in mesh.shape or size % mesh.shape[over]:
            return None
        used.add(over)
        return over

    return PartitionSpec(*(split(name, size) for name, size in zip(axes, shape)))


def kv_replication(
    name: str, count: int, mesh: Any = None, axis_rules: AxisRules | None = None
) -> int:
    """Returns the number of devices that hold a copy of each key-value head; 1 unless there are
    more devices than heads.

    Weights keep their shape, and a head's columns lie on neighbours (see ``named``). Activations
    and caches have the head once for each of these devices (see ``repeat_heads``).

    Args:
      name: the logical axis; any but "kv_heads" has one copy.
      count: of all heads, G.
      mesh: by default the mesh of ``jax.set_mesh``.
      axis_rules: by default those of ``use_axis_rules``.
    """
    mesh = ambient() if mesh is None else mesh
    axis_rules = _rules.get() if axis_rules is None else axis_rules
    size = 1 if mesh is None else mesh.shape.get(axis_rules.get(name), 1)
    return size // count if name == "kv_heads" and size > count and size % count == 0 else 1


def repeat_heads(x: jax.Array, axis: int) -> jax.Array:
    """Repeats each of G key-value heads for the devices that it lies on, see ``kv_replication``.

    The gradient of a head is the sum of its copies'.
    """
    copies = kv_replication("kv_heads", x.shape[axis])
    return x if copies == 1 else jnp.repeat(x, copies, axis=axis)


def named(
    axes: Sequence[str | None],
    shape: Sequence[int],
    mesh: Mesh,
    axis_rules: AxisRules | None = None,
    counts: Mapping[str, int] | None = None,
) -> NamedSharding:
    """Returns ``spec`` as a sharding over the mesh, where each key-value head may lie on several
    devices (see ``kv_replication``).

    Args:
      axes: the logical name of each dimension; None and missing ones at the end are whole.
      shape: of the array.
      mesh: the devices.
      axis_rules: by default those of ``use_axis_rules``.
      counts: of logical axes that hold whole units, see ``spec``.
    """
    axis_rules = _rules.get() if axis_rules is None else axis_rules
    count = (counts or {}).get("kv_heads")
    if count is not None and "kv_heads" in axes:
        copies = kv_replication("kv_heads", count, mesh, axis_rules)
        mesh = mesh if copies == 1 else with_copies(mesh, axis_rules["kv_heads"], copies)
    return NamedSharding(mesh, spec(axes, shape, mesh, axis_rules, counts))


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Splits an array of the program that is traced by its logical axes; without any, copies it
    to all devices.
    """
    mesh = ambient()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def gather_width(weight: jax.Array, *axes: str | None) -> jax.Array:
    """Gathers a weight whose width is split over the data axis, as in ``FULLY_SHARDED``.

    Its gradient is split as the weight was. For weights that are not used in a matrix product, such
    as the embedding. Under other axis_rules it is the identity.

    Args:
      weight: the weight.
      axes: its logical axes.
    """
    if "embed" not in _rules.get():
        return weight

    def whole(x):
        return constrain(x, *(None if axis == "embed" else axis for axis in axes))

    gather = jax.custom_vjp(whole)
    gather.defvjp(lambda x: (whole(x), None), lambda _, grad: (constrain(whole(grad), *axes),))
    return gather(weight)


def gather_vocab(x: jax.Array) -> jax.Array:
    """Replicates the vocabulary axis of logits dtype[B,...,V] before sampling, for each device's
    part of all rows.

    It is gathered as a dimension of a matrix: of [B,T,V] a TPU gathers V in a layout that has the
    rows last, padded to 128, and would pad the T, every one of B times.
    """
    mesh = ambient()
    if mesh is None:
        return x
    (rows,) = spec((SAMPLED_ROWS,), x.shape[:1], mesh)
    matrix = jax.lax.with_sharding_constraint(x.reshape(-1, x.shape[-1]), PartitionSpec(rows, None))
    return matrix.reshape(x.shape)


def shardings(
    table: Mapping[str, Any],
    mesh: Mesh,
    axis_rules: AxisRules | None = None,
    counts: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns the shardings of the weights of a table of ``ParamSpec``, nested as the table is.

    Args:
      table: of ``ParamSpec``, by name, or of such tables.
      mesh: the devices.
      axis_rules: by default those of ``use_axis_rules``.
      counts: of logical axes that hold whole units, see ``spec``.
    """
    return {
        name: named(entry.axes, entry.shape, mesh, axis_rules, counts)
        if hasattr(entry, "axes")
        else shardings(entry, mesh, axis_rules, counts)
        for name, entry in table.items()
    }


def pin_tpu_layout(x: jax.Array) -> jax.Array:
    """Keeps an array of a loop in the layout in which a TPU stores it.

    XLA may prefer another layout inside of a loop, and would then copy the whole array at the
    loop's entry and exit. Before jax 0.11 this needs the device's own part of the array, inside of
    ``shard_map_over``: there, an array that is split would be gathered.
    """
    is_split = ambient() is not None
    if jax.sharding.get_abstract_mesh().empty or (is_split and jax.__version_info__ < (0, 11)):
        return x
    return jax.lax.platform_dependent(x, tpu=_in_stored_layout, default=lambda x: x)


def _in_stored_layout(x: jax.Array) -> jax.Array:
    """A TPU stores tiles of 8 rows of 128, and turns the last two dimensions if that pads less."""
    order = list(range(x.ndim))

    def padded(rows, width):
        return -(-rows // 8) * -(-width // 128)

    if x.ndim > 1 and padded(x.shape[-1], x.shape[-2]) < padded(x.shape[-2], x.shape[-1]):
        order[-2:] = order[:-3:-1]
    return with_layout_constraint(x, Layout(tuple(order)))


def place(tree: Any, where: Any) -> Any:
    """Puts arrays on devices. A ``ShapeDtypeStruct`` gets its sharding, to compile with.

    Args:
      tree: of arrays, or of their shapes.
      where: the sharding of each, nested as the tree is or as a part of it from the root on.
    """
    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree)):
        return jax.device_put(tree, where)

    def put(sharding, part):
        return jax.tree.map(lambda x: x.update(sharding=sharding), part)

    return jax.tree.map(put, where, tree)


def state_axes(state: Any) -> Any:
    """Returns the logical axes of a state, a ``PartitionSpec`` of names for each array.

    Nodes with a method ``axes`` say theirs. Every other array has the batch first.
    """

    def axes(node):
        return node.axes() if hasattr(node, "axes") else PartitionSpec("batch")

    return jax.tree.map(axes, state, is_leaf=lambda node: hasattr(node, "axes"))


def constrain_state(state: Any) -> Any:
    """Splits every array of a state, see ``state_axes``."""
    if ambient() is None:
        return state
    return jax.tree.map(lambda x, axes: constrain(x, *axes), state, state_axes(state))


def place_state(state: Any, mesh: Mesh) -> Any:
    """Copies a state that lies elsewhere to a mesh, split as ``constrain_state`` does."""

    def put(x, axes):
        return jax.device_put(x, named(axes, x.shape, mesh))

    return jax.tree.map(put, state, state_axes(state))


def take_rows(state: Any, rows: jax.Array) -> Any:
    """Returns a state of the rows i32[P] of a state, in their order.

    Nodes with a method ``take_rows`` give theirs. Every other array has the batch first.
    """

    def take(node):
        return node.take_rows(rows) if hasattr(node, "take_rows") else take_of_array(node, rows)

    return jax.tree.map(take, state, is_leaf=lambda node: hasattr(node, "take_rows"))


def take_of_array(x: jax.Array, rows: jax.Array, axis: int = 0) -> jax.Array:
    """Returns the rows i32[P] of an array whose rows are an axis of it."""
    if ambient() is None or len(rows) > 1:
        return jnp.take(x, rows, axis=axis, mode="clip")
    # Each device looks among its own rows: a gather of one would collect all of them first.
    index = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis)
    own = jnp.where(index == rows[0], x, jnp.zeros((), x.dtype))
    return (
        own.any(axis, keepdims=True) if x.dtype == bool else own.sum(axis, x.dtype, keepdims=True)
    )


def replicate(tree: Any) -> Any:
    """Copies every array to all devices, so that any process can read all of it."""
    return jax.tree.map(constrain, tree)


def shard_map_over(
    function: Callable[..., Any],
    in_axes: Any,
    out_axes: Any,
    *,
    summed: tuple[str, int] | None = None,
) -> Callable[..., Any]:
    """Returns a function that runs on each device with the device's own part of the arrays.

    Without a mesh it is the function itself.

    Args:
      function: of arrays, or pytrees of them.
      in_axes: a tuple with the logical axes of each argument: a ``PartitionSpec`` of names, or a
        pytree of them.
      out_axes: of the result.
      summed: the name and size of a logical axis of arguments, over whose parts the results are
        added up.
    """
    mesh = ambient()
    if mesh is None:
        return function
    over = None if summed is None else spec(summed[:1], summed[1:], mesh)[0]

    def on_part(*args):
        return jax.lax.psum(function(*args), over)

    def run(*args):
        out = jax.eval_shape(function, *args)
        each = function if over is None else on_part
        return _on_shards(each, args, out, tuple(in_axes), out_axes)

    return run


def _on_shards(function, args, out, in_axes, out_axes):
    """Runs ``shard_map_over``'s function, whose result has the shapes ``out``."""
    mesh = ambient()

    def each(axes, part):
        return jax.tree.map(lambda x: spec(axes, x.shape, mesh), part)

    def specs(axes, tree):
        return jax.tree.map(each, axes, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

    return jax.shard_map(
        function, in_specs=specs(in_axes, args), out_specs=specs(out_axes, out), check_vma=False
    )(*args)


def copies_of_rows(batch: int) -> int:
    """Returns on how many devices of the ambient mesh each row lies; 1 without a mesh."""
    mesh = ambient()
    if mesh is None:
        return 1
    axes = spec(("batch",), (batch,), mesh)[0]
    split = [axes] if isinstance(axes, str) else axes or ()
    return mesh.size // math.prod(mesh.shape[axis] for axis in split)


def shard_map_rows(function: Callable[..., Any], rows_axis: str = "batch") -> Callable[..., Any]:
    """Returns a function that runs on each device with the device's own rows, whole in all else.

    Without a mesh it is the function itself.

    Args:
      function: of arrays, or pytrees of them, each of rank 0 or with the batch as its first
        dimension, or 1 in its place. Every array that it returns has the batch first.
      rows_axis: the logical axis of the rows. With ``SAMPLED_ROWS`` no two devices sample the same
        row; what the layers read of the result is to be constrained to "batch" once.

    Raises:
      ShapeError: while tracing on a mesh, an array has something else as its first dimension, or
        one that is returned has no batch.
    """
    if ambient() is None:
        return function

    def keep_batch_sharding(x, axes):
        """Pins small per-row arrays to the batch axis, so that sharding chosen for sampling does
        not spread into the layers."""
        is_wide = x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)
        return x if is_wide else constrain(x, *axes)

    def run(*args):
        if rows_axis == SAMPLED_ROWS:
            args = jax.tree.map(keep_batch_sharding, args, state_axes(args))
        rows = max(x.shape[0] for x in jax.tree.leaves(args) if x.ndim)
        out = jax.eval_shape(function, *args)
        given = [x.shape for x in jax.tree.leaves(args) if x.ndim and x.shape[0] not in (1, rows)]
        returned = [x.shape for x in jax.tree.leaves(out) if x.shape[:1] != (rows,)]
        if given or returned:
            raise ShapeError(
                f"shard_map_rows: of {rows} rows, arrays of shapes {given} are given and "
                f"{returned} are returned; expected the rows as the first dimension"
            )

        def axes(x):
            return PartitionSpec(rows_axis if x.ndim and x.shape[0] == rows else None)

        def tree(arrays):
            return jax.tree.map(axes, arrays)

        return _on_shards(function, args, out, tree(args), tree(out))

    return run
