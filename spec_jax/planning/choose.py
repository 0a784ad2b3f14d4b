"""Which mesh, and which K: what the roofline says of every way to use some chips."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from spec_jax.models.params import head_counts
from spec_jax.planning.chips import Topology
from spec_jax.planning.roofline import DeviceMemory, Prediction, Setting, best, memory


@dataclasses.dataclass(frozen=True)
class Deployment:
    """One way to run a model.

    Attributes:
      topology: the chips.
      setting: batch, context and mesh.
      prediction: of the best K.
      memory: what lies on each device.
    """

    topology: Topology
    setting: Setting
    prediction: Prediction
    memory: DeviceMemory

    @property
    def shortfall(self) -> float:
        """The bytes that a device lacks; 0 if weights and caches fit."""
        return self.memory.shortfall(self.topology.chip)

    @property
    def tok_s(self) -> float:
        """Tokens a second of all rows, at most."""
        return self.prediction.tok_s

    @property
    def row_tok_s(self) -> float:
        """Tokens a second that one user sees, at most."""
        return self.tok_s / self.setting.batch

    @property
    def chip_tok_s(self) -> float:
        """Tokens a second that one chip pays for, at most."""
        return self.tok_s / self.topology.num_chips


def meshes(target: Any, topology: Topology, batch: int) -> list[str]:
    """Returns every mesh of all devices that divides the target's heads and the rows.

    Of key-value heads its tensor axis may also be a multiple, see ``sharding.kv_replication``. The
    tensor axis of GPUs stays within a host, as the links between hosts are slower.

    Where none divides the rows, as with one row on eight devices, the rows are whole on all of them
    and only the heads have to be divided.

    Args:
      target: the target's config.
      topology: the chips.
      batch: B.
    """
    devices = topology.num_devices
    counts = head_counts(target).items()

    def fits(name, count, n):
        return count % n == 0 or (name == "kv_heads" and n % count == 0)

    sizes = [n for n in range(1, topology.host_devices + 1) if devices % n == 0]
    fits_heads = [n for n in sizes if all(fits(name, count, n) for name, count in counts)]
    fits_rows = [n for n in fits_heads if batch % (devices // n) == 0]
    return [f"data:{devices // n},tensor:{n}" for n in fits_rows or fits_heads]


def options(
    target: Any,
    draft: Any,
    tokens: Sequence[float],
    topology: Topology,
    setting: Setting = Setting(),
) -> list[Deployment]:
    """Returns every mesh with its best K: those that fit first, and of these the fastest first.

    Args:
      target: the target's config.
      draft: see ``roofline.round_work``.
      tokens: expected tokens of a round for K = 0, 1, ..., see ``roofline.best``; one alone, 1.0,
        for plain decoding.
      topology: the chips.
      setting: of which the mesh is replaced.
    """
    found = []
    for mesh in meshes(target, topology, setting.batch):
        placed = dataclasses.replace(setting, mesh=mesh)
        prediction = best(target, draft, tokens, topology.chip, placed)
        drafted = draft if prediction.num_draft else None
        found.append(Deployment(topology, placed, prediction, memory(target, drafted, placed)))
    return sorted(found, key=lambda option: (option.shortfall, -option.tok_s))
