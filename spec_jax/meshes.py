"""Meshes of devices: made from text, checked, and set while programs run."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from spec_jax.errors import ConfigError

MESH_AXES = ("data", "tensor")
_SHOWN = "data:2,tensor:4"  # an example, for messages
_COPIES = "copies"  # the inner part of an axis, see ``with_copies``


def parse_mesh(text: str) -> dict[str, int]:
    """Reads a mesh such as ``data:2,tensor:4``; an axis that is not named has size 1.

    Raises:
      ConfigError: an axis is unknown or named twice, or a size is not a positive integer.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (x.strip() for x in part.partition(":"))
        if name not in MESH_AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"mesh is {text!r}; expected positive sizes of {' and '.join(MESH_AXES)}, such as "
                f"{_SHOWN}"
            )
        sizes[name] = int(size)
    return {name: sizes.get(name, 1) for name in MESH_AXES}


def make_mesh(sizes: str | Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh of the first devices, in an order that suits their network.

    Args:
      sizes: of its axes, as text (see ``parse_mesh``) or by name.
      devices: to choose from; by default all that jax sees.

    Raises:
      ConfigError: there are too few devices, or the mesh leaves out devices of other processes.
    """
    if not isinstance(sizes, str):
        sizes = ",".join(f"{name}:{size}" for name, size in sizes.items())
    sizes = parse_mesh(sizes)
    devices = list(jax.devices() if devices is None else devices)
    shape = tuple(sizes.values())
    count = math.prod(shape)
    said = ",".join(f"{n}:{s}" for n, s in sizes.items())
    if count > len(devices):
        platform = devices[0].platform
        flag = f"--xla_force_host_platform_device_count={count}"
        hint = f"; to try it on a CPU, set XLA_FLAGS={flag} before Python starts"
        hint = hint if platform == "cpu" else ""
        raise ConfigError(
            f"mesh {said} needs {count} devices; jax sees {len(devices)} ({platform}){hint}"
        )
    if count < len(devices) and len({d.process_index for d in devices}) > 1:
        raise ConfigError(
            f"mesh {said} has {count} of the {len(devices)} devices of several processes; it must "
            "have all of them"
        )
    if devices[0].platform == "tpu" and count == len(devices):
        from jax.experimental import mesh_utils

        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        grid = np.asarray(devices[:count]).reshape(shape)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_text(mesh: Mesh) -> str:
    """Returns the text that ``make_mesh`` reads, such as ``data:2,tensor:4``."""
    return ",".join(f"{name}:{size}" for name, size in mesh.shape.items())


def to_mesh(mesh: Mesh | str | None) -> Mesh | None:
    """Returns a mesh that was given as text or made before; None stays None.

    Raises:
      ConfigError: it is something else, has other axes, or is none of automatic axes; see also
        ``make_mesh``.
    """
    if mesh is None:
        return None
    if isinstance(mesh, str):
        return make_mesh(mesh)
    if not isinstance(mesh, Mesh):
        raise ConfigError(
            f"mesh is {mesh!r:.200}; expected a Mesh, which make_mesh makes, or text such as "
            f"{_SHOWN}"
        )
    unknown = [name for name in mesh.axis_names if name not in MESH_AXES]
    if unknown:
        raise ConfigError(
            f"the mesh has axes {', '.join(map(repr, mesh.axis_names))}; expected "
            f"{' and '.join(MESH_AXES)}, as make_mesh({_SHOWN!r}) names them"
        )
    if not _is_automatic(mesh):
        raise ConfigError(
            f"the mesh has axis types {mesh.axis_types}; expected AxisType.Auto for each, which "
            "make_mesh makes"
        )
    return mesh


@functools.cache
def with_copies(mesh: Mesh | AbstractMesh, axis: str, count: int) -> Mesh | AbstractMesh:
    """Returns the same devices with an axis in two parts, of which arrays are split over the first.

    What is split over the axis then has a copy on each of ``count`` neighbours along it. Programs
    run on the mesh itself; this view of it only says where an array lies.

    Args:
      mesh: the devices.
      axis: its name, which the first part keeps.
      count: the size of the second part, a divisor of the axis's.
    """
    sizes: dict[str, int] = {}
    for name, size in mesh.shape.items():
        sizes |= {name: size // count, _COPIES: count} if name == axis else {name: size}
    names = tuple(sizes)
    shape = tuple(sizes.values())
    kinds = (AxisType.Auto,) * len(sizes)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(shape, names, axis_types=kinds)
    return Mesh(mesh.devices.reshape(shape), names, axis_types=kinds)


def has_copies(x: Any) -> bool:
    """Returns whether an array lies on a view of a mesh, see ``with_copies``."""
    where = getattr(x, "sharding", None)
    return isinstance(where, NamedSharding) and _COPIES in where.mesh.axis_names


def without_copies(sharding: NamedSharding) -> NamedSharding:
    """Returns a sharding over a view of a mesh as one over the mesh, whole along the split axis."""
    names = sharding.mesh.axis_names
    axis = names[names.index(_COPIES) - 1]
    parts = (None if part == axis else part for part in sharding.spec)
    return NamedSharding(_without_copies(sharding.mesh), PartitionSpec(*parts))


def _without_copies(mesh: Mesh) -> Mesh:
    """The inverse of ``with_copies``."""
    if _COPIES not in mesh.axis_names:
        return mesh
    at = mesh.axis_names.index(_COPIES)
    sizes = list(mesh.devices.shape)
    sizes[at - 1 : at + 1] = [sizes[at - 1] * sizes[at]]
    names = tuple(name for name in mesh.axis_names if name != _COPIES)
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def use_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """Returns a context in which programs run on a mesh; with None it changes nothing."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def platform_of(mesh: Mesh | None) -> str:
    """Returns "cpu", "gpu" or "tpu": of a mesh, or without one of jax's default device."""
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def on_automatic_axes(tree: Any) -> Any:
    """Returns a tree whose arrays lie on meshes of automatic axes, where they are.

    Explicit axes are the default of ``jax.make_mesh``; the package's programs leave it to the
    compiler how what they compute is split. Nothing is copied.
    """

    def is_explicit(x):
        is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        is_on_mesh = is_array and isinstance(x.sharding, NamedSharding)
        return is_on_mesh and not _is_automatic(x.sharding.mesh)

    def move(x):
        if not is_explicit(x):
            return x
        where = x.sharding
        mesh = Mesh(where.mesh.devices, where.mesh.axis_names)
        return jax.device_put(x, NamedSharding(mesh, where.spec, memory_kind=where.memory_kind))

    return jax.tree.map(move, tree) if any(map(is_explicit, jax.tree.leaves(tree))) else tree


def has_explicit_axes(tree: Any) -> bool:
    """Whether an array, perhaps traced, lies on a mesh with explicit axes."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return any(AxisType.Explicit in (mesh.axis_types or ()) for mesh in meshes)


def _is_automatic(mesh: Mesh | AbstractMesh) -> bool:
    return all(kind == AxisType.Auto for kind in mesh.axis_types)


def mesh_of(tree: Any) -> Mesh | None:
    """Returns the mesh that the arrays of a tree lie on.

    None if they are on one device, or on a mesh that ``make_mesh`` does not make; arrays that are
    sharded in another way are left unchanged.
    """
    where = next((getattr(x, "sharding", None) for x in jax.tree.leaves(tree)), None)
    if not isinstance(where, NamedSharding) or not isinstance(where.mesh, Mesh):
        return None
    has_ours = set(where.mesh.axis_names) <= {*MESH_AXES, _COPIES}
    return _without_copies(where.mesh) if has_ours and _is_automatic(where.mesh) else None
