"""Tensors of which each part is read when a device needs it.

A part is a tuple with the ``range`` of each dimension. ``read_onto`` reads the parts that the
devices of this process hold, one after the other, so the host never has a whole tensor that is
split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding
from jax.typing import DTypeLike

Part = tuple[range, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor that is read part by part.

    Attributes:
      shape: of the whole tensor.
      dtype: of what is read.
      read: ``(part) -> np.ndarray``.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Part], np.ndarray]

    @classmethod
    def of(cls, array: np.ndarray) -> Tensor:
        """Returns a tensor whose parts are those of an array on the host."""

        def as_slices(part):
            return tuple(slice(r.start, r.stop) for r in part)

        return cls(array.shape, array.dtype, lambda part: array[as_slices(part)])

    @property
    def T(self) -> Tensor:
        """The transposed tensor."""
        return dataclasses.replace(
            self, shape=self.shape[::-1], read=lambda part: self.read(part[::-1]).T
        )

    def astype(self, dtype: DTypeLike) -> Tensor:
        """Returns the tensor in another dtype; each part is cast when it is read."""
        dtype = np.dtype(dtype)
        return dataclasses.replace(
            self, dtype=dtype, read=lambda part: self.read(part).astype(dtype, copy=False)
        )

    def within(self, index: int, rows: range) -> Tensor:
        """Returns some rows of one matrix of a stack of matrices."""

        def read(part: Part) -> np.ndarray:
            chosen = rows[part[0].start : part[0].stop]
            return self.read((range(index, index + 1), chosen, part[1]))[0]

        return Tensor((len(rows), self.shape[2]), self.dtype, read)

    def read_whole(self) -> np.ndarray:
        """Returns the whole tensor."""
        return self.read(tuple(map(range, self.shape)))


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Returns tensors of one shape and dtype, stacked along a new first dimension."""
    first = tensors[0]

    def read(part: Part) -> np.ndarray:
        chosen, *rest = part
        first_row = tensors[chosen[0]].read(tuple(rest))
        array = _room_for(len(chosen), first_row)
        array[0] = first_row
        for row, number in enumerate(chosen[1:], 1):
            array[row] = tensors[number].read(tuple(rest))
        return array

    return Tensor((len(tensors), *first.shape), first.dtype, read)


def _room_for(count: int, array: np.ndarray) -> np.ndarray:
    """Room for several such arrays, laid out as they are: jax transposes faster than NumPy."""
    if array.flags.c_contiguous:
        return np.empty((count, *array.shape), array.dtype)
    room = np.empty((count, *array.shape[::-1]), array.dtype)
    return room.transpose(0, *range(array.ndim, 0, -1))


def part_at(index: Sequence[slice], shape: Sequence[int]) -> Part:
    """Returns the part of an array of this shape that an index of slices stands for."""
    return tuple(range(*s.indices(size)) for s, size in zip(index, shape))


def parts_here(shape: Sequence[int], sharding: Sharding | None) -> dict[Part, list[Any]]:
    """Returns the parts of an array that devices of this process hold, each with its devices.

    Args:
      shape: of the array.
      sharding: where it lies; None: whole, and no device is named.
    """
    if sharding is None:
        return {tuple(map(range, shape)): []}
    parts: dict[Part, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        parts.setdefault(part_at(index, shape), []).append(device)
    return parts


def read_onto(tensor: Tensor, sharding: Sharding | None = None) -> jax.Array:
    """Returns a tensor as an array on its devices.

    Each part is read once and copied to every device of this process that holds it, before the
    next is read.

    Args:
      tensor: what is read.
      sharding: where it is to lie; None: on jax's default device.
    """
    if sharding is None:
        return jnp.asarray(tensor.read_whole(), tensor.dtype)
    arrays = []
    for part, devices in parts_here(tensor.shape, sharding).items():
        content = tensor.read(part)
        # Transfers that are under way would keep the parts before this one on the host.
        arrays += jax.block_until_ready([jax.device_put(content, device) for device in devices])
    return jax.make_array_from_single_device_arrays(tensor.shape, sharding, arrays)


def read_parts(tensor: Tensor, sharding: Sharding | None) -> None:
    """Reads what ``read_onto`` would, for a reader's checks of it, and keeps nothing."""
    for part in parts_here(tensor.shape, sharding):
        tensor.read(part)


def holds_for_parts(
    check: Callable[[Part], bool], shape: Sequence[int], sharding: Sharding | None
) -> bool:
    """Returns whether a check holds for every part of an array, in all processes.

    Args:
      check: ``(part) -> bool``.
      shape: of the array.
      sharding: where the array lies; None: whole in this process, which decides alone.
    """
    holds = all(check(part) for part in parts_here(shape, sharding))
    if sharding is None or sharding.is_fully_addressable:
        return holds
    return bool(multihost_utils.process_allgather(np.asarray(holds)).all())
